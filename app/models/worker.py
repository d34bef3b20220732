"""Workers as they announce themselves, and the spans of time they spent on a round."""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, ForeignKeyConstraint, Index
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, BigKey, Created, one_of


class WorkerKind(StrEnum):
    ROLLOUT = "rollout"
    TOOLS = "tools"
    TRAINING = "training"
    MANAGER = "manager"


class Worker(Base):
    """One process. `boot` changes at each start, so that leases of the process before are known as lost."""

    __tablename__ = "workers"
    __table_args__ = (CheckConstraint(one_of("kind", WorkerKind), name="kind"),)

    name: Mapped[str] = mapped_column(primary_key=True)  # hostname of the Celery node
    boot: Mapped[uuid.UUID]
    kind: Mapped[str]
    base_model: Mapped[str | None]
    slots: Mapped[int] = mapped_column(default=0)  # episodes at once (rollout), calls at once (tools)
    adapter_slots: Mapped[int] = mapped_column(default=0)
    draining: Mapped[bool] = mapped_column(default=False)
    load: Mapped[dict[str, Any]] = mapped_column(
        default=dict
    )  # running, waiting, tokens/s, resident adapters, busy share
    started_at: Mapped[Created]
    seen_at: Mapped[Created]


class PhaseSpan(Base):
    """A stretch of time in which a stage worked on a round: the lanes of the phase timeline."""

    __tablename__ = "phase_spans"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "round_id"], ["rounds.tenant_id", "rounds.id"]),
        CheckConstraint("phase IN ('rollout', 'environment', 'training')", name="phase"),
        CheckConstraint("ended_at >= started_at", name="ends_after_start"),
        Index("ix_phase_spans_round", "round_id"),
        Index("ix_phase_spans_time", "started_at"),
    )

    id: Mapped[BigKey]
    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id"))
    round_id: Mapped[int] = mapped_column(BigInteger)
    phase: Mapped[str]
    worker: Mapped[str]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime]
