"""What is kept and what goes: optimizer states, adapters, orphans, old turns (rule 4: mark, wait, then delete)."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from app import storage
from app.db import transaction
from app.models import StoredObject
from app.models.object import ObjectState
from app.settings import get_settings

BATCH = 500
PARTITION = 10_000  # rounds in one partition of `turns`, as in the first migration


def retain() -> dict[str, int]:
    """One pass, each part in its own transaction; returns what it did by name."""
    done: dict[str, int] = {}
    with transaction() as session:
        ensure_partitions(session)
    for part in (expire_optimizers, expire_adapters, expire_orphans, roll_up_usage):
        with transaction() as session:
            if count := part(session):
                done[part.__name__] = count
    if count := delete_expired():
        done["delete_expired"] = count
    with transaction() as session:
        if count := drop_old_turns(session):
            done["drop_old_turns"] = count
    return done


def ensure_partitions(session: Session) -> None:
    """Keeps the partition after the newest round's ready, so that no round waits for one."""
    last = session.execute(text("SELECT coalesce(max(id), 0) FROM rounds")).scalar_one()
    for round_id in (last, last + PARTITION):
        session.execute(text("SELECT marlaas_ensure_turns_partition(:id)"), {"id": round_id})


_EXPIRE = """
UPDATE objects SET state = 'expired', state_at = now() WHERE state = 'live' AND id IN (
    SELECT v.{column} FROM policy_versions v JOIN jobs j ON j.id = v.job_id
    WHERE v.{column} IS NOT NULL AND {old}
    LIMIT :batch
) AND id NOT IN (
    SELECT v.{column} FROM policy_versions v JOIN jobs j ON j.id = v.job_id WHERE v.{column} IS NOT NULL AND NOT ({old})
)
"""

# A live job's latest K states (an update and its predecessor); of a job that is over, the last one.
_OLD_OPTIMIZER = "v.version <= j.version - :keep"

# Every Nth version, the first and the last, and whatever a live round has pinned.
_OLD_ADAPTER = (
    "v.version > 0 AND v.version < j.version AND v.version % :every <> 0 AND NOT EXISTS ("
    "SELECT 1 FROM rounds r WHERE r.job_id = v.job_id AND r.policy_version = v.version"
    " AND r.state IN ('rolling_out', 'ready', 'training'))"
)


def expire_optimizers(session: Session) -> int:
    keep = get_settings().keep_optimizer_states
    statement = text(_EXPIRE.format(column="optimizer_object_id", old=_OLD_OPTIMIZER))
    return session.execute(statement, {"keep": keep, "batch": BATCH}).rowcount  # type: ignore[attr-defined]


def expire_adapters(session: Session) -> int:
    every = get_settings().keep_adapter_every
    count = 0
    for column in ("adapter_object_id", "config_object_id"):
        statement = text(_EXPIRE.format(column=column, old=_OLD_ADAPTER))
        count += session.execute(statement, {"every": every, "batch": BATCH}).rowcount  # type: ignore[attr-defined]
    return count


def expire_orphans(session: Session) -> int:
    """Pending objects whose commit never came. The row lock keeps a commit that is just now under way."""
    late = (
        select(StoredObject.id)
        .where(
            StoredObject.state == ObjectState.PENDING,
            StoredObject.state_at < func.now() - timedelta(seconds=get_settings().orphan_seconds),
        )
        .limit(BATCH)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    return session.execute(
        update(StoredObject)
        .where(StoredObject.id.in_(late))
        .values(state=ObjectState.EXPIRED, state_at=func.now())
        .execution_options(synchronize_session=False)
    ).rowcount  # type: ignore[attr-defined]


def delete_expired() -> int:
    """Deletes what has been expired for longer than the longest presigned URL and load may last. Storage first, then
    the row: a crash in between deletes again, which is fine."""
    settings = get_settings()
    wait = timedelta(seconds=settings.presign_seconds + settings.training_deadline_seconds)
    with transaction() as session:
        gone = session.execute(
            select(StoredObject.id, StoredObject.key)
            .where(StoredObject.state == ObjectState.EXPIRED, StoredObject.state_at < func.now() - wait)
            .limit(BATCH)
        ).all()
    for row in gone:
        storage.delete(row.key)
    with transaction() as session:
        session.execute(
            update(StoredObject)
            .where(StoredObject.id.in_([row.id for row in gone]))
            .values(state=ObjectState.DELETED, state_at=func.now())
        )
    return len(gone)


def roll_up_usage(session: Session) -> int:
    """Adds the ledger's entries of days that are over to the days' sums and removes them, in one statement."""
    return session.execute(
        text(
            "WITH old AS (DELETE FROM usage WHERE created_at < date_trunc('day', now()) - interval '1 day' RETURNING *)"
            " INSERT INTO usage_days AS d"
            " SELECT tenant_id, job_id, created_at::date, sum(prompt_tokens), sum(generated_tokens),"
            " sum(trained_tokens), sum(busy_seconds) FROM old GROUP BY 1, 2, 3"
            " ON CONFLICT (tenant_id, job_id, day) DO UPDATE SET"
            " prompt_tokens = d.prompt_tokens + excluded.prompt_tokens,"
            " generated_tokens = d.generated_tokens + excluded.generated_tokens,"
            " trained_tokens = d.trained_tokens + excluded.trained_tokens,"
            " busy_seconds = d.busy_seconds + excluded.busy_seconds"
        )
    ).rowcount  # type: ignore[attr-defined]


def drop_old_turns(session: Session) -> int:
    """Drops partitions of `turns` all of whose rounds ended longer ago than they are kept for."""
    old = session.scalars(
        text(
            "SELECT id / :size AS number FROM rounds GROUP BY 1 HAVING count(*) = count(finished_at)"
            " AND max(finished_at) < now() - make_interval(secs => :seconds)"
            " AND (id / :size + 1) * :size <= (SELECT max(id) FROM rounds)"
            " AND to_regclass('turns_p' || id / :size) IS NOT NULL"
        ),
        {"size": PARTITION, "seconds": get_settings().keep_rounds_days * 86400},
    ).all()
    for number in old:
        session.execute(text("SELECT marlaas_drop_turns_partition(:id)"), {"id": number * PARTITION})
    return len(old)
