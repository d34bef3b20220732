"""The one commit: once, by the attempt that holds the round, of one version, with its objects, and what it opens."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

from app import broker, db
from app.db import transaction
from app.manager import buffer, commit, episodes, retention
from app.manager.buffer import MixedVersions, TrainingClaim
from app.manager.commit import LostClaim
from app.models import Event, StepMetrics, StoredObject, Tenant, UsageEntry
from app.models.round import EpisodeState, RoundState
from app.settings import Settings
from tests import by_hand
from tests.service.conftest import Bells


@pytest.fixture
def job_id(tenant: Tenant) -> uuid.UUID:
    return by_hand.start_job(tenant)


@pytest.fixture
def claim(job_id: uuid.UUID) -> TrainingClaim:
    """The job's first round, ready and claimed for training."""
    by_hand.finish_round(job_id)
    held = by_hand.claim_training()
    assert held is not None
    return held


def objects() -> dict[str, list[str]]:
    """Keys by state."""
    found: dict[str, list[str]] = {}
    with transaction() as session:
        for stored in session.scalars(select(StoredObject).order_by(StoredObject.key)):
            found.setdefault(stored.state, []).append(stored.key)
    return found


# --- the buffer


def test_rounds_are_trained_first_in_first_out(tenant: Tenant) -> None:
    """Of one tenant, whatever the order of the jobs."""
    made = [by_hand.start_job(tenant) for _ in range(3)]
    order = [made[1], made[2], made[0]]
    for job_id in order:
        by_hand.finish_round(job_id)
    claims = [by_hand.claim_training() for _ in range(3)]
    assert [c.job_id for c in claims if c] == order


def test_tenants_take_turns_by_training_time(tenant: Tenant) -> None:
    busy, other = by_hand.start_job(tenant), by_hand.start_job(by_hand.make_tenant("other"))
    by_hand.step(busy)
    by_hand.execute("UPDATE rounds SET training_at = finished_at - interval '60 s' WHERE state = 'committed'")
    by_hand.finish_round(busy)
    by_hand.finish_round(other)  # ready later, but its tenant has had nothing yet
    held = by_hand.claim_training()
    assert held is not None
    assert held.job_id == other


def test_an_empty_buffer_gives_nothing(job_id: uuid.UUID) -> None:
    assert by_hand.claim_training() is None


def test_a_round_is_claimed_once(claim: TrainingClaim) -> None:
    assert by_hand.claim_training() is None
    assert by_hand.round_of(claim.round_id).state == RoundState.TRAINING


def test_two_trainers_take_two_rounds(tenant: Tenant) -> None:
    """At the same instant: neither goes away empty while there is something to train."""
    for _ in range(2):
        by_hand.finish_round(by_hand.start_job(tenant))
    barrier = threading.Barrier(2)

    def take(_: int) -> TrainingClaim | None:
        barrier.wait()
        return by_hand.claim_training()

    with ThreadPoolExecutor(2) as pool:
        taken = list(pool.map(take, range(2)))
    assert len({c.round_id for c in taken if c}) == 2


def test_a_renewal_tells_whether_the_round_is_still_held(claim: TrainingClaim) -> None:
    with transaction() as session:
        assert buffer.renew(session, claim, by_hand.LEASE)
        assert not buffer.renew(session, replace(claim, attempt=claim.attempt + 1), by_hand.LEASE)


def test_trajectories_come_by_group_and_index_whatever_came_first(tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant, hyperparameters={"prompts_per_round": 2, "group_size": 3})
    round_id = by_hand.live_round(job_id).id
    found = by_hand.to_state(round_id, EpisodeState.ACTING)
    for place in (4, 0, 5, 2, 1, 3):
        by_hand.act([found[place]], reward=place / 8)
    held = by_hand.claim_training()
    assert held is not None
    with transaction() as session:
        groups = buffer.trajectories(session, held)
    assert [[(t.group, t.index, t.reward) for t in group] for group in groups] == [
        [(0, 0, 0.0), (0, 1, 1 / 8), (0, 2, 2 / 8)],
        [(1, 0, 3 / 8), (1, 1, 4 / 8), (1, 2, 5 / 8)],
    ]


