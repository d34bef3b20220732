"""The sweep: whatever message, worker or count is lost, work goes on, once, within its budget."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from app import broker
from app.db import transaction
from app.manager import buffer, episodes, jobs, recovery
from app.manager.jobs import DOORBELL_BUDGET
from app.models import Tenant
from app.models.job import JobState
from app.models.round import EpisodeState, RoundState
from app.settings import Settings
from tests import by_hand
from tests.service.conftest import Bells

RESETTING, GENERATING, ACTING = EpisodeState.RESETTING, EpisodeState.GENERATING, EpisodeState.ACTING


@pytest.fixture
def job_id(tenant: Tenant) -> uuid.UUID:
    return by_hand.start_job(tenant)


@pytest.fixture
def round_id(job_id: uuid.UUID) -> int:
    return by_hand.live_round(job_id).id


def kill(worker: str) -> None:
    """The worker stopped an hour ago, and the database has been up for longer than a worker may be silent."""
    by_hand.execute("UPDATE workers SET seen_at = now() - interval '1 h' WHERE name = :w", w=worker)


@pytest.fixture
def short_silence(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database of the tests may have started just now; nobody is dead for the first moments of it."""
    monkeypatch.setattr(settings, "worker_dead_seconds", 0.1)


# --- lost messages


def test_an_idle_sweep_does_nothing(hand: None, bells: Bells) -> None:
    assert recovery.sweep() == {}
    assert bells == []


def test_a_sweep_leaves_fresh_work_alone(round_id: int, bells: Bells) -> None:
    by_hand.to_state(round_id, GENERATING)
    bells.clear()
    assert recovery.sweep() == {}
    assert bells == []


@pytest.mark.parametrize(
    ("state", "task"), [(RESETTING, broker.RESET), (GENERATING, broker.GENERATE), (ACTING, broker.STEP)]
)
def test_a_lost_message_is_sent_again(round_id: int, bells: Bells, state: EpisodeState, task: str) -> None:
    found = by_hand.to_state(round_id, state)
    groups = sorted({e.group_id for e in by_hand.episodes_of(round_id)})
    by_hand.make_bells_old()
    bells.clear()
    recovery.sweep()
    assert bells == [(task, {"group_ids": groups} if state == RESETTING else {"episode_ids": found})]


def test_a_message_that_was_sent_again_is_not_sent_at_every_sweep(round_id: int, bells: Bells) -> None:
    by_hand.to_state(round_id, GENERATING)
    by_hand.make_bells_old()
    recovery.sweep()
    bells.clear()
    assert recovery.sweep() == {}
    assert bells == []


def test_held_work_is_not_rung_for(round_id: int, bells: Bells) -> None:
    by_hand.claim(by_hand.to_state(round_id, GENERATING), GENERATING)
    by_hand.make_bells_old()
    bells.clear()
    recovery.sweep()
    assert bells == []


def test_a_lost_training_bell_is_rung_again(job_id: uuid.UUID, bells: Bells) -> None:
    by_hand.finish_round(job_id)
    by_hand.make_bells_old()
    bells.clear()
    recovery.sweep()
    assert bells == [(broker.TRAIN, {})]


def test_work_that_was_given_back_is_rung_for_after_a_while(round_id: int, bells: Bells) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    with transaction() as session:
        claims = episodes.claim(session, found, GENERATING, by_hand.ROLLOUT.claimant, by_hand.LEASE)
        episodes.give_back(session, claims, "infrastructure", "again")
    bells.clear()
    recovery.sweep()
    assert bells == []
    by_hand.make_bells_old()
    recovery.sweep()
    assert bells == [(broker.GENERATE, {"episode_ids": found})]


# --- lost workers


def test_work_with_an_expired_lease_is_free_and_rung_for(round_id: int, bells: Bells) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    by_hand.claim(found, GENERATING)
    by_hand.expire_leases()
    bells.clear()
    done = recovery.sweep()
    assert done == {"expire_episode_leases": 4, "ring_episodes": 4}
    assert bells == [(broker.GENERATE, {"episode_ids": found})]
    assert [(e.lease_until, e.losses) for e in by_hand.episodes_of(round_id)] == [(None, 1)] * 4


def test_a_worker_that_lost_its_lease_is_fenced(round_id: int) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    old = by_hand.claim(found, GENERATING)
    by_hand.expire_leases()
    recovery.sweep()
    assert by_hand.record_turns([by_hand.turn(c) for c in old]) == 0
    assert by_hand.generate(found) == 4


