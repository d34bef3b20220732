"""What is kept and what goes, in the tables and in the real S3: mark, wait, then delete."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from sqlalchemy import select, text

from app import db, storage
from app.db import transaction
from app.errors import ObjectMissing
from app.manager import objects, retention
from app.manager.objects import Upload
from app.manager.retention import PARTITION
from app.models import PolicyVersion, StoredObject, Tenant, UsageDay, UsageEntry
from app.models.object import ObjectKind, ObjectState
from app.settings import Settings
from tests import by_hand


@pytest.fixture
def job_id(tenant: Tenant) -> uuid.UUID:
    """A finished job of six versions after 0; the third round gave no signal, so 3 has the objects of 2."""
    made = by_hand.start_job(
        tenant, hyperparameters={"n_steps": 6, "prompts_per_round": 1, "group_size": 2, "no_signal_patience": 9}
    )
    for version in range(1, 7):
        by_hand.step(made, signal=version != 3)
    return made


def kept(job_id: uuid.UUID, column: str) -> list[int]:
    """Versions whose object is live."""
    with transaction() as session:
        return list(
            session.scalars(
                select(PolicyVersion.version)
                .join(StoredObject, getattr(PolicyVersion, column) == StoredObject.id)
                .where(PolicyVersion.job_id == job_id, StoredObject.state == ObjectState.LIVE)
                .order_by(PolicyVersion.version)
            )
        )


def expire_all() -> None:
    for part in (retention.expire_optimizers, retention.expire_adapters):
        with transaction() as session:
            part(session)


# --- which objects stay


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_latest_optimizer_states_stay(
    job_id: uuid.UUID, settings: Settings, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    monkeypatch.setattr(settings, "keep_optimizer_states", keep)
    expire_all()
    expected = {1: [6], 2: [5, 6], 4: [2, 3, 4, 5, 6]}  # 2 is kept with 3, which shares its objects
    assert kept(job_id, "optimizer_object_id") == expected[keep]


def test_all_adapters_stay_unless_told_otherwise(job_id: uuid.UUID) -> None:
    expire_all()
    assert kept(job_id, "adapter_object_id") == list(range(7))


@pytest.mark.parametrize(("every", "expected"), [(2, [0, 2, 3, 4, 6]), (3, [0, 2, 3, 6]), (100, [0, 6])])
def test_every_nth_adapter_the_first_and_the_last_stay(
    job_id: uuid.UUID, settings: Settings, monkeypatch: pytest.MonkeyPatch, every: int, expected: list[int]
) -> None:
    monkeypatch.setattr(settings, "keep_adapter_every", every)
    expire_all()
    assert kept(job_id, "adapter_object_id") == expected
    assert kept(job_id, "config_object_id") == expected


def test_an_adapter_that_a_live_round_has_pinned_stays(
    tenant: Tenant, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "keep_adapter_every", 100)
    job_id = by_hand.start_job(tenant, evaluation={"every": 1, "prompts": 1})
    for _ in range(3):
        by_hand.step(job_id)
    expire_all()
    assert kept(job_id, "adapter_object_id") == [0, 1, 2, 3]  # the evaluations are still to come
    by_hand.execute("UPDATE rounds SET state = 'abandoned' WHERE kind = 'eval'")
    expire_all()
    assert kept(job_id, "adapter_object_id") == [0, 3]


def test_what_the_next_update_needs_stays(tenant: Tenant, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for: a live job's current version can always be trained on."""
    monkeypatch.setattr(settings, "keep_optimizer_states", 1)
    monkeypatch.setattr(settings, "keep_adapter_every", 100)
    job_id = by_hand.start_job(tenant, hyperparameters={"n_steps": 9, "prompts_per_round": 1, "group_size": 2})
    for version in range(1, 4):
        by_hand.step(job_id, signal=version == 1)
        expire_all()
        for column in ("adapter_object_id", "config_object_id", "optimizer_object_id"):
            assert version in kept(job_id, column)


