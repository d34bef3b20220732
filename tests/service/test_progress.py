"""What is told of a job's progress at each of its phases."""

from __future__ import annotations

import uuid

import pytest

from app.db import transaction
from app.manager import jobs
from app.manager.progress import JobProgress, job_progress
from app.models import Tenant
from app.models.round import EpisodeState
from tests import by_hand


def progress(*job_ids: uuid.UUID) -> list[JobProgress]:
    with transaction() as session:
        return job_progress(session, job_ids)


def only(job_id: uuid.UUID) -> JobProgress:
    (found,) = progress(job_id)
    return found


def test_a_job_is_validated_then_queued_then_started(tenant: Tenant) -> None:
    job_id = by_hand.submit(tenant)
    assert only(job_id).phase == "validating"
    with transaction() as session:
        jobs.validated(session, job_id)
    assert only(job_id).phase == "queued"
    with transaction() as session:
        jobs.start_queued(session)
    assert only(job_id).phase == "starting"
    by_hand.publish_initial(job_id)
    assert only(job_id).phase == "waiting"


@pytest.mark.parametrize(
    ("at", "phase"),
    [
        ("resetting", "environment"),
        ("generating", "rollout"),
        ("acting", "environment"),
        ("ready", "buffered"),
        ("training", "training"),
    ],
)
def test_a_running_jobs_phase_is_that_of_its_round(tenant: Tenant, at: str, phase: str) -> None:
    job_id = by_hand.start_job(tenant)
    by_hand.to_phase(job_id, at)
    assert only(job_id).phase == phase


def test_the_training_round_is_shown_and_not_the_evaluation_beside_it(tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant, evaluation={"every": 1, "prompts": 3})
    by_hand.finish_round(job_id)
    found = only(job_id)
    assert (found.phase, found.episodes_total) == ("buffered", 4)


def test_episodes_of_the_live_round_are_counted(tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant)
    episode_ids = by_hand.to_state(by_hand.live_round(job_id).id, EpisodeState.ACTING)
    by_hand.act(episode_ids[:3])
    found = only(job_id)
    assert (found.episodes_done, found.episodes_total) == (3, 4)


def test_speed_is_of_the_tokens_of_the_last_seconds(tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant)
    by_hand.to_state(by_hand.live_round(job_id).id, EpisodeState.ACTING)
    assert only(job_id).tokens_per_second == pytest.approx(4 * len(by_hand.GENERATED) / 10)
    by_hand.execute("UPDATE usage SET created_at = now() - interval '11 s'")
    assert only(job_id).tokens_per_second == 0


def test_commits_give_version_reward_and_time(tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant, hyperparameters={"n_steps": 6})
    before = only(job_id)
    assert (before.reward_mean, before.eta_seconds, before.first_step_seconds) == (None, None, None)
    by_hand.step(job_id)
    by_hand.step(job_id)
    by_hand.execute("UPDATE policy_versions SET created_at = now() - (2 - version) * interval '10 s'")
    found = only(job_id)
    assert (found.version, found.n_steps, found.reward_mean) == (2, 6, 0.5)
    assert found.eta_seconds == pytest.approx(40, abs=5)
    assert found.first_step_seconds is not None


def test_queued_jobs_have_places_within_their_tenant(tenant: Tenant) -> None:
    other = by_hand.make_tenant("other")
    ids = [by_hand.queue_job(tenant), by_hand.queue_job(other), by_hand.queue_job(tenant)]
    assert [p.queue_place for p in progress(*ids)] == [1, 1, 2]


def test_ready_rounds_have_places_in_the_order_they_became_ready(tenant: Tenant) -> None:
    first, second = by_hand.start_job(tenant, name="first"), by_hand.start_job(tenant, name="second")
    by_hand.finish_round(second)
    by_hand.finish_round(first)
    assert [(p.name, p.queue_place) for p in progress(first, second)] == [("first", 2), ("second", 1)]


def test_all_live_jobs_are_told_by_default(tenant: Tenant) -> None:
    live, over = by_hand.submit(tenant), by_hand.submit(tenant)
    with transaction() as session:
        jobs.cancel(session, over)
    with transaction() as session:
        assert [p.job_id for p in job_progress(session)] == [live]
    assert only(over).over
