"""Restart budget, command lines and output of supervised processes."""

from __future__ import annotations

import sys
import time

import pytest

from app.supervisor import (
    FIRST_BACKOFF,
    LONGEST_BACKOFF,
    RESTART_WINDOW,
    RESTARTS,
    STEADY_SECONDS,
    KeepsCrashing,
    Restarts,
    Supervisor,
    split_command,
)


def test_backoff_grows_to_a_bound_while_a_process_keeps_ending() -> None:
    restarts = Restarts()
    waits = [restarts.next_start(now=0.0, lived=0.0) for _ in range(RESTARTS)]
    assert waits == sorted(waits, key=lambda wait: wait or 0.0)
    assert waits[-1] == LONGEST_BACKOFF


def test_backoff_is_short_again_after_a_steady_life() -> None:
    restarts = Restarts(backoff=LONGEST_BACKOFF)
    assert restarts.next_start(now=100.0, lived=STEADY_SECONDS) == 100.0 + FIRST_BACKOFF


def test_the_budget_ends_within_its_window_and_returns_after_it() -> None:
    restarts = Restarts()
    for second in range(RESTARTS):
        assert restarts.next_start(now=float(second), lived=0.0) is not None
    assert restarts.next_start(now=RESTART_WINDOW - 1, lived=0.0) is None
    assert restarts.next_start(now=RESTART_WINDOW + 1, lived=0.0) is not None


def test_variables_of_a_command_are_filled_in_and_no_shell_is_involved() -> None:
    command = 'celery -Q rollout$SUFFIX "$MISSING" `id` ; ls $(id)'.replace("$(id)", "'$$(id)'")
    assert split_command(command, {"SUFFIX": ".m"}) == ["celery", "-Q", "rollout.m", "", "`id`", ";", "ls", "$(id)"]


def run_until(supervisor: Supervisor, condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        supervisor.tick()
        time.sleep(0.02)


def test_a_killed_process_is_started_again() -> None:
    with Supervisor(f"sleeper: {sys.executable} -c 'import time; time.sleep(600)'", {}) as supervisor:
        (child,) = supervisor.processes
        first = child.process
        assert first is not None
        first.kill()
        run_until(supervisor, lambda: child.process is not first)
        assert child.process is not None and child.process.poll() is None


def test_a_process_that_keeps_ending_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.supervisor.FIRST_BACKOFF", 0.0)
    monkeypatch.setattr("app.supervisor.LONGEST_BACKOFF", 0.0)
    with (
        Supervisor("broken: false", {}) as supervisor,
        pytest.raises(KeepsCrashing, match="broken ended"),
    ):
        run_until(supervisor, lambda: False)


def test_output_is_printed_line_by_line(capfd: pytest.CaptureFixture[str]) -> None:
    printed = ""

    def both() -> bool:
        nonlocal printed
        printed += capfd.readouterr().out
        return "to out\n" in printed and "to err\n" in printed

    program = "import sys, time; print('to out', flush=True); print('to err', file=sys.stderr); time.sleep(600)"
    with Supervisor(f'talker: {sys.executable} -c "{program}"', {}) as supervisor:
        run_until(supervisor, both)


def test_no_process_outlives_the_supervisor() -> None:
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    with Supervisor(f'deaf: {sys.executable} -c "{program}"', {}) as supervisor:
        (child,) = supervisor.processes
        process = child.process
        assert process is not None
        supervisor.hurry.set()
    assert process.returncode is not None