def test_a_trajectory_is_what_was_rendered_and_sampled(job_id: uuid.UUID) -> None:
    """Two turns: context ids carry no loss and no logprob, sampled ids carry both, the observation's text neither."""
    round_id = by_hand.live_round(job_id).id
    found = by_hand.to_state(round_id, EpisodeState.ACTING)
    by_hand.act(found, reward=None)
    second = {"context_ids": [3, 4, 5], "sampled_ids": [6], "logprobs": [-0.25]}
    by_hand.record_turns([by_hand.turn(c, **second) for c in by_hand.claim(found, EpisodeState.GENERATING)])
    by_hand.act(found)
    held = by_hand.claim_training()
    assert held is not None
    with transaction() as session:
        one = buffer.trajectories(session, held)[0][0]
    assert one.token_ids == [1, 2, 7, 8, 9, 3, 4, 5, 6]
    assert one.loss_mask == [0, 0, 1, 1, 1, 0, 0, 0, 1]
    assert one.logprobs == [0.0, 0.0, -0.5, -0.5, -0.5, 0.0, 0.0, 0.0, -0.25]


def test_a_dropped_episode_leaves_its_group(job_id: uuid.UUID, settings: Settings) -> None:
    round_id = by_hand.live_round(job_id).id
    found = by_hand.to_state(round_id, EpisodeState.ACTING)
    for _ in range(settings.infrastructure_retries + 1):
        claims = by_hand.claim(found[:1], EpisodeState.ACTING)
        with transaction() as session:
            episodes.give_back(session, claims, "infrastructure", "broken")
    by_hand.act(found)
    held = by_hand.claim_training()
    assert held is not None
    with transaction() as session:
        groups = buffer.trajectories(session, held)
    assert [[t.index for t in group] for group in groups] == [[1], [0, 1]]


def test_an_update_that_is_given_back_waits_for_the_next_bell(claim: TrainingClaim, bells: Bells) -> None:
    with transaction() as session:
        buffer.give_back(session, claim, "storage does not answer")
    after = by_hand.round_of(claim.round_id)
    assert (after.state, after.retries, after.lease_until) == (RoundState.READY, 1, None)


def test_an_update_that_is_given_back_too_often_fails_its_job(job_id: uuid.UUID, settings: Settings) -> None:
    by_hand.finish_round(job_id)
    for _ in range(settings.infrastructure_retries + 1):
        held = by_hand.claim_training()
        assert held is not None
        with transaction() as session:
            buffer.give_back(session, held, "storage does not answer")
    assert by_hand.job(job_id).error_code == "infrastructure"


def test_a_fault_of_an_update_fails_its_job(claim: TrainingClaim) -> None:
    with transaction() as session:
        buffer.fail_job(session, claim, "non_finite", "the loss is NaN")
    assert by_hand.job(claim.job_id).error_code == "non_finite"
    assert by_hand.round_of(claim.round_id).state == RoundState.ABANDONED


def test_a_fault_of_a_lost_update_fails_nobody(claim: TrainingClaim) -> None:
    with transaction() as session:
        buffer.fail_job(session, replace(claim, attempt=claim.attempt - 1), "non_finite", "late")
    assert by_hand.job(claim.job_id).state == "running"


# --- the commit


def test_a_commit_publishes_all_at_once(claim: TrainingClaim, bells: Bells) -> None:
    bells.clear()
    assert by_hand.commit_claim(claim) == 1
    job = by_hand.job(claim.job_id)
    assert (job.version, by_hand.versions(job.id)[1].round_id) == (1, claim.round_id)
    assert by_hand.round_of(claim.round_id).state == RoundState.COMMITTED
    assert by_hand.live_round(job.id).policy_version == 1
    assert objects().keys() == {"live"}
    assert bells.of(broker.ADMIT)
    with transaction() as session:
        assert session.scalars(select(StepMetrics.version)).all() == [1]
        assert session.scalars(select(UsageEntry.trained_tokens).where(UsageEntry.episode_id == 0)).all() == [10]


def test_a_second_commit_of_the_same_claim_is_refused(claim: TrainingClaim) -> None:
    by_hand.commit_claim(claim)
    with pytest.raises(LostClaim):
        by_hand.commit_claim(claim)
    assert [v.version for v in by_hand.versions(claim.job_id)] == [0, 1]


