"""Tenants, their keys, and the base models that all of them share."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, LargeBinary, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, BigInt, Created, UuidKey


class Tenant(Base):
    __tablename__ = "tenants"
    __table_args__ = (
        CheckConstraint("weight > 0", name="weight_positive"),
        CheckConstraint("max_running_jobs >= 0 AND max_inflight_episodes >= 0", name="quotas_not_negative"),
        CheckConstraint(
            "max_live_jobs >= 0 AND max_file_bytes >= 0 AND max_chat_requests >= 0 AND requests_per_minute >= 0",
            name="api_quotas_not_negative",
        ),
    )

    id: Mapped[UuidKey]
    name: Mapped[str] = mapped_column(unique=True)
    weight: Mapped[float] = mapped_column(default=1.0)
    max_running_jobs: Mapped[int] = mapped_column(default=4)
    max_inflight_episodes: Mapped[int] = mapped_column(default=256)
    max_live_jobs: Mapped[int] = mapped_column(default=100, server_default="100")  # queued and paused ones included
    max_file_bytes: Mapped[BigInt] = mapped_column(default=10 << 30, server_default=str(10 << 30))
    max_chat_requests: Mapped[int] = mapped_column(default=8, server_default="8")  # at once
    requests_per_minute: Mapped[int] = mapped_column(default=600, server_default="600")  # of one key
    suspended: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[Created]


class ApiKey(Base):
    """A key is shown once; only its hash and prefix are kept."""

    __tablename__ = "api_keys"
    __table_args__ = (UniqueConstraint("tenant_id", "id"), Index("ix_api_keys_tenant_id", "tenant_id"))

    id: Mapped[UuidKey]
    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    prefix: Mapped[str]
    secret_hash: Mapped[bytes] = mapped_column(LargeBinary, unique=True)  # SHA-256 of a 256-bit random secret
    scopes: Mapped[list[str]]
    created_at: Mapped[Created]
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class BaseModel(Base):
    """A frozen model. Its queues are `rollout<suffix>` and `training<suffix>`; the first one has no suffix."""

    __tablename__ = "base_models"

    name: Mapped[str] = mapped_column(primary_key=True)
    queue_suffix: Mapped[str] = mapped_column(unique=True)
    path: Mapped[str]  # relative to the models directory, or absolute
    dtype: Mapped[str]  # compute dtype of engines and trainer: bfloat16 | float32
    config: Mapped[dict[str, Any]]  # context_length, vocab_size, hidden_size, ... from the model's own config
    created_at: Mapped[Created]
