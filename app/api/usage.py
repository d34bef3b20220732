"""`/v1/usage`: tokens and busy time of the tenant, by day and job."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

import pydantic
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.api import ids
from app.api.auth import caller, requires, tenant_transaction
from app.api.blueprint import api
from app.api.jobs import find_job
from app.errors import InvalidRequest, NotFound
from app.manager import preflight
from app.manager.usage import NO_JOB, GroupBy, Usage, usage
from app.models import Job
from app.models.job import JobKind

DEFAULT_DAYS = 30
MOST_DAYS = 366
MOST_ROWS = 10_000


class UsageQuery(pydantic.BaseModel):
    start_date: date | None = pydantic.Field(None, description="UTC, included; default: 30 days up to the end")
    end_date: date | None = pydantic.Field(None, description="UTC, included; default: today")
    job: str | None = pydantic.Field(None, max_length=64, description="id of a job or preflight: only its own")
    group_by: GroupBy = GroupBy.DAY_AND_JOB


class UsageSum(pydantic.BaseModel):
    prompt_tokens: int
    generated_tokens: int
    trained_tokens: int
    busy_seconds: float = pydantic.Field(
        description="seconds of each request in the engine and of each update in the trainer, summed: more than the"
        " clock shows where they run side by side"
    )


class UsageRow(UsageSum):
    day: date | None = pydantic.Field(description="UTC; null where it is summed over days")
    job: str | None = pydantic.Field(
        description="`ftjob-…` or `preflight-…`; null: completions of base models, or summed over jobs"
    )


class UsageReport(pydantic.BaseModel):
    object: Literal["usage"]
    start_date: date
    end_date: date
    group_by: GroupBy
    data: list[UsageRow]
    total: UsageSum


@api.get("/usage")
@requires("read")
@api.input(UsageQuery, location="query", arg_name="query")
@api.output(UsageReport)
@api.doc(responses={404: "There is no such job or preflight."})
def retrieve_usage(query: UsageQuery) -> dict[str, Any]:
    """Retrieve usage

    Tokens of training, evaluations and served completions. Days are UTC.
    """
    first, last = _range(query)
    with tenant_transaction() as session:
        job_id = None if query.job is None else _find(session, query.job).id
        rows = usage(
            session, caller().tenant_id, first, last, group_by=query.group_by, job_id=job_id, limit=MOST_ROWS + 1
        )
        preflights = _preflights(session, {row.job_id for row in rows if row.job_id is not None})
    if len(rows) > MOST_ROWS:
        raise InvalidRequest(
            f"these are more than {MOST_ROWS} sums; ask for fewer days, or with group_by=day or group_by=job",
            param="start_date",
        )
    return {
        "object": "usage",
        "start_date": first,
        "end_date": last,
        "group_by": query.group_by,
        "data": [{"day": row.day, "job": _job(row, preflights)} | _sums([row]) for row in rows],
        "total": _sums(rows),
    }


def _range(query: UsageQuery) -> tuple[date, date]:
    last = query.end_date or datetime.now(UTC).date()
    if query.start_date is None:
        if last < date.min + timedelta(days=DEFAULT_DAYS):
            return date.min, last
        return last - timedelta(days=DEFAULT_DAYS - 1), last
    if query.start_date > last:
        raise InvalidRequest(f"start_date: {query.start_date} is after end_date, {last}", param="start_date")
    if (last - query.start_date).days >= MOST_DAYS:
        raise InvalidRequest(f"start_date: a range has at most {MOST_DAYS} days", param="start_date")
    return query.start_date, last


def _find(session: Session, text: str) -> Job:
    """The caller's job or preflight of this id. Raises NotFound."""
    if not text.startswith("preflight-"):
        return find_job(session, text, "job")
    try:
        return preflight.find(session, caller().tenant_id, ids.parse_preflight(text, "job"))
    except NotFound as error:
        raise ids.not_found("preflight", text, "job") from error


def _preflights(session: Session, job_ids: Collection[uuid.UUID]) -> set[uuid.UUID]:
    return set(session.scalars(select(Job.id).where(Job.id.in_(job_ids), Job.kind == JobKind.PREFLIGHT)))


def _job(row: Usage, preflights: Collection[uuid.UUID]) -> str | None:
    if row.job_id is None or row.job_id == NO_JOB:
        return None
    return ids.preflight_id(row.job_id) if row.job_id in preflights else ids.job_id(row.job_id)


def _sums(rows: list[Usage]) -> dict[str, Any]:
    return {field: sum(getattr(row, field) for row in rows) for field in UsageSum.model_fields}
