"""Operators of the console, and the log of what they did."""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, BigKey, Created, UuidKey, one_of


class OperatorRole(StrEnum):
    """Each may do what the one before may, and more."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


class Operator(Base):
    __tablename__ = "operators"
    __table_args__ = (CheckConstraint(one_of("role", OperatorRole), name="role"),)

    id: Mapped[UuidKey]
    name: Mapped[str] = mapped_column(unique=True)
    password_hash: Mapped[str]  # argon2id
    role: Mapped[str]
    session_epoch: Mapped[int] = mapped_column(default=0)  # raised to end all sessions: new password, new role
    created_at: Mapped[Created]
    last_login_at: Mapped[datetime | None]
    disabled_at: Mapped[datetime | None]


class AuditEntry(Base):
    """Who did what to what; rows are only ever inserted. `actor` is a name, as operators may be renamed or go."""

    __tablename__ = "audit_log"
    __table_args__ = (
        Index("ix_audit_log_created", "created_at"),
        Index("ix_audit_log_target", "target_kind", "target_id"),
    )

    id: Mapped[BigKey]
    actor: Mapped[str]
    operator_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("operators.id"))
    action: Mapped[str]
    target_kind: Mapped[str | None]
    target_id: Mapped[str | None]
    tenant_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("tenants.id"))
    address: Mapped[str | None]
    data: Mapped[dict[str, Any] | None]
    created_at: Mapped[Created]
