"""The usage ledger: what each turn and update cost, once; rolled up by day."""

from __future__ import annotations

import uuid
from datetime import date

from sqlalchemy import BigInteger, ForeignKey, Index, SmallInteger, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, BigInt, BigKey, Created


class UsageEntry(Base):
    """`episode_id` 0 is the training of the round, with the attempt that committed.

    `round_id` 0 is a completion that was served: `episode_id` is a random number of its own, `job_id` the job of the
    adapter, or the nil UUID for the base model.
    """

    __tablename__ = "usage"
    __table_args__ = (
        UniqueConstraint("round_id", "episode_id", "turn", "attempt"),
        Index("ix_usage_created", "created_at"),
        Index("ix_usage_tenant_created", "tenant_id", "created_at"),
    )

    id: Mapped[BigKey]
    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id"))
    job_id: Mapped[uuid.UUID]
    round_id: Mapped[int] = mapped_column(BigInteger)
    episode_id: Mapped[int] = mapped_column(BigInteger)
    turn: Mapped[int] = mapped_column(SmallInteger)
    attempt: Mapped[int]
    prompt_tokens: Mapped[int] = mapped_column(default=0)
    generated_tokens: Mapped[int] = mapped_column(default=0)
    trained_tokens: Mapped[int] = mapped_column(default=0)
    busy_seconds: Mapped[float] = mapped_column(default=0.0)
    created_at: Mapped[Created]


class UsageDay(Base):
    __tablename__ = "usage_days"

    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    job_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    day: Mapped[date] = mapped_column(primary_key=True)
    prompt_tokens: Mapped[BigInt] = mapped_column(default=0)
    generated_tokens: Mapped[BigInt] = mapped_column(default=0)
    trained_tokens: Mapped[BigInt] = mapped_column(default=0)
    busy_seconds: Mapped[float] = mapped_column(default=0.0)
