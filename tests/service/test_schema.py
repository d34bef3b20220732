"""Invariants as constraints: what must never be cannot be stored, whatever the code above does."""

from __future__ import annotations

import uuid

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from app.db import transaction
from app.models import Tenant
from app.models.round import EpisodeState
from tests import by_hand
from tests.by_hand import execute


@pytest.fixture
def job_id(tenant: Tenant) -> uuid.UUID:
    """A running job at version 0 with its first round open."""
    return by_hand.start_job(tenant)


def refused(constraint: str):  # type: ignore[no-untyped-def]
    return pytest.raises(IntegrityError, match=constraint)


COPY_ROUND = """
    INSERT INTO rounds (tenant_id, job_id, kind, policy_version, weights_digest, state, open_episodes, cursor,
        attempt, losses, retries)
    SELECT tenant_id, job_id, :kind, :version, :digest, 'rolling_out', 1, 0, 0, 0, 0 FROM rounds WHERE id = :round
"""


def copy_round(round_id: int, kind: str = "train", version: int = 0, digest: str | None = None) -> None:
    """Opens another round like this one."""
    digest = digest or by_hand.round_of(round_id).weights_digest
    execute(COPY_ROUND, kind=kind, version=version, digest=digest, round=round_id)


# --- rounds


def test_a_job_has_one_live_training_round(job_id: uuid.UUID) -> None:
    with refused("uq_rounds_live_train"):
        copy_round(by_hand.live_round(job_id).id)


def test_an_evaluation_may_run_beside_the_training_round(job_id: uuid.UUID) -> None:
    copy_round(by_hand.live_round(job_id).id, kind="eval")


def test_a_version_is_trained_from_once(job_id: uuid.UUID) -> None:
    first = by_hand.live_round(job_id).id
    by_hand.step(job_id)
    execute("UPDATE rounds SET state = 'abandoned' WHERE id = :r", r=by_hand.live_round(job_id).id)
    with refused("uq_rounds_train_version"):
        copy_round(first)


def test_a_round_is_of_a_committed_version(job_id: uuid.UUID) -> None:
    with refused("fk_policy_version"):
        copy_round(by_hand.live_round(job_id).id, kind="eval", version=1)


def test_a_round_pins_the_weights_of_its_version(job_id: uuid.UUID) -> None:
    with refused("fk_policy_version"):
        copy_round(by_hand.live_round(job_id).id, kind="eval", digest="0" * 64)


def test_a_round_with_open_episodes_is_not_ready(job_id: uuid.UUID) -> None:
    with refused("ready_when_closed"):
        execute("UPDATE rounds SET state = 'ready'")


def test_more_episodes_cannot_close_than_were_open(job_id: uuid.UUID) -> None:
    with refused("open_episodes_not_negative"):
        execute("UPDATE rounds SET open_episodes = open_episodes - 5")


def test_a_round_of_another_tenants_job_is_refused(job_id: uuid.UUID) -> None:
    other = by_hand.make_tenant("other")
    execute("DELETE FROM episodes")
    execute("DELETE FROM groups")
    with refused("fk_rounds_tenant_id_job_id"):
        execute("UPDATE rounds SET tenant_id = :t", t=other.id)


# --- versions

COPY_VERSION = """
    INSERT INTO policy_versions (job_id, version, parent_version, tenant_id, round_id, attempt, weights_digest,
        adapter_object_id, config_object_id, optimizer_steps, signal)
    SELECT job_id, :version, :parent, tenant_id, :round, 1, 'digest', adapter_object_id, config_object_id, 0, true
    FROM policy_versions WHERE job_id = :job AND version = 0
"""


def publish(job_id: uuid.UUID, version: int, parent: int | None, round_id: int | None) -> None:
    execute(COPY_VERSION, job=job_id, version=version, parent=parent, round=round_id)


def test_versions_have_no_gaps(job_id: uuid.UUID) -> None:
    with refused("fk_parent_version|fk_round"):
        publish(job_id, 2, 1, by_hand.live_round(job_id).id)


@pytest.mark.parametrize("parent", [None, 0, 2])
def test_a_version_stands_on_the_one_before_it(job_id: uuid.UUID, parent: int | None) -> None:
    with refused("stands_on_parent"):
        publish(job_id, 2, parent, by_hand.live_round(job_id).id)


