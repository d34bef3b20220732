"""What a tenant used, by day and job: the days' sums, and the ledger's entries of the days that are not summed yet."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import date
from enum import StrEnum

from sqlalchemy import text
from sqlalchemy.orm import Session

NO_JOB = uuid.UUID(int=0)  # completions of a base model belong to no job


class GroupBy(StrEnum):
    DAY = "day"
    JOB = "job"
    DAY_AND_JOB = "day,job"


@dataclass(frozen=True)
class Usage:
    day: date | None  # UTC; None: all days of the range
    job_id: uuid.UUID | None  # None: all jobs, or (NO_JOB) none
    prompt_tokens: int
    generated_tokens: int
    trained_tokens: int
    busy_seconds: float  # of engines, environments and the trainer


_USAGE = """
SELECT {day} AS day, {job} AS job_id, sum(prompt_tokens)::bigint AS prompt_tokens,
    sum(generated_tokens)::bigint AS generated_tokens, sum(trained_tokens)::bigint AS trained_tokens,
    sum(busy_seconds)::float8 AS busy_seconds
FROM (
    SELECT day, job_id, prompt_tokens, generated_tokens, trained_tokens, busy_seconds FROM usage_days
    WHERE tenant_id = :tenant AND day BETWEEN :first AND :last
    UNION ALL
    SELECT (created_at AT TIME ZONE 'UTC')::date, job_id, prompt_tokens, generated_tokens, trained_tokens, busy_seconds
    FROM usage WHERE tenant_id = :tenant
        AND created_at >= CAST(:first AS timestamp) AT TIME ZONE 'UTC'
        AND created_at < (CAST(:last AS timestamp) + interval '1 day') AT TIME ZONE 'UTC'
) entries
WHERE CAST(:only AS uuid) IS NULL OR job_id = :only
GROUP BY 1, 2 ORDER BY 1, 2 LIMIT :limit
"""


def usage(
    session: Session,
    tenant_id: uuid.UUID,
    first: date,
    last: date,
    *,
    group_by: GroupBy = GroupBy.DAY_AND_JOB,
    job_id: uuid.UUID | None = None,
    limit: int = 10_000,
) -> list[Usage]:
    """Sums over the days from `first` to `last` (UTC, both included), of all jobs or one; at most `limit` of them."""
    statement = _USAGE.format(
        day="NULL::date" if group_by == GroupBy.JOB else "day",
        job="NULL::uuid" if group_by == GroupBy.DAY else "job_id",
    )
    parameters = {"tenant": tenant_id, "first": first, "last": last, "only": job_id, "limit": limit}
    return [Usage(**row._mapping) for row in session.execute(text(statement), parameters)]
