"""What every engine promises to its callers."""

from __future__ import annotations

import shutil
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from app.errors import AdapterInvalid, Conflict, InfrastructureFault, InvalidRequest, ObjectMissing
from app.specs.job import LEAST_TEMPERATURE, HyperparametersSpec, LoraSpec
from tests.engines.conftest import LENGTH, PROMPT, WAIT, Client, ask, reference_logprobs
from workers.lora import WEIGHTS_FILE, fresh_adapter, weights_digest, write_adapter
from workers.rollout.engine import GenerationRequest, GenerationResult, Pool
from workers.training.grpo import Trajectory
from workers.training.optimizer import initial_state
from workers.training.trainer import Trainer

# --- what is sampled


@pytest.mark.parametrize("temperature", [0.7, LEAST_TEMPERATURE])
def test_logprobs_equal_transformers_at_a_temperature(
    client: Client, model: Path, adapters: list[Path], temperature: float
) -> None:
    """Mixed adapters and the base model, shared and long prompts, rows that leave at different times."""
    client.load("a", adapters[0])
    client.load("b", adapters[1])
    cases = [("a", PROMPT), ("a", PROMPT), ("b", PROMPT), (None, PROMPT * 5), ("a", PROMPT[:7]), ("b", [*PROMPT, 9])]
    requests = [
        ask(f"{i}", adapter, prompt, max_tokens=8 + i, temperature=temperature, seed=i)
        for i, (adapter, prompt) in enumerate(cases)
    ]
    folders = {"a": adapters[0], "b": adapters[1], None: None}
    for request, result in zip(requests, client.run(*requests), strict=True):
        ids = [*request.token_ids, *result.token_ids]
        expected = reference_logprobs(model, folders[request.adapter], ids, len(request.token_ids), temperature)
        assert result.logprobs == pytest.approx(expected, abs=7e-5 / temperature)


def test_logprobs_under_top_p_are_of_what_was_left(client: Client, model: Path) -> None:
    [result] = client.run(ask("r", top_p=0.6, seed=4))
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([[*PROMPT, *result.token_ids]])
    with torch.inference_mode():
        steps = reference(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].softmax(-1)
    for step, token, logprob in zip(steps, result.token_ids, result.logprobs, strict=True):
        values = step.sort(descending=True).values
        kept = values[: int((values.cumsum(0) < 0.6).sum()) + 1].sum()
        assert logprob == pytest.approx(float((step[token] / kept).log()), abs=1e-3)


def test_engine_and_trainer_agree(client: Client, model: Path, tmp_path: Path) -> None:
    adapter = fresh_adapter(model, LoraSpec(rank=8), seed=3)
    for name, tensor in adapter.tensors.items():
        if ".lora_B." in name:
            tensor.normal_(std=0.05)
    write_adapter(tmp_path, adapter, "tiny")
    client.load("a", tmp_path)
    results = client.run(*(ask(f"{i}", "a", temperature=0.8, seed=i) for i in range(4)))
    group = [
        Trajectory(
            token_ids=PROMPT + result.token_ids,
            loss_mask=[0] * len(PROMPT) + [1] * len(result.token_ids),
            engine_logprobs=[0.0] * len(PROMPT) + result.logprobs,
            reward=float(i),
            index=i,
            truncated=True,
        )
        for i, result in enumerate(results)
    ]
    trainer = Trainer(model, torch.float32, threads=1, microbatch_tokens=1024)
    state = initial_state(adapter.tensors)
    update = trainer.update(adapter, state, [group], HyperparametersSpec(learning_rate=1e-2), 0.8)
    assert update.metrics["logprob_gap"] <= 1e-4


@pytest.mark.parametrize("adapter", [None, "a"])
def test_greedy_is_the_argmax_of_transformers(
    client: Client, model: Path, adapters: list[Path], adapter: str | None
) -> None:
    client.load("a", adapters[0])
    [result] = client.run(ask("greedy", adapter, temperature=0))
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        reference.load_adapter(str(adapters[0]))
    output = reference.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert result.token_ids == output[0, len(PROMPT) :].tolist()
    ids = PROMPT + result.token_ids
    expected = reference_logprobs(model, adapters[0] if adapter else None, ids, len(PROMPT))
    assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_long_prompts_that_come_at_once_get_what_each_gets_alone(client: Client) -> None:
    """More tokens than vLLM takes in a step."""
    asks = [ask(f"{i}", prompt=[40 + i, *PROMPT * 4], max_tokens=20, seed=i) for i in range(4)]
    together = [result.token_ids for result in client.run(*asks)]
    assert together == [client.run(request)[0].token_ids for request in asks]


