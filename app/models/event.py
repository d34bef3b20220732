"""What happened to a job, for people: typed, with the place and the way out."""

from __future__ import annotations

import uuid
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, BigKey, Created


class Event(Base):
    __tablename__ = "events"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "job_id"], ["jobs.tenant_id", "jobs.id"]),
        CheckConstraint("level IN ('info', 'warn', 'error')", name="level"),
        Index("ix_events_job", "job_id", "id"),
    )

    id: Mapped[BigKey]
    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id"))
    job_id: Mapped[uuid.UUID]
    level: Mapped[str]
    code: Mapped[str]
    message: Mapped[str]
    data: Mapped[dict[str, Any] | None]
    created_at: Mapped[Created]
