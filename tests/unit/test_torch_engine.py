"""The torch engine as its callers see it, on a tiny random model in float32."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import count
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from app.errors import AdapterInvalid, InfrastructureFault, InvalidRequest, ObjectMissing
from tests.tiny import tiny_adapter_folder, tiny_model_folder
from workers.lora import weights_digest
from workers.rollout import torch_engine
from workers.rollout.engine import GenerationRequest, GenerationResult, SamplingParams
from workers.rollout.torch_engine import TorchEngine

PROMPT = list(range(4, 24))
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


def ask(
    name: str, adapter: str | None = None, prompt: list[int] = PROMPT, max_tokens: int = 12, **sampling: object
) -> GenerationRequest:
    return GenerationRequest(name, prompt, adapter, SamplingParams(max_tokens, **sampling))  # type: ignore[arg-type]


def run(engine: TorchEngine, *requests: GenerationRequest) -> list[GenerationResult]:
    futures = [engine.generate(request) for request in requests]
    return [future.result(WAIT) for future in futures]


class Gate:
    """A token callback that reports the first token and then blocks the decode thread until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, token: int, logprob: float) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT)


def hold(engine: TorchEngine, request: GenerationRequest) -> tuple[Future[GenerationResult], Gate]:
    """Starts a request and stops the engine inside it, so that what is asked next arrives at one time."""
    gate = Gate()
    future = engine.generate(request, gate)
    assert gate.reached.wait(WAIT)
    return future, gate