def test_same_seed_same_tokens_whoever_else_runs(client: Client) -> None:
    [alone] = client.run(ask("alone", seed=5))
    others = [ask(f"other{i}", prompt=PROMPT[i:], seed=i) for i in range(6)]
    assert client.run(*others, ask("again", seed=5))[-1].token_ids == alone.token_ids


def test_different_seeds_give_different_tokens(client: Client) -> None:
    results = client.run(*(ask(f"{seed}", seed=seed) for seed in range(4)))
    assert len({tuple(result.token_ids) for result in results}) == 4


def test_seeds_of_63_bits_are_taken(client: Client) -> None:
    first, second = client.run(ask("1", seed=2**63 - 1), ask("2", seed=2**63 - 1))
    assert first.token_ids == second.token_ids


# --- how a request ends


def test_a_stop_id_ends_the_request_and_is_part_of_the_result(client: Client) -> None:
    [free] = client.run(ask("free", seed=1))
    stop = free.token_ids[4]
    [stopped] = client.run(ask("stopped", seed=1, stop_ids=(stop,)))
    end = free.token_ids.index(stop) + 1
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[:end]
    assert stopped.logprobs == pytest.approx(free.logprobs[:end], abs=1e-4)


def test_the_models_own_end_token_stops_only_who_asks(client: Client, model: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(model).config
    results = client.run(*(ask(f"{seed}", max_tokens=100, seed=seed) for seed in range(8)))
    assert any(config.eos_token_id in result.token_ids[:-1] for result in results)
    assert {(result.finish_reason, len(result.token_ids)) for result in results} == {("length", 100)}


def test_max_tokens_ends_the_request(client: Client) -> None:
    [result] = client.run(ask("one", max_tokens=1))
    assert (result.finish_reason, len(result.token_ids), len(result.logprobs)) == ("length", 1, 1)


def test_a_request_may_fill_its_row_to_the_last_token(client: Client) -> None:
    [result] = client.run(ask("full", max_tokens=LENGTH - len(PROMPT)))
    assert len(result.token_ids) == LENGTH - len(PROMPT)


def test_tokens_are_told_as_they_come(client: Client) -> None:
    told: list[tuple[int, float]] = []
    result = client.start(ask("told"), lambda token, logprob: told.append((token, logprob))).result(WAIT)
    assert told == list(zip(result.token_ids, result.logprobs, strict=True))


def test_a_raising_callback_fails_its_request_alone(client: Client) -> None:
    def fail(token: int, logprob: float) -> None:
        raise ValueError("no")

    broken, healthy = client.start(ask("broken"), fail), client.start(ask("healthy"))
    with pytest.raises(InfrastructureFault, match="no"):
        broken.result(WAIT)
    assert len(healthy.result(WAIT).token_ids) == 12


def test_abort_ends_a_live_request_with_what_it_has(client: Client) -> None:
    future, gate = client.hold(ask("live", max_tokens=100))
    client.engine.abort("live")
    gate.opened.set()
    result = future.result(WAIT)
    assert result.finish_reason == "abort" and 1 <= len(result.token_ids) < 100


def test_abort_ends_a_waiting_request_without_a_token(client: Client) -> None:
    """Five requests for four rows: the last one waits."""
    _, gate = client.hold(ask("0", max_tokens=100))
    for i in range(1, 4):
        client.start(ask(f"{i}", max_tokens=100))
    waiting = client.start(ask("waiting"))
    for name in ("waiting", *"0123"):
        client.engine.abort(name)
    gate.opened.set()
    assert waiting.result(WAIT) == GenerationResult([], [], "abort", None)


def test_abort_of_an_unknown_request_is_ignored(client: Client) -> None:
    client.engine.abort("nobody")
    assert len(client.run(ask("after"))) == 1


# --- what is refused


def test_an_oversize_request_is_refused_with_the_numbers(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"20 prompt tokens and max_tokens 109 make 129, over .* 128"):
        client.run(ask("big", max_tokens=109))


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("token_ids", ask("r", prompt=[])),
        ("token_ids", ask("r", prompt=[64])),
        ("max_tokens", ask("r", max_tokens=0)),
        ("temperature", ask("r", temperature=float("nan"))),
        ("temperature", ask("r", temperature=0.009)),
        ("top_p", ask("r", top_p=0.0)),
        ("seed", ask("r", seed=-1)),
    ],
)
def test_a_bad_request_is_refused_by_field(client: Client, field: str, bad: GenerationRequest) -> None:
    with pytest.raises(InvalidRequest) as error:
        client.run(bad)
    assert error.value.param == field


def test_two_live_requests_cannot_share_an_id(client: Client) -> None:
    first, gate = client.hold(ask("same"))
    second = client.start(ask("same"))
    gate.opened.set()
    assert first.result(WAIT)
    with pytest.raises(InvalidRequest, match="same"):
        second.result(WAIT)


