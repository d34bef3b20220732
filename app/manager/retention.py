"""What is kept and what goes: optimizer states, adapters, orphans, old turns (rule 4: mark, wait, then delete)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import Executable, func, select, text, update
from sqlalchemy.orm import Session

from app import storage
from app.db import transaction
from app.models import StoredObject
from app.models.object import ObjectKind, ObjectState
from app.settings import get_settings

BATCH = 500
RETRY_SECONDS = 900  # that a client which sends no Idempotency-Key may retry a request
PARTITION = 10_000  # rounds in one partition of `turns`, as in the first migration

# A change of partitions wants `turns` and `rounds` for itself: it gives up, until the next pass, before anybody's
# deadlock check (after 1 s) would end a transaction that works on a round.
_BRIEFLY = "SET LOCAL lock_timeout = '500ms'"


def retain() -> dict[str, int]:
    """One pass, each part in its own transaction; returns what it did by name."""
    done: dict[str, int] = {}
    with transaction() as session:
        ensure_partitions(session)
    for part in (
        expire_optimizers,
        expire_adapters,
        expire_archives,
        expire_preflights,
        expire_orphans,
        roll_up_usage,
        delete_old_spans,
        delete_old_answers,
    ):
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
    session.execute(text(_BRIEFLY))
    last = session.execute(text("SELECT coalesce(max(id), 0) FROM rounds")).scalar_one()
    for round_id in (last, last + PARTITION):
        session.execute(text("SELECT marlaas_ensure_turns_partition(:id)"), {"id": round_id})


# A round without signal shares its parent's objects, so an object goes once no version that is kept refers to it.
_EXPIRE = """
WITH old AS (
    SELECT o.id FROM objects o JOIN jobs j ON j.id = o.job_id
    WHERE o.state = 'live' AND o.kind = :kind AND NOT EXISTS (
        SELECT FROM policy_versions v
        WHERE v.job_id = o.job_id AND v.version >= o.version AND v.{column} = o.id AND {kept}
    )
    ORDER BY o.id LIMIT :batch FOR NO KEY UPDATE OF o SKIP LOCKED
)
UPDATE objects o SET state = 'expired', state_at = now() FROM old WHERE o.id = old.id
"""

_KEPT_OPTIMIZER = "v.version > j.version - :keep"

# Every Nth version, the first and the last, and whatever a live round has pinned.
_KEPT_ADAPTER = (
    "(v.version % :every = 0 OR v.version >= j.version OR EXISTS ("
    "SELECT FROM rounds r WHERE r.job_id = v.job_id AND r.policy_version = v.version"
    " AND r.state IN ('rolling_out', 'ready', 'training')))"
)


def expire_optimizers(session: Session) -> int:
    """All but a job's latest K optimizer states."""
    statement = text(_EXPIRE.format(column="optimizer_object_id", kept=_KEPT_OPTIMIZER))
    keep = get_settings().keep_optimizer_states
    return _count(session, statement, {"kind": ObjectKind.OPTIMIZER, "keep": keep, "batch": BATCH})


def expire_adapters(session: Session) -> int:
    every = get_settings().keep_adapter_every
    if every == 1:
        return 0
    count = 0
    for kind, column in (
        (ObjectKind.ADAPTER_MODEL, "adapter_object_id"),
        (ObjectKind.ADAPTER_CONFIG, "config_object_id"),
    ):
        statement = text(_EXPIRE.format(column=column, kept=_KEPT_ADAPTER))
        count += _count(session, statement, {"kind": kind, "every": every, "batch": BATCH})
    return count


def expire_preflights(session: Session) -> int:
    """What ended preflights sampled with: fresh adapters, of no use to anybody."""
    statement = text(
        "WITH old AS (SELECT o.id FROM objects o JOIN jobs j ON j.id = o.job_id"
        "  WHERE o.state = 'live' AND j.kind = 'preflight' AND j.finished_at IS NOT NULL"
        "  ORDER BY o.id LIMIT :batch FOR NO KEY UPDATE OF o SKIP LOCKED)"
        " UPDATE objects o SET state = 'expired', state_at = now() FROM old WHERE o.id = old.id"
    )
    return _count(session, statement, {"batch": BATCH})