def test_more_than_a_batch_goes_in_several_passes(job_id: uuid.UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was marked before must not be in the way of what is left."""
    monkeypatch.setattr(retention, "BATCH", 2)
    counts = []
    for _ in range(4):
        with transaction() as session:
            counts.append(retention.expire_optimizers(session))
    assert counts == [2, 2, 0, 0]
    assert kept(job_id, "optimizer_object_id") == [5, 6]


# --- deletion


@pytest.fixture
def stored(tenant: Tenant) -> StoredObject:
    """A pending object that was uploaded and never committed."""
    upload = Upload(ObjectKind.OPTIMIZER, f"tenants/{tenant.id}/orphan-{uuid.uuid4()}", b"bytes")
    with transaction() as session:
        (object_id,) = objects.announce(session, tenant.id, None, None, [upload])
    storage.put(upload.key, upload.data)
    with transaction() as session:
        return session.get_one(StoredObject, object_id)


def age(seconds: float) -> None:
    by_hand.execute("UPDATE objects SET state_at = now() - make_interval(secs => :s)", s=seconds)


def state_of(stored: StoredObject) -> str:
    with transaction() as session:
        return session.get_one(StoredObject, stored.id).state


def test_an_upload_under_way_is_no_orphan(stored: StoredObject, settings: Settings) -> None:
    age(settings.orphan_seconds - 60)
    retention.retain()
    assert state_of(stored) == ObjectState.PENDING


def test_an_orphan_is_marked_and_its_bytes_stay_for_now(stored: StoredObject, settings: Settings) -> None:
    age(settings.orphan_seconds + 1)
    retention.retain()
    assert state_of(stored) == ObjectState.EXPIRED
    assert storage.get(stored.key, stored.sha256) == b"bytes"


def test_bytes_outlive_every_link_to_them_and_then_go(stored: StoredObject, settings: Settings) -> None:
    longest = settings.presign_seconds + settings.training_deadline_seconds
    by_hand.execute("UPDATE objects SET state = 'expired'")
    age(longest - 60)
    assert retention.delete_expired() == 0
    age(longest + 1)
    assert retention.delete_expired() == 1
    assert state_of(stored) == ObjectState.DELETED
    with pytest.raises(ObjectMissing):
        storage.get(stored.key, stored.sha256)


def test_a_deletion_that_died_half_way_is_done_again(stored: StoredObject) -> None:
    by_hand.execute("UPDATE objects SET state = 'expired'")
    age(10**6)
    storage.delete(stored.key)  # the process died before it could say so
    assert retention.delete_expired() == 1
    assert state_of(stored) == ObjectState.DELETED


def test_live_objects_are_never_deleted(job_id: uuid.UUID) -> None:
    age(10**8)
    retention.retain()
    age(10**8)
    retention.retain()
    assert kept(job_id, "adapter_object_id") == list(range(7))
    assert kept(job_id, "optimizer_object_id") == [5, 6]


# --- the ledger


def test_usage_of_past_days_is_summed_once(job_id: uuid.UUID, tenant: Tenant) -> None:
    with transaction() as session:
        entries = session.scalars(select(UsageEntry)).all()
    generated, trained = (sum(getattr(e, f) for e in entries) for f in ("generated_tokens", "trained_tokens"))
    by_hand.execute("UPDATE usage SET created_at = now() - interval '3 days'")
    for _ in range(2):
        with transaction() as session:
            retention.roll_up_usage(session)
    with transaction() as session:
        (day,) = session.scalars(select(UsageDay)).all()
        assert session.scalars(select(UsageEntry)).all() == []
    assert (day.tenant_id, day.job_id, day.generated_tokens, day.trained_tokens) == (
        tenant.id,
        job_id,
        generated,
        trained,
    )


def test_late_usage_is_added_to_its_day(job_id: uuid.UUID) -> None:
    by_hand.execute("UPDATE usage SET created_at = now() - interval '3 days', generated_tokens = 1")
    with transaction() as session:
        retention.roll_up_usage(session)
        before = session.scalars(select(UsageDay.generated_tokens)).one()
        session.execute(
            text(
                "INSERT INTO usage (tenant_id, job_id, round_id, episode_id, turn, attempt, prompt_tokens,"
                " generated_tokens, trained_tokens, busy_seconds, created_at)"
                " SELECT tenant_id, job_id, 1, 1, 1, 1, 0, 5, 0, 0, now() - interval '3 days' FROM usage_days"
            )
        )
        retention.roll_up_usage(session)
        assert session.scalars(select(UsageDay.generated_tokens)).one() == before + 5


def test_todays_usage_stays_in_detail(job_id: uuid.UUID) -> None:
    with transaction() as session:
        assert retention.roll_up_usage(session) == 0
        assert session.scalars(select(UsageEntry)).first() is not None


# --- turns and spans


def partitions() -> list[int]:
    """Numbers of the partitions of `turns`."""
    with db.engine("owner").connect() as connection:
        names = connection.scalars(
            text("SELECT relname FROM pg_class JOIN pg_inherits ON inhrelid = oid WHERE inhparent = 'turns'::regclass")
        )
        return sorted(int(name.removeprefix("turns_p")) for name in names)


@pytest.fixture
def old_partitions(tenant: Tenant) -> Iterator[uuid.UUID]:
    """A live round in partition 0, finished ones in 5 and 6, a live one in 7; put back afterwards."""
    before = partitions()
    owner = db.engine("owner")

    def next_round_id(value: int) -> None:
        with owner.begin() as connection:
            connection.execute(text(f"ALTER SEQUENCE rounds_id_seq RESTART WITH {value}"))

    last = by_hand.live_round(by_hand.start_job(tenant)).id
    job_id = by_hand.start_job(tenant, hyperparameters={"n_steps": 9, "prompts_per_round": 1, "group_size": 2})
    for number in (5, 6, 7):
        next_round_id(number * PARTITION + 1)
        with transaction() as session:
            session.execute(text("SELECT marlaas_ensure_turns_partition(:id)"), {"id": number * PARTITION})
        by_hand.step(job_id)  # opens its next round in this partition
    yield job_id
    with owner.begin() as connection:
        connection.execute(text("DELETE FROM turns"))
        for number in set(partitions()) - set(before):
            connection.execute(text(f"DROP TABLE turns_p{number}"))
        for number in set(before) - set(partitions()):
            connection.execute(text(f"SELECT marlaas_ensure_turns_partition({number * PARTITION})"))
    next_round_id(last + 1000)


def finish_long_ago(settings: Settings) -> None:
    by_hand.execute(
        "UPDATE rounds SET finished_at = now() - make_interval(days => :d) WHERE finished_at IS NOT NULL",
        d=int(settings.keep_rounds_days) + 1,
    )


def drop_old_turns() -> int:
    with transaction() as session:
        return retention.drop_old_turns(session)


def test_partitions_of_rounds_that_ended_long_ago_are_dropped(old_partitions: uuid.UUID, settings: Settings) -> None:
    by_hand.execute("UPDATE rounds SET state = 'abandoned', finished_at = now() WHERE state = 'rolling_out'")
    finish_long_ago(settings)
    assert {0, 5, 6, 7} <= set(partitions())
    drop_old_turns()
    assert partitions() == [7]  # which is not full


def test_partitions_with_a_live_or_fresh_round_stay(old_partitions: uuid.UUID, settings: Settings) -> None:
    drop_old_turns()
    assert {0, 5, 6, 7} <= set(partitions())  # everything is fresh
    finish_long_ago(settings)
    drop_old_turns()
    assert partitions() == [0, 7]


def test_the_next_partition_is_there_before_its_first_round(tenant: Tenant) -> None:
    by_hand.start_job(tenant)
    with transaction() as session:
        last = session.execute(text("SELECT max(id) FROM rounds")).scalar_one()
        retention.ensure_partitions(session)
    assert {last // PARTITION, last // PARTITION + 1} <= set(partitions())


def test_old_spans_go(tenant: Tenant, settings: Settings) -> None:
    by_hand.start_job(tenant)
    for days in (1, settings.keep_rounds_days + 1):
        by_hand.execute(
            "INSERT INTO phase_spans (tenant_id, round_id, phase, worker, started_at, ended_at)"
            " SELECT tenant_id, id, 'rollout', 'w', now() - make_interval(days => :d), now() FROM rounds",
            d=int(days),
        )
    with transaction() as session:
        assert retention.delete_old_spans(session) == 1
