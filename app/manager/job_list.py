"""Jobs in pages: filtered, searched, sorted. A cursor is the place of the last row: no page costs more than another."""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, Text, and_, cast, func, or_, select, tuple_
from sqlalchemy.orm import Session

from app.errors import InvalidRequest
from app.models import Job, Tenant
from app.models.job import JobKind

PAGE = 50

SORTS: dict[str, Any] = {
    "created": Job.created_at,
    "name": func.lower(Job.name),
    "tenant": Tenant.name,
    "state": Job.state,
    "version": Job.version,
}


@dataclass(frozen=True)
class JobQuery:
    """What a list of jobs is to show; empty fields filter nothing."""

    states: tuple[str, ...] = ()
    tenant: uuid.UUID | None = None
    base_model: str = ""
    search: str = ""  # part of the name, start of the id, or part of the tenant's name
    sort: str = "created"
    descending: bool = True
    cursor: str = ""

    def __post_init__(self) -> None:
        if self.sort not in SORTS:
            raise InvalidRequest(f"sort is one of {', '.join(SORTS)}, not {self.sort!r}", param="sort")


@dataclass(frozen=True)
class JobPage:
    ids: list[uuid.UUID]
    next_cursor: str  # empty on the last page


def job_page(session: Session, query: JobQuery, size: int = PAGE) -> JobPage:
    """The ids of a page of jobs. Raises InvalidRequest for a cursor that is none."""
    order = SORTS[query.sort]
    direction = (lambda c: c.desc()) if query.descending else (lambda c: c.asc())
    statement = _filtered(select(Job.id, order.label("place")), query)
    if query.cursor:
        place, job_id = _decode(query)
        after = tuple_(order, Job.id) < (place, job_id) if query.descending else tuple_(order, Job.id) > (place, job_id)
        statement = statement.where(after)
    rows = session.execute(statement.order_by(direction(order), direction(Job.id)).limit(size + 1)).all()
    more = len(rows) > size
    rows = rows[:size]
    return JobPage([r.id for r in rows], _encode(rows[-1].place, rows[-1].id) if more else "")


def state_counts(session: Session, query: JobQuery) -> dict[str, int]:
    """How many jobs of each state the other filters leave."""
    counted = _filtered(select(Job.state, func.count().label("jobs")), replace(query, states=()))
    rows = session.execute(counted.group_by(Job.state))
    return {row.state: row.jobs for row in rows}


def _filtered(statement: Select[*tuple[Any, ...]], query: JobQuery) -> Select[*tuple[Any, ...]]:
    conditions: list[ColumnElement[bool]] = [Job.kind == JobKind.TRAIN]
    if query.states:
        conditions.append(Job.state.in_(query.states))
    if query.tenant is not None:
        conditions.append(Job.tenant_id == query.tenant)
    if query.base_model:
        conditions.append(Job.base_model == query.base_model)
    if wanted := query.search.replace("\0", "").strip():
        conditions.append(
            or_(
                Job.name.icontains(wanted, autoescape=True),
                Tenant.name.icontains(wanted, autoescape=True),
                func.starts_with(cast(Job.id, Text), wanted.lower()),
            )
        )
    return statement.join(Tenant, Tenant.id == Job.tenant_id).where(and_(*conditions))


def _encode(place: Any, job_id: uuid.UUID) -> str:
    value = place.isoformat() if isinstance(place, datetime) else place
    return base64.urlsafe_b64encode(json.dumps([value, str(job_id)]).encode()).decode().rstrip("=")


def _decode(query: JobQuery) -> tuple[Any, uuid.UUID]:
    """The place of the last row. Raises InvalidRequest when it is not one of this order's."""
    try:
        padded = query.cursor + "=" * (-len(query.cursor) % 4)
        value, job_id = json.loads(base64.urlsafe_b64decode(padded))
        return _place(query.sort, value), uuid.UUID(job_id)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError, binascii.Error) as error:
        raise InvalidRequest("this cursor is not of this list; start from its first page", param="cursor") from error


def _place(sort: str, value: Any) -> Any:
    if sort == "created":
        return datetime.fromisoformat(value)
    if sort == "version":
        return min(int(value), 2**31 - 1)
    return str(value).replace("\0", "")


def in_order(ids: Sequence[uuid.UUID], rows: Sequence[Any]) -> list[Any]:
    """Rows with a `job_id` in the order of a page's ids."""
    by_id = {row.job_id: row for row in rows}
    return [by_id[i] for i in ids if i in by_id]