def test_a_version_after_0_comes_from_a_round(job_id: uuid.UUID) -> None:
    with refused("made_by_round"):
        publish(job_id, 1, 0, None)


def test_a_version_exists_once(job_id: uuid.UUID) -> None:
    by_hand.step(job_id)
    with refused("pk_policy_versions"):
        publish(job_id, 1, 0, by_hand.live_round(job_id).id)


def test_a_round_makes_one_version(job_id: uuid.UUID) -> None:
    first = by_hand.live_round(job_id).id
    by_hand.step(job_id)
    with refused("uq_policy_versions_round_id|fk_round"):
        publish(job_id, 2, 1, first)


def test_a_version_comes_from_a_round_of_its_parent(job_id: uuid.UUID) -> None:
    by_hand.step(job_id)
    second = by_hand.live_round(job_id).id  # at version 1, so it may make version 2 only
    execute("DELETE FROM step_metrics")
    execute("UPDATE rounds SET state = 'abandoned' WHERE id = :r", r=second)
    other = by_hand.start_job(by_hand.make_tenant("other"))
    with refused("fk_round"):
        publish(other, 1, 0, second)


def test_a_version_does_not_come_from_another_jobs_round(job_id: uuid.UUID, tenant: Tenant) -> None:
    other = by_hand.start_job(tenant)
    with refused("fk_round"):
        publish(job_id, 1, 0, by_hand.live_round(other).id)


def test_a_version_does_not_hold_another_tenants_objects(job_id: uuid.UUID) -> None:
    theirs = by_hand.start_job(by_hand.make_tenant("other"))
    with refused("fk_adapter"):
        execute(
            "UPDATE policy_versions SET adapter_object_id ="
            " (SELECT adapter_object_id FROM policy_versions WHERE job_id = :theirs) WHERE job_id = :ours",
            theirs=theirs,
            ours=job_id,
        )


# --- episodes


def test_an_episode_is_of_its_rounds_version(job_id: uuid.UUID) -> None:
    with refused("fk_round_version"):
        execute("UPDATE episodes SET policy_version = 1")


def test_an_episode_is_of_its_rounds_tenant(job_id: uuid.UUID) -> None:
    other = by_hand.make_tenant("other")
    with refused("fk_round_version"):
        execute("UPDATE episodes SET tenant_id = :t", t=other.id)


def test_an_episode_is_of_a_group_of_its_round(job_id: uuid.UUID, tenant: Tenant) -> None:
    other = by_hand.live_round(by_hand.start_job(tenant)).id
    with refused("fk_group"):
        execute(
            "UPDATE episodes SET group_id = (SELECT max(id) FROM groups WHERE round_id = :other), index = 9"
            " WHERE id = :episode",
            other=other,
            episode=by_hand.episodes_of(by_hand.live_round(job_id).id)[0].id,
        )


def test_an_episode_has_its_place_alone(job_id: uuid.UUID) -> None:
    with refused("uq_episodes_group_id_index"):
        execute("UPDATE episodes SET index = 0")


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "-Infinity"])
def test_a_reward_is_a_finite_number(job_id: uuid.UUID, reward: str) -> None:
    with refused("reward_finite"):
        execute("UPDATE episodes SET state = 'finished', reward = CAST(:r AS float8)", r=reward)


def test_a_finished_episode_has_a_reward(job_id: uuid.UUID) -> None:
    with refused("finished_has_reward"):
        execute("UPDATE episodes SET state = 'finished'")


def test_only_a_finished_episode_has_a_reward(job_id: uuid.UUID) -> None:
    with refused("finished_has_reward"):
        execute("UPDATE episodes SET reward = 1")


# --- turns

TURN = {
    "index": 5,
    "policy_version": 0,
    "kind": "policy",
    "weights_digest": "own",
    "context_ids": b"",
    "sampled_ids": b"1234",
    "logprobs": b"1234",
}


def store_turn(job_id: uuid.UUID, **changes: object) -> None:
    """A turn of the job's first episode; `weights_digest='own'` is its round's."""
    round_ = by_hand.live_round(job_id)
    fields = TURN | {"tenant_id": round_.tenant_id} | changes
    if fields["weights_digest"] == "own":
        fields["weights_digest"] = round_.weights_digest
    execute(
        "INSERT INTO turns (round_id, episode_id, index, tenant_id, policy_version, kind, attempt, weights_digest,"
        " context_ids, sampled_ids, logprobs, seconds) VALUES (:round, :episode, :index, :tenant_id, :policy_version,"
        " :kind, 1, :weights_digest, :context_ids, :sampled_ids, :logprobs, 0)",
        round=round_.id,
        episode=by_hand.episodes_of(round_.id)[0].id,
        **fields,
    )