def test_two_commits_at_the_same_instant_make_one_version(claim: TrainingClaim) -> None:
    new = by_hand.new_version(claim.job_id, 1)
    barrier = threading.Barrier(2)

    def one(_: int) -> str:
        barrier.wait()
        try:
            with transaction() as session:
                commit.commit_round(session, claim, new, {})
        except LostClaim:
            return "lost"
        return "committed"

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(one, range(2))) == ["committed", "lost"]
    assert by_hand.job(claim.job_id).version == 1


def test_a_commit_that_fails_at_its_end_leaves_nothing(claim: TrainingClaim, bells: Bells) -> None:
    new = by_hand.new_version(claim.job_id, 1)
    bells.clear()
    with pytest.raises(RuntimeError), transaction() as session:
        commit.commit_round(session, claim, new, {})
        raise RuntimeError("the process died")
    assert by_hand.job(claim.job_id).version == 0
    assert by_hand.round_of(claim.round_id).state == RoundState.TRAINING
    assert bells == []
    assert by_hand.commit_claim(claim) == 1


def test_a_commit_whose_answer_was_lost_is_known(claim: TrainingClaim) -> None:
    with transaction() as session:
        assert not commit.is_committed(session, claim)
    by_hand.commit_claim(claim)
    with transaction() as session:
        assert commit.is_committed(session, claim)
        assert not commit.is_committed(session, replace(claim, attempt=claim.attempt + 1))


def test_a_stale_attempt_cannot_commit(claim: TrainingClaim) -> None:
    """The first trainer's lease ran out; a second one took the round over."""
    by_hand.execute("UPDATE rounds SET state = 'ready', lease_until = NULL WHERE id = :r", r=claim.round_id)
    second = by_hand.claim_training()
    assert second is not None
    with pytest.raises(LostClaim):
        by_hand.commit_claim(claim)
    assert by_hand.commit_claim(second) == 1


def test_a_commit_after_a_cancel_is_refused(claim: TrainingClaim) -> None:
    by_hand.cancel(claim.job_id)
    with pytest.raises(LostClaim):
        by_hand.commit_claim(claim)
    assert by_hand.job(claim.job_id).version == 0


def test_a_commit_under_pause_goes_in_and_opens_nothing(claim: TrainingClaim) -> None:
    by_hand.pause(claim.job_id)
    assert by_hand.commit_claim(claim) == 1
    job = by_hand.job(claim.job_id)
    assert (job.state, job.version) == ("paused", 1)
    assert by_hand.live_round(job.id).id == claim.round_id


def test_a_commit_with_another_jobs_round_is_refused(claim: TrainingClaim, tenant: Tenant) -> None:
    other = by_hand.start_job(tenant)
    with pytest.raises(IntegrityError, match="fk_round"):
        by_hand.commit_claim(replace(claim, job_id=other))
    assert by_hand.job(other).version == 0


# --- mixed versions


@contextmanager
def without_constraints() -> Iterator[None]:
    """Lets in what the schema refuses, as a bug in Postgres itself would."""
    with db.engine("owner").begin() as connection:
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        yield connection  # type: ignore[misc]