def reference_logprobs(
    model: Path, folder: Path | None, ids: list[int], prompt: int, temperature: float
) -> list[float]:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if folder is not None:
        reference = PeftModel.from_pretrained(reference, folder)
    with torch.inference_mode():
        logprobs = (reference(input_ids=torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
    return [float(logprobs[i - 1, ids[i]]) for i in range(prompt, len(ids))]


def test_logprobs_equal_transformers_at_a_temperature(engine: TorchEngine, model: Path, made: list[Path]) -> None:
    """Mixed adapters, a shared prompt, a long one, and rows that leave at different times."""
    engine.load_adapter("a", made[0])
    engine.load_adapter("b", made[1])
    requests = [
        ask(f"{i}", adapter, prompt, max_tokens=8 + i, temperature=0.7, seed=i)
        for i, (adapter, prompt) in enumerate(
            [("a", PROMPT), ("a", PROMPT), ("b", PROMPT), (None, PROMPT * 5), ("a", PROMPT[:7]), ("b", PROMPT + [9])]
        )
    ]
    folders = {"a": made[0], "b": made[1], None: None}
    for request, result in zip(requests, run(engine, *requests), strict=True):
        ids = [*request.token_ids, *result.token_ids]
        expected = reference_logprobs(model, folders[request.adapter], ids, len(request.token_ids), 0.7)
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


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


def test_greedy_is_the_argmax_of_transformers(engine: TorchEngine, model: Path) -> None:
    [result] = run(engine, ask("greedy", temperature=0))
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    output = reference.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert result.token_ids == output[0, len(PROMPT) :].tolist()


def test_same_seed_same_tokens_whoever_else_runs(engine: TorchEngine) -> None:
    [alone] = run(engine, ask("alone", seed=5))
    others = [ask(f"other{i}", prompt=PROMPT[i:], seed=i) for i in range(6)]
    assert run(engine, *others, ask("again", seed=5))[-1].token_ids == alone.token_ids


def test_different_seeds_give_different_tokens(engine: TorchEngine) -> None:
    results = run(engine, *(ask(f"{seed}", seed=seed) for seed in range(4)))
    assert len({tuple(result.token_ids) for result in results}) == 4


def test_a_stop_id_ends_the_request_and_is_part_of_the_result(engine: TorchEngine) -> None:
    [free] = run(engine, ask("free", seed=1))
    stop = free.token_ids[4]
    [stopped] = run(engine, ask("stopped", seed=1, stop_ids=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_max_tokens_ends_the_request(engine: TorchEngine) -> None:
    [result] = run(engine, ask("one", max_tokens=1))
    assert (result.finish_reason, len(result.token_ids), len(result.logprobs)) == ("length", 1, 1)


def test_a_request_may_fill_its_row_to_the_last_token(engine: TorchEngine) -> None:
    [result] = run(engine, ask("full", max_tokens=engine.max_length - len(PROMPT)))
    assert len(result.token_ids) == engine.max_length - len(PROMPT)


def test_tokens_are_told_as_they_come(engine: TorchEngine) -> None:
    told: list[tuple[int, float]] = []
    result = engine.generate(ask("told"), lambda token, logprob: told.append((token, logprob))).result(WAIT)
    assert told == list(zip(result.token_ids, result.logprobs, strict=True))


def test_abort_ends_a_live_request_with_what_it_has(engine: TorchEngine) -> None:
    future, gate = hold(engine, ask("live", max_tokens=100))
    engine.abort("live")
    gate.opened.set()
    result = future.result(WAIT)
    assert result.finish_reason == "abort" and 1 <= len(result.token_ids) < 100


def test_abort_ends_a_waiting_request_without_a_token(engine: TorchEngine) -> None:
    _, gate = hold(engine, ask("live", max_tokens=100))
    engine.abort("live")
    waiting = engine.generate(ask("waiting"))
    engine.abort("waiting")
    gate.opened.set()
    assert waiting.result(WAIT) == GenerationResult([], [], "abort", None)


def test_abort_of_an_unknown_request_is_ignored(engine: TorchEngine) -> None:
    engine.abort("nobody")
    assert len(run(engine, ask("after"))) == 1


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


def test_an_oversize_request_is_refused_with_the_numbers(engine: TorchEngine) -> None:
    future = engine.generate(ask("big", max_tokens=109))
    with pytest.raises(InvalidRequest, match=r"20 prompt tokens and max_tokens 109 make 129, over .* 128"):
        future.result(WAIT)


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("token_ids", ask("r", prompt=[])),
        ("token_ids", ask("r", prompt=[64])),
        ("max_tokens", ask("r", max_tokens=0)),
        ("temperature", ask("r", temperature=float("nan"))),
        ("top_p", ask("r", top_p=0.0)),
        ("seed", ask("r", seed=-1)),
    ],
)
def test_a_bad_request_is_refused_by_field(engine: TorchEngine, field: str, request_: GenerationRequest) -> None:
    with pytest.raises(InvalidRequest) as error:
        engine.generate(request_).result(WAIT)
    assert error.value.param == field


def test_two_live_requests_cannot_share_an_id(engine: TorchEngine) -> None:
    first, gate = hold(engine, ask("same"))
    second = engine.generate(ask("same"))
    gate.opened.set()
    assert first.result(WAIT)
    with pytest.raises(InvalidRequest, match="same"):
        second.result(WAIT)


def test_an_adapter_that_was_never_loaded_fails_its_request(engine: TorchEngine) -> None:
    with pytest.raises(ObjectMissing):
        engine.generate(ask("r", "nobody")).result(WAIT)


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


def test_an_adapter_that_overflows_fails_its_own_requests_alone(
    engine: TorchEngine, model: Path, folders: list[Path]
) -> None:
    """Also those that later get the row where its keys and values were."""
    tensors = load_file(folders[0] / "adapter_model.safetensors")
    save_file({name: tensor * 1e30 for name, tensor in tensors.items()}, folders[0] / "adapter_model.safetensors")
    engine.load_adapter("huge", folders[0])
    engine.load_adapter("b", folders[1])
    broken = [engine.generate(ask(f"huge{i}", "huge")) for i in range(2)]
    healthy = [engine.generate(ask(f"b{i}", "b", seed=i)) for i in range(6)]
    for future in broken:
        with pytest.raises(AdapterInvalid, match="huge"):
            future.result(WAIT)
    for future in healthy:
        result = future.result(WAIT)
        expected = reference_logprobs(model, folders[1], PROMPT + result.token_ids, len(PROMPT), 1.0)
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_raising_callback_fails_its_request_alone(engine: TorchEngine) -> None:
    def fail(token: int, logprob: float) -> None:
        raise ValueError("no")

    broken, healthy = engine.generate(ask("broken"), fail), engine.generate(ask("healthy"))
    with pytest.raises(InfrastructureFault, match="no"):
        broken.result(WAIT)
    assert len(healthy.result(WAIT).token_ids) == 12


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


def test_an_unloaded_adapter_serves_its_live_request_to_the_end(engine: TorchEngine, made: list[Path]) -> None:
    digest = engine.load_adapter("a", made[0])
    future, gate = hold(engine, ask("live", "a"))
    engine.unload_adapter("a")
    gate.opened.set()
    result = future.result(WAIT)
    assert (len(result.token_ids), result.adapter_digest) == (12, digest)
    assert engine.stats().resident == {}


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


def test_stats_count_what_was_done(engine: TorchEngine, made: list[Path]) -> None:
    digest = engine.load_adapter("a", made[0])
    run(engine, ask("1", "a"), ask("2", "a"))
    stats = engine.stats()
    assert (stats.slots, stats.adapter_slots, stats.running, stats.waiting) == (4, 2, 0, 0)
    assert stats.resident == {"a": digest}
    assert stats.generated_tokens == 24
    assert stats.steps >= 11 and stats.busy_seconds > 0 and stats.tokens_per_second > 0