ANSWER = {"kind": "environment", "weights_digest": None, "context_ids": None, "sampled_ids": None, "logprobs": None}


@pytest.mark.parametrize("turn", [{}, ANSWER], ids=["policy", "environment"])
def test_a_turn_of_the_rounds_version_is_stored(job_id: uuid.UUID, turn: dict[str, object]) -> None:
    store_turn(job_id, **turn)


@pytest.mark.parametrize("turn", [{}, ANSWER], ids=["policy", "environment"])
def test_a_turn_of_another_version_is_refused(job_id: uuid.UUID, turn: dict[str, object]) -> None:
    with refused("fk_round"):
        store_turn(job_id, **turn | {"policy_version": 1})


@pytest.mark.parametrize("turn", [{}, ANSWER], ids=["policy", "environment"])
def test_a_turn_of_another_tenant_is_refused(job_id: uuid.UUID, turn: dict[str, object]) -> None:
    with refused("fk_round_version"):
        store_turn(job_id, **turn | {"tenant_id": by_hand.make_tenant("other").id})


def test_a_turn_of_other_weights_is_refused(job_id: uuid.UUID) -> None:
    with refused("fk_round_weights"):
        store_turn(job_id, weights_digest="0" * 64)


def test_a_turn_of_the_policy_tells_its_weights(job_id: uuid.UUID) -> None:
    with refused("policy_has_digest"):
        store_turn(job_id, weights_digest=None)


@pytest.mark.parametrize("logprobs", [b"", b"12345678", None])
def test_every_sampled_token_has_a_logprob(job_id: uuid.UUID, logprobs: bytes | None) -> None:
    with refused("a_logprob_a_token"):
        store_turn(job_id, logprobs=logprobs)


def test_a_turn_is_recorded_once(job_id: uuid.UUID) -> None:
    store_turn(job_id)
    with refused("turns_p0_pkey|pk_turns"):
        store_turn(job_id)


# --- objects, jobs, the ledger


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("state = 'uploaded'", "ck_objects_state"),
        ("kind = 'pickle'", "ck_objects_kind"),
        ("sha256 = 'short'", "sha256_and_size"),
        ("size = -1", "sha256_and_size"),
    ],
)
def test_an_object_is_of_a_known_kind_state_and_digest(job_id: uuid.UUID, change: str, constraint: str) -> None:
    with refused(constraint):
        execute(f"UPDATE objects SET {change}")


def test_a_storage_key_is_used_once(job_id: uuid.UUID) -> None:
    with refused("uq_objects_key"):
        execute("UPDATE objects SET key = 'same'")


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("state = 'done'", "ck_jobs_state"),
        ("wanted = 'stop'", "ck_jobs_wanted"),
        ("version = -1", "version_not_negative"),
        ("state = 'failed', finished_at = now()", "failed_has_error"),
        ("error_code = 'x'", "failed_has_error"),
        ("state = 'succeeded'", "finished_at_end"),
        ("finished_at = now()", "finished_at_end"),
    ],
)
def test_a_job_is_consistent_in_itself(job_id: uuid.UUID, change: str, constraint: str) -> None:
    with refused(constraint):
        execute(f"UPDATE jobs SET {change}")


def test_work_is_charged_once(job_id: uuid.UUID) -> None:
    round_id = by_hand.live_round(job_id).id
    by_hand.to_state(round_id, EpisodeState.ACTING)
    with refused("uq_usage_round_id_episode_id_turn_attempt"), transaction() as session:
        columns = "tenant_id, job_id, round_id, episode_id, turn, attempt, prompt_tokens, generated_tokens,"
        columns += " trained_tokens, busy_seconds"
        session.execute(text(f"INSERT INTO usage ({columns}) SELECT {columns} FROM usage LIMIT 1"))


@pytest.mark.parametrize("change", ["weight = 0", "max_running_jobs = -1", "max_inflight_episodes = -1"])
def test_a_tenant_has_a_share_and_quotas(job_id: uuid.UUID, change: str) -> None:
    with refused("ck_tenants"):
        execute(f"UPDATE tenants SET {change}")
