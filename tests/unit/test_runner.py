from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.errors import EnvironmentFault, EnvironmentTimeout, InvalidRequest
from app.specs.job import EnvironmentSpec
from workers.tools.environment import JSON
from workers.tools.runner import EnvironmentRunner
from workers.tools.threads import MAX_HANGING

LONG, SHORT = 60.0, 0.2
KINDS = ["odd_process", "odd_thread"]


@pytest.fixture(scope="module")
def runner() -> Iterator[EnvironmentRunner]:
    runner = EnvironmentRunner(["odd_environments"])
    yield runner
    runner.close()


def step(
    runner: EnvironmentRunner, kind: str, text: str, *, job: str = "job", turns_left: int = 1, deadline: float = LONG
) -> JSON:
    args = {"state": {"index": 0}, "text": text, "truncated": False, "turns_left": turns_left}
    return runner.call(f"{kind}-{job}", EnvironmentSpec(type=kind, max_turns=2), 5, "step", args, deadline)


@pytest.mark.parametrize("kind", KINDS)
def test_reset_and_step_come_back_as_json(runner: EnvironmentRunner, kind: str) -> None:
    prompt = runner.call(f"{kind}-job", EnvironmentSpec(type=kind), 5, "reset", {"index": 3, "split": "eval"}, LONG)
    assert prompt["messages"][0]["content"].startswith("eval 3 5 ")
    assert prompt["state"] == {"index": 3}
    outcome = step(runner, kind, "good")
    assert (outcome["reward"], outcome["done"], outcome["flags"]) == (0.5, True, ["fine"])


def test_cpu_environments_run_in_a_process_that_is_used_again(runner: EnvironmentRunner) -> None:
    first, second = (step(runner, "odd_process", "good")["state"]["pid"] for _ in range(2))
    assert first == second != os.getpid()


def test_io_environments_run_here(runner: EnvironmentRunner) -> None:
    assert step(runner, "odd_thread", "good")["state"]["pid"] == os.getpid()


@pytest.mark.parametrize("kind", KINDS)
def test_a_hung_call_times_out_and_its_neighbour_goes_on(runner: EnvironmentRunner, kind: str) -> None:
    step(runner, kind, "good", job="hung")  # made, so that the deadline is of the call alone
    with pytest.raises(EnvironmentTimeout, match=r"within 0\.2 s"):
        step(runner, kind, "hang", job="hung", deadline=SHORT)
    assert step(runner, kind, "good")["reward"] == 0.5
    assert step(runner, kind, "good", job="hung")["reward"] == 0.5


def test_a_hung_process_is_ended(runner: EnvironmentRunner) -> None:
    pid = step(runner, "odd_process", "good", job="ended")["state"]["pid"]
    with pytest.raises(EnvironmentTimeout):
        step(runner, "odd_process", "hang", job="ended", deadline=SHORT)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_job_may_not_leave_threads_behind_without_end() -> None:
    runner = EnvironmentRunner(["odd_environments"])
    for _ in range(MAX_HANGING):
        with pytest.raises(EnvironmentTimeout):
            step(runner, "odd_thread", "hang", deadline=0.01)
    with pytest.raises(EnvironmentFault, match="still hang"):
        step(runner, "odd_thread", "good")
    assert step(runner, "odd_thread", "good", job="neighbour")["reward"] == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_named_with_its_type(runner: EnvironmentRunner, kind: str) -> None:
    with pytest.raises(EnvironmentFault, match="KeyError: 'no such thing'"):
        step(runner, kind, "raise")


@pytest.mark.parametrize(("text", "status"), [("die", "status 7"), ("crash", "signal 9"), ("memory", "MemoryError")])
def test_a_process_that_dies_is_the_environments_fault(runner: EnvironmentRunner, text: str, status: str) -> None:
    with pytest.raises(EnvironmentFault, match=status):
        step(runner, "odd_process", text)
    assert step(runner, "odd_process", "good")["reward"] == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_exit_is_the_environments_fault(runner: EnvironmentRunner, kind: str) -> None:
    with pytest.raises(EnvironmentFault, match="SystemExit: 3"):
        step(runner, kind, "exit")