MIXTURES = {
    "version": "UPDATE turns SET policy_version = 7 WHERE episode_id = (SELECT min(id) FROM episodes)",
    "weights": "UPDATE turns SET weights_digest = 'other' WHERE episode_id = (SELECT min(id) FROM episodes)",
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_round_with_mixed_versions_cannot_be_committed(claim: TrainingClaim, mixture: str) -> None:
    with without_constraints() as connection:
        connection.execute(text(MIXTURES[mixture]))  # type: ignore[attr-defined]
    with pytest.raises(MixedVersions) as raised:
        by_hand.commit_claim(claim)
    assert raised.value.code == "mixed_versions"
    assert by_hand.job(claim.job_id).version == 0


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_round_with_mixed_versions_cannot_be_read_for_training(claim: TrainingClaim, mixture: str) -> None:
    with without_constraints() as connection:
        connection.execute(text(MIXTURES[mixture]))  # type: ignore[attr-defined]
    with pytest.raises(MixedVersions), transaction() as session:
        buffer.trajectories(session, claim)


def test_a_round_of_an_older_version_cannot_be_committed(claim: TrainingClaim) -> None:
    by_hand.execute("UPDATE jobs SET version = 5")
    with pytest.raises(MixedVersions):
        by_hand.commit_claim(claim)


# --- rounds without signal


def test_without_signal_the_next_version_has_the_same_objects(claim: TrainingClaim) -> None:
    by_hand.commit_claim(claim, signal=False)
    old, new = by_hand.versions(claim.job_id)
    assert (new.weights_digest, new.adapter_object_id, new.config_object_id, new.optimizer_object_id) == (
        old.weights_digest,
        old.adapter_object_id,
        old.config_object_id,
        old.optimizer_object_id,
    )
    assert new.optimizer_steps == old.optimizer_steps
    assert not new.signal


def test_rounds_without_signal_in_a_row_fail_the_job_by_name(tenant: Tenant) -> None:
    job_id = by_hand.start_job(
        tenant, hyperparameters={"n_steps": 10, "prompts_per_round": 1, "group_size": 2, "no_signal_patience": 2}
    )
    by_hand.step(job_id, signal=False)
    by_hand.step(job_id, signal=True)  # not in a row
    by_hand.step(job_id, signal=False)
    assert by_hand.job(job_id).state == "running"
    by_hand.step(job_id, signal=False)
    job = by_hand.job(job_id)
    assert (job.state, job.error_code, job.version) == ("failed", "no_signal", 4)
    with transaction() as session:
        codes = session.scalars(select(Event.code).order_by(Event.id)).all()
    assert codes.count("round_without_signal") == 3
    assert codes[-1] == "no_signal"


# --- version 0


def test_version_0_is_published_once(tenant: Tenant) -> None:
    """A start that was rung for twice leaves nothing of the second."""
    job_id = by_hand.start_job(tenant)
    assert not by_hand.publish_initial(job_id)
    assert {state: len(keys) for state, keys in objects().items()} == {"live": 3, "pending": 3}
    assert len(by_hand.versions(job_id)) == 1


def test_version_0_of_a_cancelled_job_is_not_published(tenant: Tenant) -> None:
    job_id = by_hand.queue_job(tenant)
    by_hand.admit()
    by_hand.cancel(job_id)
    assert not by_hand.publish_initial(job_id)
    assert objects().keys() == {"pending"}


# --- objects


def age_objects() -> None:
    by_hand.execute("UPDATE objects SET state_at = now() - interval '1 day'")


def test_objects_are_pending_until_the_commit(claim: TrainingClaim) -> None:
    new = by_hand.new_version(claim.job_id, 1)
    assert {state: len(keys) for state, keys in objects().items()} == {"live": 3, "pending": 3}
    with transaction() as session:
        commit.commit_round(session, claim, new, {})
    assert objects().keys() == {"live"}


def test_objects_that_were_swept_cannot_be_committed(claim: TrainingClaim) -> None:
    new = by_hand.new_version(claim.job_id, 1)
    age_objects()
    with transaction() as session:
        assert retention.expire_orphans(session) == 3
    with pytest.raises(LostClaim, match="swept"), transaction() as session:
        commit.commit_round(session, claim, new, {})
    assert by_hand.job(claim.job_id).version == 0


def test_the_orphan_sweep_leaves_a_commit_under_way_alone(claim: TrainingClaim) -> None:
    new = by_hand.new_version(claim.job_id, 1)
    age_objects()
    with transaction() as committing:
        commit.commit_round(committing, claim, new, {})
        with transaction() as sweeping:
            assert retention.expire_orphans(sweeping) == 0
    assert objects().keys() == {"live"}


def test_a_commit_waits_for_the_orphan_sweep_and_then_refuses(claim: TrainingClaim) -> None:
    new = by_hand.new_version(claim.job_id, 1)
    age_objects()

    def late_commit() -> None:
        with transaction() as session:
            commit.commit_round(session, claim, new, {})

    with ThreadPoolExecutor(1) as pool:
        with transaction() as sweeping:
            retention.expire_orphans(sweeping)
            result = pool.submit(late_commit)
            by_hand.wait_until_blocked()
        with pytest.raises(LostClaim):
            result.result()