def test_a_live_workers_lease_is_left_alone(round_id: int, short_silence: None) -> None:
    by_hand.claim(by_hand.to_state(round_id, GENERATING), GENERATING)
    assert recovery.sweep() == {}


def test_a_silent_workers_work_is_free_before_its_lease_ends(round_id: int, short_silence: None) -> None:
    by_hand.claim(by_hand.to_state(round_id, GENERATING), GENERATING)
    kill(by_hand.ROLLOUT.name)
    assert recovery.sweep()["expire_episode_leases"] == 4


def test_a_worker_that_was_started_anew_has_lost_its_old_work(round_id: int, short_silence: None) -> None:
    """Same name, other boot: the process that held the leases is gone."""
    by_hand.claim(by_hand.to_state(round_id, GENERATING), GENERATING)
    by_hand.execute("UPDATE workers SET boot = gen_random_uuid() WHERE name = :w", w=by_hand.ROLLOUT.name)
    assert recovery.sweep()["expire_episode_leases"] == 4


def test_nobody_is_dead_just_after_the_database_started(
    round_id: int, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand.claim(by_hand.to_state(round_id, GENERATING), GENERATING)
    by_hand.execute("UPDATE workers SET seen_at = now() - interval '100 days'")
    monkeypatch.setattr(settings, "worker_dead_seconds", 86400.0)  # the database is younger than that
    assert recovery.sweep() == {}


def test_an_update_whose_lease_ran_out_goes_back_to_its_old_place(tenant: Tenant) -> None:
    first, second = (by_hand.start_job(tenant) for _ in range(2))
    for job_id in (first, second):
        by_hand.finish_round(job_id)
    old = by_hand.claim_training()
    by_hand.expire_leases("rounds")
    assert recovery.sweep() == {"expire_training_leases": 1, "ring_training": 1}
    new = by_hand.claim_training()
    assert old is not None
    assert new is not None
    assert (new.job_id, new.attempt, new.losses) == (first, old.attempt + 1, 1)


def test_an_update_of_a_silent_trainer_goes_back(job_id: uuid.UUID, short_silence: None) -> None:
    round_id = by_hand.finish_round(job_id)
    by_hand.claim_training()
    kill(by_hand.TRAINING.name)
    assert recovery.sweep()["expire_training_leases"] == 1
    assert by_hand.round_of(round_id).state == RoundState.READY


def test_episodes_that_kill_their_workers_fail_their_job(
    job_id: uuid.UUID, round_id: int, settings: Settings, tenant: Tenant
) -> None:
    neighbour = by_hand.start_job(tenant)
    found = by_hand.to_state(round_id, GENERATING)
    for losses in range(1, settings.losses_before_alone + 2):
        assert by_hand.job(job_id).state == "running"
        assert {c.losses for c in by_hand.claim(found[:1], GENERATING)} == {losses - 1}
        by_hand.expire_leases()
        recovery.sweep()
    assert by_hand.job(job_id).error_code == "worker_lost"
    assert by_hand.job(neighbour).state == "running"


def test_progress_forgives_losses(round_id: int) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    by_hand.claim(found, GENERATING)
    by_hand.expire_leases()
    recovery.sweep()
    by_hand.generate(found)
    assert {e.losses for e in by_hand.episodes_of(round_id)} == {0}


def test_an_update_that_kills_its_workers_fails_its_job(job_id: uuid.UUID, settings: Settings) -> None:
    by_hand.finish_round(job_id)
    for _ in range(settings.losses_before_alone + 1):
        by_hand.claim_training()
        by_hand.expire_leases("rounds")
        recovery.sweep()
    job = by_hand.job(job_id)
    assert (job.state, job.error_code) == ("failed", "worker_lost")
    assert by_hand.live_round(job_id).state == RoundState.ABANDONED


# --- lost counts, jobs and rounds


@pytest.mark.parametrize("wrong", [3, 7])
def test_a_wrong_count_is_mended(round_id: int, wrong: int) -> None:
    by_hand.to_state(round_id, GENERATING)
    by_hand.execute("UPDATE rounds SET open_episodes = :n", n=wrong)
    assert recovery.sweep() == {"recount_rounds": 1}
    assert by_hand.round_of(round_id).open_episodes == 4


def test_a_round_that_closed_without_notice_becomes_ready_and_rings(round_id: int, bells: Bells) -> None:
    found = by_hand.to_state(round_id, ACTING)
    by_hand.execute("UPDATE rounds SET open_episodes = 5")
    by_hand.act(found)
    bells.clear()
    recovery.sweep()
    assert by_hand.round_of(round_id).state == RoundState.READY
    assert bells == [(broker.TRAIN, {})]


def test_a_missing_round_is_opened(job_id: uuid.UUID, round_id: int) -> None:
    by_hand.execute("UPDATE rounds SET state = 'abandoned', finished_at = now()")
    assert recovery.sweep() == {"settle_jobs": 1}
    assert by_hand.live_round(job_id).id != round_id


def test_a_job_that_is_done_is_ended(job_id: uuid.UUID) -> None:
    for _ in range(3):
        by_hand.step(job_id)
    by_hand.execute("UPDATE jobs SET state = 'running', finished_at = NULL")
    assert recovery.sweep() == {"settle_jobs": 1}
    assert by_hand.job(job_id).state == "succeeded"


def test_a_pause_is_completed(job_id: uuid.UUID, round_id: int) -> None:
    found = by_hand.to_state(round_id, ACTING)
    by_hand.pause(job_id)
    by_hand.act(found)
    assert by_hand.job(job_id).state == "running"
    assert recovery.sweep() == {"settle_jobs": 1}
    assert by_hand.job(job_id).state == "paused"


def make_validating(tenant: Tenant) -> uuid.UUID:
    return by_hand.submit(tenant)


def make_starting(tenant: Tenant) -> uuid.UUID:
    job_id = by_hand.queue_job(tenant)
    by_hand.admit()
    return job_id


@pytest.mark.parametrize(
    ("make", "task", "state"),
    [
        (make_validating, broker.VALIDATE, JobState.VALIDATING),
        (make_starting, broker.START, JobState.RUNNING),
    ],
)
class TestUnstarted:
    """A job whose validation, or whose version 0, was rung for and does not come."""

    def test_is_rung_for_again(
        self, tenant: Tenant, bells: Bells, make: Callable[[Tenant], uuid.UUID], task: str, state: JobState
    ) -> None:
        job_id = make(tenant)
        by_hand.make_bells_old()
        bells.clear()
        assert recovery.sweep() == {"ring_unstarted": 1}
        assert bells == [(task, {"job_id": str(job_id)})]
        assert recovery.sweep() == {}

    def test_is_begun_once(
        self, tenant: Tenant, bells: Bells, make: Callable[[Tenant], uuid.UUID], task: str, state: JobState
    ) -> None:
        job_id = make(tenant)
        begun = []
        for _ in range(2):
            with transaction() as session:
                begun.append(jobs.begin(session, job_id, state) is not None)
        assert begun == [True, False]

    def test_is_not_rung_for_while_a_worker_has_begun(
        self, tenant: Tenant, bells: Bells, make: Callable[[Tenant], uuid.UUID], task: str, state: JobState
    ) -> None:
        job_id = make(tenant)
        with transaction() as session:
            jobs.begin(session, job_id, state)
        assert recovery.sweep() == {}

    def test_fails_by_name_past_its_budget(
        self, tenant: Tenant, bells: Bells, make: Callable[[Tenant], uuid.UUID], task: str, state: JobState
    ) -> None:
        job_id = make(tenant)
        by_hand.execute("UPDATE jobs SET doorbells = :n", n=DOORBELL_BUDGET)
        by_hand.make_bells_old()
        recovery.sweep()
        assert by_hand.job(job_id).error_code == "not_started"


def test_a_started_job_is_not_rung_for(job_id: uuid.UUID, bells: Bells) -> None:
    by_hand.make_bells_old()
    recovery.sweep()
    assert bells.of(broker.START) == [{"job_id": str(job_id)}]  # by its start, not by the sweep
    assert by_hand.job(job_id).doorbell_at is None


# --- two at once


def test_two_sweeps_at_once_do_everything_once(tenant: Tenant, bells: Bells) -> None:
    found = []
    for _ in range(3):
        round_id = by_hand.live_round(by_hand.start_job(tenant)).id
        found += by_hand.to_state(round_id, GENERATING)
    by_hand.claim(found, GENERATING)
    by_hand.expire_leases()
    bells.clear()
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: recovery.sweep(), range(2)))
    assert sum(d.get("expire_episode_leases", 0) for d in done) == len(found)
    rung = [e for ids in bells.of(broker.GENERATE) for e in ids["episode_ids"]]
    assert sorted(rung) == sorted(found)


def test_a_sweep_beside_a_working_trainer_takes_nothing_away(job_id: uuid.UUID) -> None:
    by_hand.finish_round(job_id)
    held = by_hand.claim_training()
    assert held is not None
    recovery.sweep()
    with transaction() as session:
        assert buffer.renew(session, held, by_hand.LEASE)
    assert by_hand.commit_claim(held) == 1