def expire_archives(session: Session) -> int:
    """Zips of adapters that are gone. Its maker holds the weights' lock: no zip comes to life after them."""
    statement = text(
        "WITH old AS (SELECT z.id FROM objects z WHERE z.kind = 'adapter_zip' AND z.state = 'live' AND NOT EXISTS ("
        "  SELECT FROM objects w WHERE w.kind = 'adapter_model' AND w.job_id = z.job_id AND w.version = z.version"
        "  AND w.state = 'live')"
        " ORDER BY z.id LIMIT :batch FOR NO KEY UPDATE OF z SKIP LOCKED)"
        " UPDATE objects o SET state = 'expired', state_at = now() FROM old WHERE o.id = old.id"
    )
    return _count(session, statement, {"batch": BATCH})


def _count(session: Session, statement: Executable, parameters: Mapping[str, Any]) -> int:
    return session.execute(statement, parameters).rowcount  # type: ignore[attr-defined]


def expire_orphans(session: Session) -> int:
    """Pending objects whose commit never came. The row lock keeps a commit that is just now under way."""
    statement = text(
        "WITH late AS ("
        " SELECT id FROM objects WHERE state = 'pending' AND state_at < now() - make_interval(secs => :wait)"
        " ORDER BY id LIMIT :batch FOR NO KEY UPDATE SKIP LOCKED)"
        " UPDATE objects o SET state = 'expired', state_at = now() FROM late WHERE o.id = late.id"
    )
    return _count(session, statement, {"wait": get_settings().orphan_seconds, "batch": BATCH})


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
    if not gone:
        return 0
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
            "WITH old AS (DELETE FROM usage"
            " WHERE created_at < date_trunc('day', now(), 'UTC') - interval '1 day' RETURNING *)"
            " INSERT INTO usage_days AS d"
            " SELECT tenant_id, job_id, (created_at AT TIME ZONE 'UTC')::date, sum(prompt_tokens),"
            " sum(generated_tokens), sum(trained_tokens), sum(busy_seconds) FROM old GROUP BY 1, 2, 3"
            " ON CONFLICT (tenant_id, job_id, day) DO UPDATE SET"
            " prompt_tokens = d.prompt_tokens + excluded.prompt_tokens,"
            " generated_tokens = d.generated_tokens + excluded.generated_tokens,"
            " trained_tokens = d.trained_tokens + excluded.trained_tokens,"
            " busy_seconds = d.busy_seconds + excluded.busy_seconds"
        )
    ).rowcount  # type: ignore[attr-defined]


def drop_old_turns(session: Session) -> int:
    """Drops partitions of `turns` all of whose rounds ended longer ago than they are kept for."""
    session.execute(text(_BRIEFLY))
    old = session.scalars(
        text(
            "SELECT substring(c.relname FROM 8)::bigint AS number"
            " FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'turns'::regclass"
            " AND (substring(c.relname FROM 8)::bigint + 1) * :size <= (SELECT max(id) FROM rounds)"
            " AND NOT EXISTS (SELECT FROM rounds r WHERE r.id >= substring(c.relname FROM 8)::bigint * :size"
            " AND r.id < (substring(c.relname FROM 8)::bigint + 1) * :size"
            " AND (r.finished_at IS NULL OR r.finished_at > now() - make_interval(secs => :seconds)))"
        ),
        {"size": PARTITION, "seconds": get_settings().keep_rounds_days * 86400},
    ).all()
    for number in old:
        session.execute(text("SELECT marlaas_drop_turns_partition(:id)"), {"id": number * PARTITION})
    return len(old)


def delete_old_spans(session: Session) -> int:
    statement = text(
        "DELETE FROM phase_spans WHERE id IN (SELECT id FROM phase_spans"
        " WHERE started_at < now() - make_interval(secs => :seconds) ORDER BY started_at LIMIT :batch)"
    )
    return _count(session, statement, {"seconds": get_settings().keep_rounds_days * 86400, "batch": 100 * BATCH})


def delete_old_answers(session: Session) -> int:
    """Answers kept for repeated requests: those without a key only for as long as a client retries by itself."""
    statement = text(
        "DELETE FROM idempotency_keys WHERE created_at < now() - make_interval(secs => CASE WHEN key IS NULL"
        " THEN CAST(:retry AS float8) ELSE CAST(:keep AS float8) END)"
    )
    keep = 3600 * get_settings().idempotency_hours
    return _count(session, statement, {"keep": keep, "retry": RETRY_SECONDS})
