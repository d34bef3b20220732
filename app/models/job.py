"""Jobs and the files they read."""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created, UuidKey, one_of


class JobState(StrEnum):
    VALIDATING = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
LIVE = tuple(s for s in JobState if s not in TERMINAL)


class JobKind(StrEnum):
    TRAIN = "train"
    PREFLIGHT = "preflight"  # one round with the base model, before hours are spent; never in lists of jobs


class Wanted(StrEnum):
    """What the user wants, apart from what is."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


class File(Base):
    """A tenant's data set; its content is an object in S3."""

    __tablename__ = "files"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        ForeignKeyConstraint(["tenant_id", "object_id"], ["objects.tenant_id", "objects.id"]),
    )

    id: Mapped[UuidKey]
    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    purpose: Mapped[str] = mapped_column(default="fine-tune")
    lines: Mapped[int]
    object_id: Mapped[uuid.UUID]
    created_at: Mapped[Created]
    deleted_at: Mapped[datetime | None]


class Job(Base):
    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        UniqueConstraint("tenant_id", "submit_key"),
        CheckConstraint(one_of("state", JobState), name="state"),
        CheckConstraint(one_of("wanted", Wanted), name="wanted"),
        CheckConstraint(one_of("kind", JobKind), name="kind"),
        CheckConstraint("version >= 0", name="version_not_negative"),
        CheckConstraint("(state = 'failed') = (error_code IS NOT NULL)", name="failed_has_error"),
        CheckConstraint(
            f"(state IN ({', '.join(repr(s.value) for s in TERMINAL)})) = (finished_at IS NOT NULL)",
            name="finished_at_end",
        ),
        Index(
            "ix_jobs_live",
            "tenant_id",
            "created_at",
            postgresql_where=text("state NOT IN ('succeeded', 'failed', 'cancelled')"),
        ),
        Index("ix_jobs_tenant_created", "tenant_id", "created_at"),
        Index("ix_jobs_created", "created_at", "id"),
    )

    id: Mapped[UuidKey]
    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id"))
    kind: Mapped[str] = mapped_column(default=JobKind.TRAIN, server_default=JobKind.TRAIN)
    name: Mapped[str]
    base_model: Mapped[str] = mapped_column(ForeignKey("base_models.name"))
    spec: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(default=JobState.VALIDATING)
    wanted: Mapped[str] = mapped_column(default=Wanted.RUN)
    version: Mapped[int] = mapped_column(default=0)  # the latest committed policy version
    rounds_without_signal: Mapped[int] = mapped_column(default=0)
    weight: Mapped[float] = mapped_column(default=1.0)
    error_code: Mapped[str | None]
    error_message: Mapped[str | None]
    created_at: Mapped[Created]
    started_at: Mapped[datetime | None]
    first_step_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    doorbell_at: Mapped[datetime | None]  # validation or start was last rung for
    doorbells: Mapped[int] = mapped_column(default=0)  # how often, a budget
    submit_key: Mapped[str | None]  # a repeated submit with this key finds this job
