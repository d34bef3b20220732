"""Answers that were given to POST requests, so that the same request again gets the same answer and does nothing."""

from __future__ import annotations

import uuid
from typing import Any

from sqlalchemy import ForeignKey, ForeignKeyConstraint, Index, LargeBinary, SmallInteger, text
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, BigKey, Created


class StoredAnswer(Base):
    """Written in the transaction of what the request made. Without a key the digest of a retry finds it."""

    __tablename__ = "idempotency_keys"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "api_key_id"], ["api_keys.tenant_id", "api_keys.id"]),
        Index(
            "uq_idempotency_keys_key",
            "tenant_id",
            "key",
            unique=True,
            postgresql_where=text("key IS NOT NULL"),
        ),
        Index("ix_idempotency_keys_digest", "tenant_id", "request_digest", "created_at"),
        Index("ix_idempotency_keys_created", "created_at"),
    )

    id: Mapped[BigKey]
    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id"))
    api_key_id: Mapped[uuid.UUID]
    key: Mapped[str | None]  # the Idempotency-Key header
    request_digest: Mapped[bytes] = mapped_column(LargeBinary)  # SHA-256 of key id, method, path and body
    status: Mapped[int] = mapped_column(SmallInteger)
    answer: Mapped[dict[str, Any]]
    created_at: Mapped[Created]
