"""Verdicts on made series: each has one cause."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from app.manager.health import EARLY, EvalPoint, Facts, Health, Verdict, diagnose, slope_t
from app.manager.progress import Phase
from app.models.job import JobState, Wanted
from app.models.worker import WorkerKind


def updates(rewards: Sequence[float], **others: float) -> list[dict[str, float]]:
    healthy = {"zero_variance_share": 0.2, "truncated_share": 0.0, "logprob_gap": 0.035, "entropy": 1.0}
    return [healthy | {"reward_mean": reward} | others for reward in rewards]


def noisy(levels: Sequence[float], noise: float = 0.02) -> list[float]:
    random = Random(1)
    return [level + random.uniform(-noise, noise) for level in levels]


def running(steps: Sequence[dict[str, float]] = (), **changes: Any) -> Health:
    fields = {"state": JobState.RUNNING, "n_steps": 50, "version": len(steps), "steps": steps}
    return diagnose(Facts(**(fields | changes)))


RISING = noisy([0.1 + 0.02 * i for i in range(20)])
LEVEL = noisy([0.3] * 20)
FALLEN = noisy([0.5] * 10 + [0.1] * 6)


def test_rewards_that_rise_are_learning() -> None:
    found = running(updates(RISING))
    assert (found.verdict, found.tone) == (Verdict.LEARNING, "good")
    assert f"{RISING[0]:.3f}" in found.reason


def test_a_level_reward_is_steady_and_says_what_to_try() -> None:
    found = running(updates(LEVEL))
    assert found.verdict == Verdict.STEADY
    assert "learning_rate" in found.advice


def test_evaluations_that_rise_are_learning_where_rewards_are_level() -> None:
    evals = [EvalPoint(v, 0.1 * v, 0.1 * v) for v in range(6)]
    found = running(updates(LEVEL), evals=evals)
    assert found.verdict == Verdict.LEARNING
    assert "0% at version 0, 50% at version 5" in found.reason


def test_few_updates_are_too_early_to_tell() -> None:
    assert running(updates([0.1] * (EARLY - 1))).verdict == Verdict.EARLY


def test_no_update_yet_is_just_started() -> None:
    assert running().title == "Just started"


def test_groups_without_variance_are_no_signal() -> None:
    found = running(updates([0.0] * 6, zero_variance_share=1.0))
    assert (found.verdict, found.tone) == (Verdict.NO_SIGNAL, "bad")
    assert "100%" in found.reason


def test_groups_without_variance_at_full_reward_are_solved() -> None:
    assert running(updates([1.0] * 6, zero_variance_share=1.0)).verdict == Verdict.SOLVED


def test_groups_without_variance_because_answers_are_cut_off_are_truncated() -> None:
    found = running(updates([0.0] * 6, zero_variance_share=1.0, truncated_share=0.9))
    assert found.verdict == Verdict.TRUNCATED


def test_a_reward_that_falls_under_half_of_its_best_has_collapsed() -> None:
    found = running(updates(FALLEN))
    assert (found.verdict, found.tone) == (Verdict.COLLAPSED, "bad")
    assert "clone" in found.advice


def test_a_collapse_tells_of_entropy_that_fell() -> None:
    steps = updates(FALLEN)
    for step in steps[-6:]:
        step["entropy"] = 0.01
    assert "Entropy fell from 1.00 to 0.01" in running(steps).reason


def test_a_noisy_reward_has_not_collapsed() -> None:
    rewards = [0.4, 0.1, 0.5, 0.2, 0.4, 0.1, 0.5, 0.0, 0.4, 0.1, 0.2, 0.2]
    assert running(updates(rewards)).verdict == Verdict.STEADY


def test_the_collapse_names_the_best_version() -> None:
    rewards = [0.1, 0.1, 0.1, 0.6, 0.7, 0.6, 0.1, 0.1, 0.1]
    found = running(updates(rewards), version=109)
    assert "Use the adapter of version 105" in found.advice


def test_answers_that_reach_the_limit_are_truncated() -> None:
    found = running(updates(LEVEL, truncated_share=0.6))
    assert (found.verdict, found.tone) == (Verdict.TRUNCATED, "warn")
    assert "max_tokens" in found.advice


def test_flags_of_the_tool_are_tool_errors() -> None:
    found = running(updates(LEVEL), flags={"malformed_call": 0.5, "no_answer": 0.1})
    assert found.verdict == Verdict.TOOL_ERRORS
    assert "50% calls that are not valid" in found.reason


def test_a_flag_that_is_no_error_is_not_one() -> None:
    assert running(updates(LEVEL), flags={"polite": 1.0}).verdict == Verdict.STEADY


def test_while_it_learns_tool_errors_are_a_remark() -> None:
    found = running(updates(RISING), flags={"malformed_call": 0.4})
    assert found.verdict == Verdict.LEARNING
    assert "40% calls that are not valid" in found.advice


def test_engine_and_trainer_that_disagree_come_before_everything() -> None:
    found = running(updates(RISING, logprob_gap=0.5, truncated_share=0.9))
    assert (found.verdict, found.tone) == (Verdict.LOGPROB_GAP, "bad")


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        (Phase.VALIDATING, WorkerKind.TOOLS),
        (Phase.STARTING, WorkerKind.TRAINING),
        (Phase.WAITING, WorkerKind.ROLLOUT),
        (Phase.BUFFERED, WorkerKind.TRAINING),
    ],
)
def test_a_stage_without_a_worker_is_waiting(phase: Phase, kind: WorkerKind) -> None:
    found = running(updates(RISING), phase=phase, workers=frozenset(WorkerKind) - {kind})
    assert (found.verdict, found.tone) == (Verdict.WAITING, "bad")
    assert f"no {kind} worker" in found.title


@pytest.mark.parametrize(
    ("phase", "title"),
    [
        (Phase.VALIDATING, "Checking files and prompts"),
        (Phase.STARTING, "Waiting for its first adapter"),
        (Phase.WAITING, "Waiting for engine slots"),
        (Phase.BUFFERED, "Waiting for training"),
    ],
)
def test_before_the_first_update_it_says_what_it_waits_for(phase: Phase, title: str) -> None:
    assert running(phase=phase).title == title


def test_a_queued_job_names_the_quota_and_its_place() -> None:
    facts = Facts(JobState.QUEUED, phase=Phase.QUEUED, running_jobs=4, max_running_jobs=4, queue_place=2)
    found = diagnose(facts)
    assert found.verdict == Verdict.WAITING
    assert "4 of at most 4" in found.reason
    assert "number 2 in line" in found.reason


def test_a_suspended_tenants_job_waits() -> None:
    assert running(updates(RISING), suspended=True).verdict == Verdict.WAITING


def test_a_failed_job_tells_its_error_and_what_to_do() -> None:
    found = diagnose(Facts(JobState.FAILED, phase=Phase.FAILED, error_code="no_signal", error_message="10 rounds …"))
    assert (found.verdict, found.reason) == (Verdict.FAILED, "10 rounds …")
    assert "group_size" in found.advice


def test_a_job_that_is_to_pause_is_pausing() -> None:
    assert running(updates(RISING), wanted=Wanted.PAUSE).title == "Pausing"


@pytest.mark.parametrize(
    ("state", "verdict"), [(JobState.PAUSED, Verdict.PAUSED), (JobState.CANCELLED, Verdict.CANCELLED)]
)
def test_jobs_that_stand_still(state: JobState, verdict: Verdict) -> None:
    assert diagnose(Facts(state, phase=Phase(state))).verdict == verdict


def test_a_finished_job_tells_its_course() -> None:
    found = diagnose(Facts(JobState.SUCCEEDED, phase=Phase.SUCCEEDED, version=20, n_steps=20, steps=updates(RISING)))
    assert (found.verdict, found.tone) == (Verdict.SUCCEEDED, "good")


def test_a_finished_job_that_collapsed_says_so() -> None:
    found = diagnose(Facts(JobState.SUCCEEDED, phase=Phase.SUCCEEDED, version=16, n_steps=16, steps=updates(FALLEN)))
    assert (found.verdict, found.tone) == (Verdict.SUCCEEDED, "warn")
    assert found.title == "Finished, but: the reward collapsed"


@pytest.mark.parametrize(("values", "t"), [([1, 2, 3, 4], float("inf")), ([2, 2, 2], 0.0), ([3, 2, 1], float("-inf"))])
def test_exact_lines_have_a_slope_without_error(values: list[float], t: float) -> None:
    assert slope_t(values) == t
