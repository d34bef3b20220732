"""What operators did, to whom and from where. Rows are only ever inserted."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from app.models import AuditEntry, Tenant

MOST_TEXT = 200  # of a name or target that somebody typed
COMMAND_LINE = "command line"


def record(
    session: Session,
    *,
    actor: str,
    action: str,
    operator_id: uuid.UUID | None = None,
    target_kind: str | None = None,
    target_id: str | None = None,
    tenant_id: uuid.UUID | None = None,
    address: str | None = None,
    data: dict[str, Any] | None = None,
) -> None:
    """In the transaction of what is done. `data` must hold no secrets."""
    session.add(
        AuditEntry(
            actor=actor[:MOST_TEXT],
            operator_id=operator_id,
            action=action,
            target_kind=target_kind,
            target_id=target_id[:MOST_TEXT] if target_id is not None else None,
            tenant_id=tenant_id,
            address=address,
            data=data,
        )
    )


@dataclass(frozen=True)
class Wanted:
    """Which entries; what is None is not asked for."""

    actor: str | None = None
    action: str | None = None  # or how it starts: `tenant` for all of `tenant.…`
    target: str | None = None  # part of the target's id or of its tenant's name
    since: date | None = None
    until: date | None = None  # this day included


@dataclass(frozen=True)
class Page:
    entries: Sequence[tuple[AuditEntry, str | None]]  # newest first, each with its tenant's name
    older: int | None  # `before` of the next page, None at the end


def page(session: Session, wanted: Wanted, *, before: int | None = None, limit: int = 50) -> Page:
    statement = (
        select(AuditEntry, Tenant.name)
        .outerjoin(Tenant, Tenant.id == AuditEntry.tenant_id)
        .order_by(AuditEntry.id.desc())
        .limit(limit + 1)
    )
    if wanted.actor is not None:
        statement = statement.where(AuditEntry.actor == wanted.actor)
    if wanted.action is not None:
        statement = statement.where(func.starts_with(AuditEntry.action, wanted.action))
    if wanted.target is not None:
        statement = statement.where(
            or_(
                AuditEntry.target_id.icontains(wanted.target, autoescape=True),
                Tenant.name.icontains(wanted.target, autoescape=True),
            )
        )
    if wanted.since is not None:
        statement = statement.where(AuditEntry.created_at >= wanted.since)
    if wanted.until is not None:
        statement = statement.where(AuditEntry.created_at < wanted.until + timedelta(days=1))
    if before is not None:
        statement = statement.where(AuditEntry.id < before)
    rows = session.execute(statement).all()
    entries = [(row[0], row[1]) for row in rows[:limit]]
    return Page(entries, entries[-1][0].id if len(rows) > limit else None)
