"""Events of a job, in the transaction of the change that they tell of."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from app.models import Event, Job


def record(
    session: Session, job: Job, code: str, message: str, *, level: str = "info", data: dict[str, Any] | None = None
) -> None:
    session.add(
        Event(tenant_id=job.tenant_id, job_id=job.id, level=level, code=code, message=message[:2000], data=data)
    )