# --- adapters


def test_the_digest_is_that_of_the_adapter_file(client: Client, adapters: list[Path]) -> None:
    """Also where vLLM scales B by 1.5, and where some modules have no LoRA."""
    for key, folder in zip("abc", adapters, strict=False):
        digest = weights_digest(load_file(folder / WEIGHTS_FILE), torch.float32)
        assert client.load(key, folder) == digest
        [result] = client.run(ask(f"of {key}", key))
        assert result.adapter_digest == digest


def test_more_requests_than_rows_and_adapters_than_slots_all_finish(client: Client, adapters: list[Path]) -> None:
    digests = {key: client.load(key, folder) for key, folder in zip("abcd", adapters, strict=True)}
    requests = [ask(f"{i}", "abcd"[i % 4], PROMPT[i % 5 :], 3 + i % 7, seed=i) for i in range(40)]
    for i, (request, result) in enumerate(zip(requests, client.run(*requests), strict=True)):
        assert len(result.token_ids) == 3 + i % 7
        assert result.adapter_digest == digests[str(request.adapter)]


def test_an_adapter_comes_back_into_a_slot_with_its_own_weights(
    client: Client, model: Path, adapters: list[Path]
) -> None:
    for key, folder in zip("abcd", adapters, strict=True):
        client.load(key, folder)
    for key in "abcdabcd":
        [result] = client.run(ask(f"of {key}", key, seed=3))
        expected = reference_logprobs(model, adapters["abcd".index(key)], PROMPT + result.token_ids, len(PROMPT))
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_rows_of_the_base_model_stay_so_beside_as_many_adapters_as_there_are_slots(
    client: Client, model: Path, adapters: list[Path]
) -> None:
    for key, folder in zip("abc", adapters, strict=False):
        client.load(key, folder)
    requests = [ask("base", max_tokens=30, seed=1), ask("0", "a", max_tokens=30), ask("1", "b", max_tokens=30)]
    base = client.run(*requests, ask("2", "c", max_tokens=30, pool="chat"))[0]
    expected = reference_logprobs(model, None, PROMPT + base.token_ids, len(PROMPT))
    assert base.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_key_is_never_used_for_other_weights(client: Client, adapters: list[Path]) -> None:
    client.load("a", adapters[0])
    with pytest.raises(Conflict):
        client.load("a", adapters[1])


def test_an_adapter_that_was_never_loaded_fails_its_request(client: Client) -> None:
    with pytest.raises(ObjectMissing):
        client.run(ask("r", "nobody"))


def test_a_deleted_adapter_folder_harms_nobody_else(client: Client, folders: list[Path]) -> None:
    """Its own requests fail, or are served from the engine's copy of these very weights."""
    digests = {key: client.load(key, folder) for key, folder in zip("abcd", folders, strict=True)}
    shutil.rmtree(folders[0])
    broken, healthy = client.start(ask("broken", "a")), client.start(ask("healthy", "b"))
    error = broken.exception(WAIT)
    assert isinstance(error, ObjectMissing) if error else broken.result().adapter_digest == digests["a"]
    assert healthy.result(WAIT).adapter_digest == digests["b"]


def test_a_swapped_adapter_file_is_never_served_under_the_old_digest(
    client: Client, model: Path, folders: list[Path], adapters: list[Path]
) -> None:
    for key, folder in zip("abcd", folders, strict=True):
        client.load(key, folder)
    shutil.copy(folders[3] / WEIGHTS_FILE, folders[0] / WEIGHTS_FILE)
    future = client.start(ask("swapped", "a"))
    if error := future.exception(WAIT):
        assert isinstance(error, ObjectMissing)
    else:
        result = future.result()
        expected = reference_logprobs(model, adapters[0], PROMPT + result.token_ids, len(PROMPT))
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("value", [float("nan"), 3e38])
def test_an_adapter_that_is_not_finite_is_refused_at_load(client: Client, folders: list[Path], value: float) -> None:
    """As it is, or after its scaling."""
    tensors = load_file(folders[0] / WEIGHTS_FILE)
    next(tensor for name, tensor in tensors.items() if ".lora_B." in name)[0, 0] = value
    save_file(tensors, folders[0] / WEIGHTS_FILE)
    with pytest.raises(AdapterInvalid):
        client.load("a", folders[0])
    assert "a" not in client.engine.stats().resident


def test_an_adapter_of_another_shape_is_refused_at_load(client: Client, folders: list[Path]) -> None:
    tensors = load_file(folders[0] / WEIGHTS_FILE)
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, folders[0] / WEIGHTS_FILE)
    with pytest.raises(AdapterInvalid, match=r"q_proj.* has shape \[8, 63\], not \[8, 64\]"):
        client.load("a", folders[0])


