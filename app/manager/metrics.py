"""What a job's updates measured."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.models import Job, StepMetrics


def step_metrics(session: Session, job: Job, after: int = 0) -> Sequence[StepMetrics]:
    """Of the updates that made the versions after `after`, in order of version."""
    return session.scalars(
        select(StepMetrics)
        .where(StepMetrics.job_id == job.id, StepMetrics.version > after)
        .order_by(StepMetrics.version)
    ).all()
