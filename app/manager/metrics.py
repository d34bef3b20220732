"""What a job's updates measured."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from sqlalchemy import BigInteger, cast, func, select
from sqlalchemy.orm import Session

from app.models import Job, Round, StepMetrics
from app.models.round import RoundKind, RoundState


def step_metrics(session: Session, job: Job, after: int = 0) -> Sequence[StepMetrics]:
    """Of the updates that made the versions after `after`, in order of version."""
    return session.scalars(
        select(StepMetrics)
        .where(StepMetrics.job_id == job.id, StepMetrics.version > after)
        .order_by(StepMetrics.version)
    ).all()


def metrics_of(session: Session, job: Job, versions: Sequence[int]) -> dict[int, dict[str, Any]]:
    """By version, of the steps that made these."""
    rows = session.execute(
        select(StepMetrics.version, StepMetrics.metrics).where(
            StepMetrics.job_id == job.id, StepMetrics.version.in_(versions)
        )
    )
    return {version: metrics for version, metrics in rows}  # noqa: C416


def evaluations_of(session: Session, job: Job, versions: Sequence[int]) -> dict[int, dict[str, Any]]:
    """By version, the summaries of finished evaluations on these."""
    rows = session.execute(
        select(Round.policy_version, Round.summary)
        .where(
            Round.job_id == job.id,
            Round.kind == RoundKind.EVAL,
            Round.state == RoundState.COMMITTED,
            Round.policy_version.in_(versions),
        )
        .order_by(Round.id)
    )
    return {version: summary for version, summary in rows}  # noqa: C416


def trained_tokens(session: Session, job_ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, int]:
    """Tokens that each job's updates read; jobs without any are left out."""
    tokens = cast(func.sum(StepMetrics.metrics["total_tokens"].as_float()), BigInteger)
    rows = session.execute(
        select(StepMetrics.job_id, tokens).where(StepMetrics.job_id.in_(job_ids)).group_by(StepMetrics.job_id)
    )
    return {job_id: count for job_id, count in rows if count is not None}
