"""Events of a job, in the transaction of the change that they tell of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.models import Event, Job


def record(
    session: Session, job: Job, code: str, message: str, *, level: str = "info", data: dict[str, Any] | None = None
) -> None:
    session.add(
        Event(tenant_id=job.tenant_id, job_id=job.id, level=level, code=code, message=message[:2000], data=data)
    )


def latest(session: Session, job: Job, limit: int, after: int = 0) -> Sequence[Event]:
    """The last `limit` events of a job that came after the event `after`, oldest first."""
    newest = select(Event).where(Event.job_id == job.id, Event.id > after).order_by(Event.id.desc()).limit(limit)
    return session.scalars(newest).all()[::-1]


def page(session: Session, job: Job, limit: int, before: int | None = None) -> tuple[Sequence[Event], bool]:
    """(up to `limit` events of a job, newest first, from behind the event `before`; whether there are older ones)."""
    statement = select(Event).where(Event.job_id == job.id, Event.tenant_id == job.tenant_id)
    if before is not None:
        statement = statement.where(Event.id < before)
    rows = session.scalars(statement.order_by(Event.id.desc()).limit(limit + 1)).all()
    return rows[:limit], len(rows) > limit