def test_an_adapter_that_overflows_fails_its_own_requests_alone(
    client: Client, model: Path, adapters: list[Path], folders: list[Path]
) -> None:
    """Also those that later get the memory where its keys and values were."""
    tensors = load_file(folders[0] / WEIGHTS_FILE)
    save_file({name: tensor * 1e30 for name, tensor in tensors.items()}, folders[0] / WEIGHTS_FILE)
    client.load("huge", folders[0])
    client.load("b", adapters[1])
    broken = [client.start(ask(f"huge{i}", "huge")) for i in range(2)]
    healthy = [client.start(ask(f"b{i}", "b", seed=i, max_tokens=60)) for i in range(12)]
    for future in broken:
        with pytest.raises(AdapterInvalid, match="huge"):
            future.result(WAIT)
    for future in healthy:
        result = future.result(WAIT)
        expected = reference_logprobs(model, adapters[1], PROMPT + result.token_ids, len(PROMPT))
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_an_unloaded_adapter_serves_its_live_request_to_the_end(client: Client, folders: list[Path]) -> None:
    digest = client.load("a", folders[0])
    future, gate = client.hold(ask("live", "a"))
    client.engine.unload_adapter("a")
    shutil.rmtree(folders[0])
    gate.opened.set()
    result = future.result(WAIT)
    assert (len(result.token_ids), result.adapter_digest) == (12, digest)
    with pytest.raises(ObjectMissing):
        client.run(ask("late", "a"))
    assert client.engine.stats().resident == {}


# --- pools and figures


def test_lower_priority_number_goes_first(client: Client) -> None:
    """One row for four chat requests."""
    _, gate = client.hold(ask("live", pool="chat", max_tokens=100))
    order: list[str] = []
    futures = [
        client.start(ask(name, pool="chat", priority=priority), lambda *_, name=name: order.append(name))
        for name, priority in (("late", 1), ("later", 1), ("first", 0))
    ]
    gate.opened.set()
    wait(futures, WAIT)
    assert list(dict.fromkeys(order)) == ["first", "late", "later"]


@pytest.mark.parametrize(("busy", "other"), [("rollout", "chat"), ("chat", "rollout")])
def test_a_full_pool_does_not_keep_the_other_out(client: Client, busy: Pool, other: Pool) -> None:
    _, gate = client.hold(ask("0", pool=busy, max_tokens=100))
    for i in range(1, 9):
        client.start(ask(f"{i}", pool=busy, max_tokens=100, seed=i))
    future = client.start(ask("other", pool=other))
    gate.opened.set()
    assert len(future.result(WAIT).token_ids) == 12
    stats = client.engine.stats()
    assert (stats.running if busy == "rollout" else stats.chat_running) > 0


def test_adapters_of_a_full_pool_do_not_keep_the_other_out(client: Client, adapters: list[Path]) -> None:
    for key, folder in zip("abcd", adapters, strict=True):
        client.load(key, folder)
    _, gate = client.hold(ask("0", "a", max_tokens=100))
    client.start(ask("1", "b", max_tokens=100))
    waiting = client.start(ask("waits for a slot", "c"))
    future = client.start(ask("chat", "d", pool="chat"))
    gate.opened.set()
    assert len(future.result(WAIT).token_ids) == 12
    assert len(waiting.result(WAIT).token_ids) == 12


def test_the_same_request_gives_the_same_tokens_in_either_pool(client: Client, adapters: list[Path]) -> None:
    client.load("a", adapters[0])
    first, second = client.run(ask("r", "a", seed=3), ask("c", "a", seed=3, pool="chat"))
    assert first.token_ids == second.token_ids
    assert first.adapter_digest == second.adapter_digest


def test_stats_count_what_was_done(client: Client, adapters: list[Path]) -> None:
    digest = client.load("a", adapters[0])
    before = client.engine.stats()
    client.run(*(ask(f"{i}", "a") for i in range(6)))
    stats = client.engine.stats()
    assert (stats.slots, stats.adapter_slots, stats.chat_slots) == (4, 2, 1)
    assert (stats.running, stats.waiting, stats.chat_running, stats.chat_waiting) == (0, 0, 0, 0)
    assert stats.resident == {"a": digest}
    assert stats.generated_tokens - before.generated_tokens == 72
    assert stats.steps > before.steps and stats.busy_seconds > before.busy_seconds and stats.tokens_per_second > 0


def test_stats_tell_who_runs_and_who_waits(client: Client) -> None:
    _, gate = client.hold(ask("0", max_tokens=100))
    for i in range(1, 7):
        client.start(ask(f"{i}", max_tokens=100))
    gate.opened.set()
    client.run(ask("chat", pool="chat"))
    stats = client.engine.stats()
    assert stats.running + stats.waiting <= 7 and stats.running <= 4
