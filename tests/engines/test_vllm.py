"""What can go wrong in vLLM and must not reach a neighbour: adapter ids, adapter files, dead processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from itertools import repeat
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from app.errors import InfrastructureFault, ObjectMissing
from tests.engines.conftest import PROMPT, WAIT, Client, ask, make_vllm_engine, reference_logprobs
from tests.tiny import tiny_adapter_folder, tiny_model_folder
from workers.lora import WEIGHTS_FILE, weights_digest
from workers.rollout import vllm_adapters
from workers.rollout import vllm_engine as module
from workers.rollout.engine import Engine
from workers.rollout.vllm_adapters import Staged
from workers.rollout.vllm_engine import VllmEngine
from workers.rollout.vllm_process import VllmOptions, VllmSizes, child_environment
from workers.rollout.vllm_worker import Part

ROOT = Path(__file__).resolve().parents[2]
RESTART = 120  # seconds; a restart needs about ten


@pytest.fixture
def client(vllm_engine: object) -> Iterator[Client]:
    client = Client(vllm_engine())  # type: ignore[operator]
    yield client
    client.end()


@pytest.fixture
def engine(client: Client) -> VllmEngine:
    assert isinstance(client.engine, VllmEngine)
    return client.engine


def processes() -> set[int]:
    """vLLM's, of all engines of this process."""
    children = psutil.Process().children(recursive=True)
    return {c.pid for c in children if c.status() != psutil.STATUS_ZOMBIE and c.name().startswith("VLLM")}


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def staged(engine: VllmEngine, key: str) -> Path:
    return engine._adapters._registered[key].folder / WEIGHTS_FILE


def load_that_never_ends(engine: Engine, folder: Path) -> Future[str]:
    """As if vLLM did not answer."""
    assert isinstance(engine, VllmEngine)
    asked = threading.Event()

    async def never(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    engine._adapters.calls.add = never  # type: ignore[method-assign]
    loading: Future[str] = Future()

    def load() -> None:
        try:
            loading.set_result(engine.load_adapter("never", folder))
        except InfrastructureFault as error:
            loading.set_exception(error)

    threading.Thread(target=load, daemon=True).start()
    assert asked.wait(WAIT)
    return loading


def leave_slot(client: Client, folders: list[Path]) -> None:
    """Loads a, and then so many others that a is neither in a slot nor in vLLM's memory."""
    client.load("a", folders[0])
    for i in range(3):
        client.load(f"other{i}", folders[1 + i % 3])
    assert "a" not in client.engine.stats().resident


def test_what_vllms_processes_inherit_is_not_left_here(model: Path) -> None:
    sizes = VllmSizes(model, torch.float32, rows=1, length=32, adapters=1, max_lora_rank=8, threads=1)
    before = dict(os.environ)
    with child_environment(sizes, VllmOptions()):
        assert "libiomp5" in os.environ["LD_PRELOAD"]
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert dict(os.environ) == before


# --- ids and files


def test_a_used_id_is_found_out(client: Client, engine: VllmEngine, adapters: list[Path]) -> None:
    """vLLM keeps the old weights under an id that it knows, and says nothing."""
    digest = client.load("a", adapters[0])
    used = engine._adapters._loaded["a"].id
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_adapters, "LOADS", 1)
        patch.setattr(engine._adapters, "_ids", repeat(used))
        with pytest.raises(InfrastructureFault, match="other weights than those of adapter b"):
            client.load("b", adapters[1])
    assert engine.load_adapter("a2", adapters[0]) == digest
    engine.unload_adapter("a2")


