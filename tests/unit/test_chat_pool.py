"""The engine's two pools: rollouts and chat have rows and adapter slots of their own, so that neither starves the
other, and share everything else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from test_torch_engine import PROMPT, WAIT, ask, hold, run

from app.errors import InvalidRequest
from tests.tiny import tiny_adapter_folder, tiny_model_folder
from workers.rollout.engine import GenerationRequest, Pool, SamplingParams
from workers.rollout.torch_engine import TorchEngine

LONG = 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [tiny_adapter_folder(model, root / str(seed), seed) for seed in range(3)]


@pytest.fixture
def engine(model: Path, folders: list[Path]) -> Iterator[TorchEngine]:
    """2 rows and 1 adapter slot for rollouts, 1 of each for chat; adapters a, b, c are known."""
    engine = TorchEngine(
        model, torch.float32, slots=2, adapter_slots=1, kv_tokens=256, max_lora_rank=16, threads=1, chat_slots=1
    )
    for key, folder in zip("abc", folders, strict=True):
        engine.load_adapter(key, folder)
    yield engine
    engine.close()


def request(name: str, pool: Pool, adapter: str | None = None, max_tokens: int = 5, seed: int = 0) -> GenerationRequest:
    return GenerationRequest(name, PROMPT, adapter, SamplingParams(max_tokens, seed=seed), pool=pool)


def fill(engine: TorchEngine, pool: Pool, count: int, adapter: str | None = None) -> None:
    """Takes all rows of a pool, and more, with requests that are long."""
    _, gate = hold(engine, request(f"{pool}0", pool, adapter, LONG))
    for i in range(1, count):
        engine.generate(request(f"{pool}{i}", pool, adapter, LONG, seed=i))
    gate.opened.set()


@pytest.mark.parametrize(("busy", "other"), [("rollout", "chat"), ("chat", "rollout")])
def test_adapters_of_a_full_pool_do_not_keep_the_other_out(engine: TorchEngine, busy: Pool, other: Pool) -> None:
    fill(engine, busy, 1, "a")
    engine.generate(request("waits for the slot", busy, "c", LONG))
    future = engine.generate(request("other", other, "b"))
    assert len(future.result(WAIT).token_ids) == 5


def test_a_pool_never_takes_more_rows_than_its_own(engine: TorchEngine) -> None:
    fill(engine, "chat", 3)
    run(engine, request("beside", "rollout"))
    stats = engine.stats()
    assert (stats.chat_running, stats.chat_waiting) == (1, 2)
    assert (stats.slots, stats.chat_slots, stats.adapter_slots) == (2, 1, 1)


def test_an_aborted_chat_request_frees_its_row(engine: TorchEngine) -> None:
    first, gate = hold(engine, request("first", "chat", max_tokens=LONG))
    second = engine.generate(request("second", "chat"))
    engine.abort("first")
    gate.opened.set()
    assert len(second.result(WAIT).token_ids) == 5
    assert first.result(WAIT).finish_reason == "abort"


def test_all_rows_of_both_pools_at_once(engine: TorchEngine) -> None:
    futures = [engine.generate(request(f"r{i}", "rollout", "a", seed=i)) for i in range(6)]
    futures += [engine.generate(request(f"c{i}", "chat", "b", seed=i)) for i in range(6)]
    wait(futures, WAIT)
    assert [len(future.result(0).token_ids) for future in futures] == [5] * 12


def test_an_engine_without_chat_rows_refuses_chat(model: Path) -> None:
    engine = TorchEngine(model, torch.float32, slots=1, adapter_slots=1, kv_tokens=128, max_lora_rank=16, threads=1)
    try:
        with pytest.raises(InvalidRequest, match="chat"):
            engine.generate(request("r", "chat")).result(WAIT)
        assert len(run(engine, ask("still"))) == 1
    finally:
        engine.close()
