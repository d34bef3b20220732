"""Submit, quotas, cancel, pause and resume: in each phase, nothing is lost and nothing is done twice."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select

from app import broker
from app.db import transaction
from app.errors import Conflict, NotFound
from app.manager import jobs, recovery, tenants
from app.manager.commit import LostClaim
from app.models import Episode, Event, Job, PolicyVersion, Round, Tenant, Turn
from app.models.round import EpisodeState, RoundState
from tests import by_hand
from tests.service.conftest import Bells

ROUND_PHASES = ("waiting", "resetting", "generating", "acting", "ready", "training")
GENERATING, ACTING = EpisodeState.GENERATING, EpisodeState.ACTING


@pytest.fixture
def job_id(tenant: Tenant) -> uuid.UUID:
    """A running job at version 1: one round is behind it, the next one is open."""
    made = by_hand.start_job(tenant)
    by_hand.step(made)
    return made


def state(job_id: uuid.UUID) -> str:
    return by_hand.job(job_id).state


def finish_what_runs(job_id: uuid.UUID) -> None:
    """The workers bring to an end what was admitted, and take what the manager gives them after it."""
    round_id = by_hand.live_round(job_id).id
    by_hand.reset(round_id)
    found = by_hand.ids(by_hand.episodes_of(round_id))
    by_hand.generate(found)
    by_hand.act(found)
    recovery.sweep()


def whole_run(job_id: uuid.UUID) -> dict[str, object]:
    """What a finished job of 3 steps must look like, however it got there."""
    with transaction() as session:
        rounds = session.execute(
            select(Round.policy_version, Round.state).where(Round.job_id == job_id).order_by(Round.id)
        ).all()
        turns = session.execute(select(Turn.episode_id, func.count()).group_by(Turn.episode_id)).all()
        finished = session.scalar(select(func.count()).where(Episode.state == EpisodeState.FINISHED))
        versions = session.scalars(select(PolicyVersion.version).order_by(PolicyVersion.version)).all()
    return {
        "state": state(job_id),
        "rounds": [tuple(r) for r in rounds],
        "versions": versions,
        "episodes": finished,
        "turns": {count for _, count in turns},
    }


WHOLE = {
    "state": "succeeded",
    "rounds": [(0, "committed"), (1, "committed"), (2, "committed")],
    "versions": [0, 1, 2, 3],
    "episodes": 12,
    "turns": {1},
}


def run_to_the_end(job_id: uuid.UUID) -> None:
    """Everything that is left, from any phase."""
    for _ in range(3):
        if state(job_id) == "running":
            by_hand.admit()
            finish_what_runs(job_id)
            by_hand.train()


# --- submit


def test_a_submitted_job_waits_for_its_validation(tenant: Tenant, bells: Bells) -> None:
    job_id = by_hand.submit(tenant)
    assert state(job_id) == "validating_files"
    assert bells == [(broker.VALIDATE, {"job_id": str(job_id)})]


def submit_with_key(tenant: Tenant, key: str) -> uuid.UUID:
    with transaction() as session:
        return jobs.submit(session, tenant, jobs.parse_spec(by_hand.document()), submit_key=key).id


def test_the_same_submit_key_finds_the_first_job(tenant: Tenant, bells: Bells) -> None:
    assert submit_with_key(tenant, "once") == submit_with_key(tenant, "once")
    assert len(bells.of(broker.VALIDATE)) == 1


def test_a_submit_key_is_a_tenants_own(tenant: Tenant) -> None:
    assert submit_with_key(tenant, "once") != submit_with_key(by_hand.make_tenant("other"), "once")


def test_the_same_submit_key_at_the_same_instant_makes_one_job(tenant: Tenant, bells: Bells) -> None:
    barrier = threading.Barrier(2)

    def one(key: str) -> uuid.UUID:
        barrier.wait()
        return submit_with_key(tenant, key)

    with ThreadPoolExecutor(2) as pool:
        for trial in range(10):
            assert len(set(pool.map(one, [f"key {trial}"] * 2))) == 1
    with transaction() as session:
        assert session.scalar(select(func.count()).select_from(Job)) == 10
        assert session.scalar(select(func.count()).where(Event.code == "job_created")) == 10
    assert len(bells.of(broker.VALIDATE)) == 10


def test_a_suspended_tenant_cannot_submit(tenant: Tenant) -> None:
    by_hand.execute("UPDATE tenants SET suspended = true")
    with transaction() as session:
        suspended = tenants.find_tenant(session, tenant.name)
    with pytest.raises(Conflict, match="suspended"):
        by_hand.submit(suspended)


# --- quotas


def test_only_as_many_jobs_run_as_the_quota_allows_oldest_first(hand: None) -> None:
    tenant = by_hand.make_tenant(max_running_jobs=2)
    made = [by_hand.queue_job(tenant) for _ in range(3)]
    by_hand.admit()
    assert [state(j) for j in made] == ["running", "running", "queued"]
    by_hand.cancel(made[0])
    by_hand.admit()
    assert [state(j) for j in made] == ["cancelled", "running", "running"]


def test_one_tenants_quota_does_not_hold_up_another(hand: None) -> None:
    full = by_hand.make_tenant("full", max_running_jobs=0)
    waiting, running = by_hand.queue_job(full), by_hand.queue_job(by_hand.make_tenant("free"))
    by_hand.admit()
    assert (state(waiting), state(running)) == ("queued", "running")


def test_jobs_of_a_suspended_tenant_do_not_start(tenant: Tenant) -> None:
    job_id = by_hand.queue_job(tenant)
    by_hand.execute("UPDATE tenants SET suspended = true")
    by_hand.admit()
    assert state(job_id) == "queued"


def test_a_suspended_tenant_is_not_trained(job_id: uuid.UUID) -> None:
    by_hand.finish_round(job_id)
    by_hand.execute("UPDATE tenants SET suspended = true")
    assert by_hand.claim_training() is None
    by_hand.execute("UPDATE tenants SET suspended = false")
    assert by_hand.train() == 2


def test_two_admissions_at_once_start_no_more_than_the_quota(hand: None) -> None:
    tenant = by_hand.make_tenant(max_running_jobs=2)
    made = [by_hand.queue_job(tenant) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: by_hand.admit(), range(4)))
    assert [state(j) for j in made].count("running") == 2


# --- cancel


def to_early_phase(tenant: Tenant, phase: str) -> uuid.UUID:
    """A job before its first round: being validated, queued, or without version 0."""
    job_id = by_hand.submit(tenant) if phase == "validating" else by_hand.queue_job(tenant)
    if phase == "starting":
        by_hand.admit()
    return job_id


@pytest.mark.parametrize("phase", ["validating", "queued", "starting"])
def test_a_job_is_cancelled_before_its_first_round(tenant: Tenant, phase: str) -> None:
    job_id = to_early_phase(tenant, phase)
    by_hand.cancel(job_id)
    with transaction() as session:
        jobs.validated(session, job_id)
    by_hand.admit()
    by_hand.publish_initial(job_id)
    assert (state(job_id), by_hand.versions(job_id)) == ("cancelled", [])


@pytest.mark.parametrize("phase", ROUND_PHASES)
def test_a_job_is_cancelled_in_each_phase_of_its_round(job_id: uuid.UUID, phase: str) -> None:
    claim = by_hand.to_phase(job_id, phase)
    round_ = by_hand.live_round(job_id)
    by_hand.cancel(job_id)
    by_hand.admit()
    finish_what_runs(job_id)
    if claim is not None:
        with pytest.raises(LostClaim):
            by_hand.commit_claim(claim)
    after = by_hand.job(job_id)
    assert (after.state, after.version) == ("cancelled", 1)
    assert by_hand.live_round(job_id).id == round_.id
    assert by_hand.live_round(job_id).state == RoundState.ABANDONED
    assert by_hand.claim_training() is None


@pytest.mark.parametrize("phase", ["waiting", "resetting", "generating", "acting"])
def test_episodes_of_a_cancelled_job_leave_the_queues(job_id: uuid.UUID, phase: str) -> None:
    """Or the indexes of live work would fill with dead."""
    by_hand.to_phase(job_id, phase)
    by_hand.cancel(job_id)
    found = by_hand.episodes_of(by_hand.live_round(job_id).id)
    assert {(e.state, e.error_code, e.lease_until) for e in found} == {("failed", "abandoned", None)}


def test_what_was_held_of_a_cancelled_job_is_lost_to_its_worker(job_id: uuid.UUID) -> None:
    found = by_hand.to_state(by_hand.live_round(job_id).id, GENERATING)
    claims = by_hand.claim(found, GENERATING)
    by_hand.cancel(job_id)
    assert by_hand.record_turns([by_hand.turn(c) for c in claims]) == 0


def test_a_cancelled_jobs_slots_are_free_at_once(job_id: uuid.UUID, tenant: Tenant) -> None:
    by_hand.execute("UPDATE workers SET slots = 4 WHERE kind = 'rollout'")
    by_hand.to_phase(job_id, "generating")
    other = by_hand.start_job(tenant)
    assert by_hand.admit() == 0
    by_hand.cancel(job_id)
    assert by_hand.admit() == 4
    assert by_hand.live_round(other).admitted_at is not None


def test_a_job_that_is_over_cannot_be_cancelled(job_id: uuid.UUID) -> None:
    by_hand.cancel(job_id)
    with pytest.raises(Conflict, match="cancelled already"):
        by_hand.cancel(job_id)


def test_an_unknown_job_cannot_be_cancelled(hand: None) -> None:
    with pytest.raises(NotFound):
        by_hand.cancel(uuid.uuid4())


# --- pause and resume


@pytest.mark.parametrize("phase", ["validating", "queued", "starting"])
def test_a_job_is_paused_before_its_first_round_and_goes_on(tenant: Tenant, phase: str) -> None:
    job_id = to_early_phase(tenant, phase)
    by_hand.pause(job_id)
    with transaction() as session:
        jobs.validated(session, job_id)
    by_hand.admit()
    assert not by_hand.publish_initial(job_id)
    assert state(job_id) == "paused"
    by_hand.resume(job_id)
    by_hand.admit()
    assert state(job_id) == "running"
    assert by_hand.publish_initial(job_id)
    run_to_the_end(job_id)
    assert whole_run(job_id) == WHOLE


@pytest.mark.parametrize("phase", ROUND_PHASES)
def test_a_pause_lets_what_has_started_finish_and_starts_nothing(job_id: uuid.UUID, phase: str) -> None:
    claim = by_hand.to_phase(job_id, phase)
    round_id = by_hand.live_round(job_id).id
    by_hand.pause(job_id)
    assert by_hand.admit() == 0
    finish_what_runs(job_id)
    if claim is not None:
        assert state(job_id) == "running"
        by_hand.commit_claim(claim)
    assert by_hand.claim_training() is None
    assert state(job_id) == "paused"
    assert by_hand.live_round(job_id).id == round_id
    expected = {"waiting": RoundState.ROLLING_OUT, "training": RoundState.COMMITTED}.get(phase, RoundState.READY)
    assert by_hand.round_of(round_id).state == expected


@pytest.mark.parametrize("phase", ROUND_PHASES)
def test_a_resumed_job_goes_on_with_what_it_had(job_id: uuid.UUID, phase: str) -> None:
    claim = by_hand.to_phase(job_id, phase)
    by_hand.pause(job_id)
    finish_what_runs(job_id)
    if claim is not None:
        by_hand.commit_claim(claim)
    versions = by_hand.versions(job_id)
    by_hand.resume(job_id)
    by_hand.admit()
    assert [v.optimizer_object_id for v in by_hand.versions(job_id)] == [v.optimizer_object_id for v in versions]
    run_to_the_end(job_id)
    assert whole_run(job_id) == WHOLE


@pytest.mark.parametrize("phase", ROUND_PHASES)
def test_a_pause_that_is_taken_back_at_once_changes_nothing(job_id: uuid.UUID, phase: str) -> None:
    claim = by_hand.to_phase(job_id, phase)
    by_hand.pause(job_id)
    by_hand.resume(job_id)
    by_hand.admit()
    if claim is not None:
        by_hand.commit_claim(claim)
    run_to_the_end(job_id)
    assert whole_run(job_id) == WHOLE


def test_a_half_done_round_keeps_its_episodes_over_a_pause(job_id: uuid.UUID) -> None:
    """Two of four episodes are admitted; the other two wait for the resume."""
    by_hand.execute("UPDATE workers SET slots = 2 WHERE kind = 'rollout'")
    by_hand.admit()
    by_hand.pause(job_id)
    finish_what_runs(job_id)
    assert state(job_id) == "paused"
    round_id = by_hand.live_round(job_id).id
    done = [e.id for e in by_hand.episodes_of(round_id, EpisodeState.FINISHED)]
    assert len(done) == 2
    by_hand.execute("UPDATE workers SET slots = 64 WHERE kind = 'rollout'")
    by_hand.resume(job_id)
    by_hand.admit()
    assert [e.id for e in by_hand.episodes_of(round_id, EpisodeState.FINISHED)] == done
    run_to_the_end(job_id)
    assert whole_run(job_id) == WHOLE


def test_a_resumed_job_with_a_complete_round_rings_the_trainer(job_id: uuid.UUID, bells: Bells) -> None:
    by_hand.finish_round(job_id)
    by_hand.pause(job_id)
    by_hand.resume(job_id)
    bells.clear()
    by_hand.admit()
    assert bells.of(broker.TRAIN) == [{}]


def test_a_resumed_job_waits_for_its_tenants_quota(job_id: uuid.UUID, tenant: Tenant) -> None:
    """Its waiting episodes too: until it runs again, nothing of it is admitted."""
    by_hand.pause(job_id)
    by_hand.execute("UPDATE tenants SET max_running_jobs = 1")
    other = by_hand.start_job(tenant)
    by_hand.resume(job_id)
    by_hand.admit()
    assert (state(job_id), state(other)) == ("queued", "running")
    assert {e.state for e in by_hand.episodes_of(by_hand.live_round(job_id).id)} == {"waiting"}


def test_a_second_pause_changes_nothing(job_id: uuid.UUID) -> None:
    for _ in range(2):
        by_hand.pause(job_id)
    with transaction() as session:
        assert session.scalar(select(func.count()).where(Event.code == "job_paused")) == 1


def test_a_running_job_cannot_be_resumed(job_id: uuid.UUID) -> None:
    with pytest.raises(Conflict, match="not paused"):
        by_hand.resume(job_id)


def test_a_job_that_is_over_cannot_be_paused(job_id: uuid.UUID) -> None:
    by_hand.cancel(job_id)
    with pytest.raises(Conflict, match="only a live job"):
        by_hand.pause(job_id)


def test_a_paused_job_is_cancelled(job_id: uuid.UUID) -> None:
    by_hand.pause(job_id)
    by_hand.cancel(job_id)
    assert state(job_id) == "cancelled"


# --- races with a pause


def test_an_update_starts_before_a_pause_or_not_at_all(job_id: uuid.UUID) -> None:
    """A trainer that looks while a pause is being committed waits for it, and takes nothing."""
    by_hand.finish_round(job_id)
    with ThreadPoolExecutor(1) as pool:
        with transaction() as session:
            jobs.pause(session, job_id)
            claimed = pool.submit(by_hand.claim_training)
            by_hand.wait_until_blocked()
        assert claimed.result() is None
    assert state(job_id) == "paused"
    assert by_hand.live_round(job_id).state == RoundState.READY


def test_nothing_is_admitted_after_a_pause(job_id: uuid.UUID) -> None:
    with ThreadPoolExecutor(1) as pool:
        with transaction() as session:
            jobs.pause(session, job_id)
            admitted = pool.submit(by_hand.admit)
            by_hand.wait_until_blocked()
        assert admitted.result() == 0
    assert state(job_id) == "paused"