def test_what_an_environment_prints_is_no_answer(runner: EnvironmentRunner) -> None:
    assert step(runner, "odd_process", "print")["reward"] == 0.5


def test_a_process_sees_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://secret")
    runner = EnvironmentRunner(["odd_environments"])
    try:
        assert "DATABASE_URL" not in step(runner, "odd_process", "secrets")["state"]["variables"]
    finally:
        runner.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nan", "not finite"),
        ("text_reward", "not a number"),
        ("true_reward", "not a number"),
        ("no_reward", "without a reward"),
        ("big_state", "more than"),
        ("object_state", "not JSON"),
        ("list_state", "not a JSON object"),
        ("nan_state", "NaN"),
        ("nul_state", "NUL"),
        ("more_of_nothing", "without an observation"),
        ("assistant", "user or tool"),
        ("broken_message", "not a message"),
    ],
)
def test_a_wrong_answer_is_the_environments_fault(
    runner: EnvironmentRunner, kind: str, text: str, message: str
) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        step(runner, kind, text)


def test_an_endless_answer_is_cut_off(runner: EnvironmentRunner) -> None:
    with pytest.raises(EnvironmentFault, match="longer than"):
        step(runner, "odd_process", "huge_answer")
    assert step(runner, "odd_process", "good")["reward"] == 0.5


def test_another_turn_is_refused_after_the_last(runner: EnvironmentRunner) -> None:
    assert step(runner, "odd_thread", "more")["done"] is False
    with pytest.raises(EnvironmentFault, match="after the last one"):
        step(runner, "odd_thread", "more", turns_left=0)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_parameters_are_an_invalid_request_in_check_and_a_fault_in_a_call(
    runner: EnvironmentRunner, kind: str
) -> None:
    spec = EnvironmentSpec(type=kind, params={"wrong": 1})
    with pytest.raises(InvalidRequest, match="unknown") as caught:
        runner.check(f"{kind}-new", spec, 0, ["train"], LONG)
    assert caught.value.param == "environment.params.wrong"
    with pytest.raises(EnvironmentFault):
        runner.call(f"{kind}-new", spec, 0, "reset", {"index": 0, "split": "train"}, LONG)


def test_check_gives_the_first_prompts(runner: EnvironmentRunner) -> None:
    prompts = runner.check("new", EnvironmentSpec(type="odd_thread"), 0, ["train", "eval"], LONG)
    assert [prompt["messages"][0]["content"].split()[0] for prompt in prompts] == ["train", "eval"]


def test_check_knows_how_many_turns_an_environment_takes(runner: EnvironmentRunner) -> None:
    with pytest.raises(InvalidRequest, match="at least 2 turns") as caught:
        runner.check("new", EnvironmentSpec(type="two_turns", max_turns=1), 0, ["train"], LONG)
    assert caught.value.param == "environment.max_turns"


def test_an_unknown_environment_is_refused_with_the_known_ones(runner: EnvironmentRunner) -> None:
    with pytest.raises(InvalidRequest, match=r"known: calculator, dataset, odd_process, .*reasoning_gym"):
        runner.check("new", EnvironmentSpec(type="nothing"), 0, ["train"], LONG)


def test_many_jobs_at_once_each_get_their_own_answer(runner: EnvironmentRunner) -> None:
    def prompt(index: int) -> str:
        args = {"index": index, "split": "train"}
        return runner.call(f"many-{index}", EnvironmentSpec(type="odd_process"), index, "reset", args, LONG)[
            "messages"
        ][0]["content"]

    with ThreadPoolExecutor(8) as pool:
        prompts = list(pool.map(prompt, range(40)))
    assert [text.split()[:3] for text in prompts] == [["train", str(i), str(i)] for i in range(40)]