@pytest.mark.parametrize("broken", ["hangs", "fails"])
def test_an_adapter_whose_slot_was_not_read_is_proved_before_it_serves(
    client: Client, engine: VllmEngine, adapters: list[Path], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    calls, read = engine._adapters.calls, []
    read_slot = calls.read_slot

    async def never(*_: object) -> list[list[Part]]:
        if broken == "fails":
            raise InfrastructureFault("vLLM did not read a slot back")
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def recorded(adapter_id: int, rank: int) -> list[list[Part]]:
        read.append(adapter_id)
        return await read_slot(adapter_id, rank)

    monkeypatch.setattr(module, "LOAD_SECONDS", 1.0)
    monkeypatch.setattr(calls, "read_slot", never)
    with pytest.raises(InfrastructureFault):
        client.load("a", adapters[0])
    assert "a" not in engine.stats().resident
    monkeypatch.setattr(calls, "read_slot", recorded)
    monkeypatch.setattr(module, "LOAD_SECONDS", WAIT)
    client.load("a", adapters[0])
    client.run(ask("r", "a"))
    assert len(read) == 1


def test_ids_are_never_used_twice(
    client: Client, engine: VllmEngine, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = engine._adapters.calls
    names: dict[int, set[str]] = {}
    add = calls.add

    async def recorded(name: str, adapter_id: int, folder: Path) -> None:
        names.setdefault(adapter_id, set()).add(name)
        await add(name, adapter_id, folder)

    monkeypatch.setattr(calls, "add", recorded)
    for turn in range(2):
        for i, folder in enumerate(adapters):
            client.load(f"{turn}-{i}", folder)
            client.run(ask("r", f"{turn}-{i}"))
    assert len(names) >= 8
    assert {len(used) for used in names.values()} == {1}


@pytest.mark.parametrize("damage", ["deleted", "swapped"])
def test_a_damaged_staged_file_is_written_anew(
    client: Client, engine: VllmEngine, model: Path, folders: list[Path], damage: str
) -> None:
    leave_slot(client, folders)
    if damage == "deleted":
        shutil.rmtree(staged(engine, "a").parent)
    else:
        shutil.copy(staged(engine, "other0"), staged(engine, "a"))
    [result] = client.run(ask("r", "a"))
    expected = reference_logprobs(model, folders[0], PROMPT + result.token_ids, len(PROMPT))
    assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_file_that_is_gone_everywhere_fails_its_own_requests_alone(
    client: Client, engine: VllmEngine, folders: list[Path]
) -> None:
    """vLLM would die of it, for everybody, if it were to read the file again."""
    leave_slot(client, folders)
    shutil.rmtree(staged(engine, "a").parent)
    shutil.rmtree(folders[0])
    broken, healthy = client.start(ask("broken", "a")), client.start(ask("healthy", "other0"))
    with pytest.raises(ObjectMissing):
        broken.result(WAIT)
    assert len(healthy.result(WAIT).token_ids) == 12


def test_a_file_swapped_behind_the_check_is_found_out_in_the_slot(
    client: Client, engine: VllmEngine, folders: list[Path]
) -> None:
    leave_slot(client, folders)
    shutil.copy(staged(engine, "other2"), staged(engine, "a"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staged, "intact", True)
        with pytest.raises(InfrastructureFault, match="other weights than those of adapter a"):
            client.run(ask("r", "a"))
    assert len(client.run(ask("healthy", "other0"))[0].token_ids) == 12
    assert len(client.run(ask("again", "a"))[0].token_ids) == 12


def test_a_slot_is_read_whole() -> None:
    """Each tensor must be there to its last row, as the ranks of a tensor parallel group hold it, and nothing else."""
    name = "base_model.model.m.lora_B.weight"
    adapter = Staged("k", Path(), Path(), "", 2, "", {name: (4, 2)})
    adapter.hashes = {(name, (0, 0, 2)): "first", (name, (0, 2, 4)): "second", (name, (0, 0, 4)): "all"}
    assert adapter.is_in([[(name, 0, 0, 4, "all")]])
    assert adapter.is_in([[(name, 0, 0, 2, "first")], [(name, 0, 2, 4, "second")]])
    assert adapter.is_in([[(name, 0, 0, 4, "all"), ("untouched", 0, 0, 4, "")]])
    assert not adapter.is_in([[(name, 0, 0, 2, "first")]])
    assert not adapter.is_in([[]])
    assert not adapter.is_in([[(name, 0, 0, 4, "another")]])
    assert not adapter.is_in([[(name, 0, 0, 4, "all"), ("touched", 0, 0, 4, "something")]])


def test_prefixes_are_found_again(client: Client, adapters: list[Path]) -> None:
    """Also those of an adapter that left its slot in between: the same weights, under another id."""
    for i, folder in enumerate(adapters):
        client.load(f"{i}", folder)
    for i in range(4):
        client.run(ask("r", f"{i}", PROMPT * 5))
    before = client.engine.stats().prefix_hit_rate
    for i in range(4):
        client.run(ask("r", f"{i}", PROMPT * 5))
    assert client.engine.stats().prefix_hit_rate > before


# --- bfloat16, as in production


def test_bfloat16_agrees_with_the_full_forward_and_its_digest_is_of_the_cast(tmp_path: Path) -> None:
    """And `close` fails what has not ended, and ends the processes."""
    folder = tiny_model_folder(tmp_path / "model", torch.bfloat16, num_attention_heads=2, num_key_value_heads=1)
    adapter = tiny_adapter_folder(folder, tmp_path / "adapter", 1, rank=8, alpha=12.0)
    before = processes()
    client = Client(make_vllm_engine(folder, torch.bfloat16))
    digest = client.load("a", adapter)
    assert digest == weights_digest(load_file(adapter / WEIGHTS_FILE), torch.bfloat16)
    results = client.run(*(ask(f"{i}", "a", max_tokens=60, seed=i) for i in range(4)))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False)
    gaps = []
    for result in results:
        ids = torch.tensor([PROMPT + result.token_ids])
        with torch.inference_mode():
            hidden = model.base_model.model.model(ids).last_hidden_state[0, len(PROMPT) - 1 : -1]
            logprobs = (hidden.float() @ base.lm_head.weight.float().T).log_softmax(-1)
        ours = logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0]
        gaps.append((ours - torch.tensor(result.logprobs)).abs().mean())
    gap = float(torch.stack(gaps).mean())
    assert gap < 0.02
    client.hold(ask("live", max_tokens=100))[1].opened.set()
    futures = [client.start(ask(f"{i}", max_tokens=108)) for i in range(40)]
    loading = load_that_never_ends(client.engine, adapter)
    client.engine.close()
    with pytest.raises(InfrastructureFault, match="closed"):
        loading.result(WAIT)
    errors = [future.exception(WAIT) for future in futures]
    assert all(isinstance(error, InfrastructureFault) and "closed" in error.message for error in errors if error)
    assert errors[-1] is not None
    wait_for(lambda: processes() == before, "vLLM's processes are to end")


# --- a base model over several processes


def test_slots_of_a_tensor_parallel_group_are_proved_and_serve(model: Path, adapters: list[Path]) -> None:
    """Two ranks: each holds half of every tensor but of the one key head's, which both have whole. A slot that holds
    other weights in one of them is found out, and `close` leaves neither processes nor tasks."""
    before = processes()
    engine = make_vllm_engine(model, ranks=2)
    assert isinstance(engine, VllmEngine)
    client = Client(engine)
    leave_slot(client, adapters)
    assert engine.load_adapter("a", adapters[0]) == weights_digest(load_file(adapters[0] / WEIGHTS_FILE), torch.float32)
    for key, adapter in {None: None, "other0": adapters[1], "other1": adapters[2], "other2": adapters[3]}.items():
        [result] = client.run(ask("r", key))
        expected = reference_logprobs(model, adapter, PROMPT + result.token_ids, len(PROMPT))
        assert result.logprobs == pytest.approx(expected, abs=1e-4)
    shutil.copy(staged(engine, "other0"), staged(engine, "a"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staged, "intact", True)
        with pytest.raises(InfrastructureFault, match="other weights than those of adapter a"):
            client.run(ask("swapped", "a"))
    client.end()
    engine.close()
    assert not asyncio.all_tasks(engine._loop)
    wait_for(lambda: processes() == before, "vLLM's processes are to end")


# --- death


def kill() -> None:
    """SIGKILL to vLLM's process."""
    [process] = processes()
    os.kill(process, signal.SIGKILL)


def test_live_requests_fail_when_vllm_dies_and_later_ones_are_served(
    client: Client, engine: VllmEngine, model: Path, adapters: list[Path]
) -> None:
    digest = client.load("a", adapters[0])
    old_id, steps = engine._adapters._loaded["a"].id, engine.stats().steps
    live, gate = client.hold(ask("live", "a", max_tokens=100))
    waiting = [client.start(ask(f"{i}", "a", seed=i)) for i in range(8)]
    kill()
    gate.opened.set()
    outcomes = [future.exception(RESTART) for future in [live, *waiting]]
    assert {type(error) for error in outcomes if error} == {InfrastructureFault}
    assert outcomes[-1] is None  # it waited for a row, and then for vLLM
    [after] = client.run(ask("after", "a"))
    assert after.adapter_digest == digest
    expected = reference_logprobs(model, adapters[0], PROMPT + after.token_ids, len(PROMPT))
    assert after.logprobs == pytest.approx(expected, abs=1e-4)
    assert engine._adapters._loaded["a"].id > old_id
    assert engine.stats().steps > steps


def test_a_killed_owner_leaves_no_process_behind(model: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'engines'}"}
    with subprocess.Popen(
        [sys.executable, ROOT / "tests" / "engines" / "orphan.py", model],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        cwd=ROOT,
    ) as owner:
        assert owner.stdout is not None
        told = next(line for line in owner.stdout if line.startswith("children"))
        owner.kill()
    children = [int(pid) for pid in told.split()[1:]]
    assert children
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in children), "vLLM is to end with its owner")


def test_past_the_budget_of_restarts_everything_fails_and_the_owner_is_told(
    client: Client, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of this engine."""
    monkeypatch.setattr(module, "RESTARTS", 0)
    told: list[str] = []
    monkeypatch.setattr(engine, "_on_broken", told.append)
    live, gate = client.hold(ask("live", max_tokens=100))
    waiting = [client.start(ask(f"{i}", max_tokens=100)) for i in range(8)]
    kill()
    gate.opened.set()
    wait([live, *waiting], RESTART)
    with pytest.raises(InfrastructureFault, match="died"):
        waiting[-1].result(0)
    with pytest.raises(InfrastructureFault, match="died"):
        client.run(ask("after"))
    assert len(told) == 1
