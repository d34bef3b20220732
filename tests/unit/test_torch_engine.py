"""The torch engine as its callers see it, on a tiny random model in float32."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.errors import AdapterInvalid, InfrastructureFault, ObjectMissing
from tests.engines.conftest import PROMPT, Gate, ask, reference_logprobs
from tests.tiny import tiny_adapter_folder, tiny_model_folder
from workers.lora import weights_digest
from workers.rollout import torch_engine
from workers.rollout.engine import GenerationRequest, GenerationResult, SamplingParams
from workers.rollout.torch_engine import TorchEngine

WAIT = 30  # seconds; no test needs them


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [tiny_adapter_folder(model, root / str(seed), seed) for seed in range(3)]


@pytest.fixture
def folders(made: list[Path], tmp_path: Path) -> list[Path]:
    """Copies, for tests that break them."""
    return [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in made]


@pytest.fixture
def engine(model: Path) -> Iterator[TorchEngine]:
    """4 rows of 128 tokens, 2 adapter slots."""
    engine = TorchEngine(model, torch.float32, slots=4, adapter_slots=2, kv_tokens=512, max_lora_rank=16, threads=1)
    yield engine
    engine.close()


def run(engine: TorchEngine, *requests: GenerationRequest) -> list[GenerationResult]:
    futures = [engine.generate(request) for request in requests]
    return [future.result(WAIT) for future in futures]


def hold(engine: TorchEngine, request: GenerationRequest) -> tuple[Future[GenerationResult], Gate]:
    """Starts a request and stops the engine inside it, so that what is asked next arrives at one time."""
    gate = Gate()
    future = engine.generate(request, gate)
    assert gate.reached.wait(WAIT)
    return future, gate


def test_a_prompt_over_several_chunks_gives_the_same_logprobs(
    engine: TorchEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine, "PREFILL_TOKENS", 16)
    [result] = run(engine, ask("long", prompt=PROMPT * 4))
    expected = reference_logprobs(model, None, PROMPT * 4 + result.token_ids, 80, 1.0)
    assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_prompts_with_a_common_prefix_give_the_same_logprobs(engine: TorchEngine, model: Path) -> None:
    """The second is held one wave and copies the prefix; the third arrives while the first is live."""
    first, gate = hold(engine, ask("first", prompt=PROMPT + [30], max_tokens=40))
    futures = [engine.generate(ask(f"{i}", prompt=PROMPT + [31 + i, 40])) for i in range(2)]
    gate.opened.set()
    for i, future in enumerate(futures):
        result = future.result(WAIT)
        expected = reference_logprobs(model, None, [*PROMPT, 31 + i, 40, *result.token_ids], 22, 1.0)
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_more_requests_than_rows_all_finish(engine: TorchEngine) -> None:
    results = run(engine, *(ask(f"{i}", prompt=PROMPT[i % 5 :], max_tokens=3 + i % 7, seed=i) for i in range(40)))
    assert [len(result.token_ids) for result in results] == [3 + i % 7 for i in range(40)]


def test_more_adapters_than_slots_all_finish_with_their_own_digest(engine: TorchEngine, made: list[Path]) -> None:
    digests = {key: engine.load_adapter(key, folder) for key, folder in zip("abc", made, strict=True)}
    requests = [ask(f"{i}", "abc"[i % 3], seed=i) for i in range(12)]
    for request, result in zip(requests, run(engine, *requests), strict=True):
        assert result.adapter_digest == digests[str(request.adapter)]


def test_digest_of_a_result_is_that_of_the_adapter_file(engine: TorchEngine, made: list[Path]) -> None:
    engine.load_adapter("a", made[0])
    [result] = run(engine, ask("r", "a"))
    tensors = load_file(made[0] / "adapter_model.safetensors")
    assert result.adapter_digest == weights_digest(tensors, torch.float32)


def test_lower_priority_number_goes_first(engine: TorchEngine) -> None:
    _, gate = hold(engine, ask("live"))
    order: list[str] = []
    futures = []
    for name, priority in (("late", 1), ("later", 1), ("first", 0)):
        request = GenerationRequest(name, PROMPT[::-1] * 5, None, SamplingParams(28), priority)
        futures.append(engine.generate(request, lambda token, logprob, name=name: order.append(name)))
    gate.opened.set()
    for future in futures:
        future.result(WAIT)
    assert list(dict.fromkeys(order)) == ["first", "late", "later"]


def test_a_deleted_adapter_file_fails_that_request_alone(engine: TorchEngine, folders: list[Path]) -> None:
    for key, folder in zip("abc", folders, strict=True):
        engine.load_adapter(key, folder)  # two slots: `a` is out again
    shutil.rmtree(folders[0])
    broken, healthy = engine.generate(ask("broken", "a")), engine.generate(ask("healthy", "b"))
    with pytest.raises(ObjectMissing):
        broken.result(WAIT)
    assert len(healthy.result(WAIT).token_ids) == 12


def test_nan_adapter_is_refused_at_load(engine: TorchEngine, folders: list[Path]) -> None:
    tensors = load_file(folders[0] / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, folders[0] / "adapter_model.safetensors")
    with pytest.raises(AdapterInvalid):
        engine.load_adapter("a", folders[0])


def test_an_unexpected_fault_fails_the_live_requests_and_the_engine_goes_on(
    engine: TorchEngine, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.load_adapter("a", made[0])

    def fail(*_: object) -> None:
        raise RuntimeError("broken step")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_decode", fail)
        with pytest.raises(InfrastructureFault, match="broken step"):
            engine.generate(ask("live", "a")).result(WAIT)
    assert len(run(engine, ask("after", "a"))[0].token_ids) == 12


def test_close_fails_what_has_not_ended(engine: TorchEngine) -> None:
    future, gate = hold(engine, ask("live", max_tokens=100))
    waiting = engine.generate(ask("waiting"))
    closing = threading.Thread(target=engine.close)
    closing.start()
    probes = (engine.generate(ask(f"probe{i}")) for i in count())
    refused = next(probe for probe in probes if probe.done())
    gate.opened.set()
    closing.join(WAIT)
    for unfinished in (future, waiting, refused):
        with pytest.raises(InfrastructureFault, match="closed"):
            unfinished.result(WAIT)
