"""Immutable S3 objects: `pending` before the upload, `live` with the commit, `expired` before deletion (rule 4)."""

from __future__ import annotations

import uuid
from enum import StrEnum

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, BigInt, Created, UuidKey, one_of


class ObjectState(StrEnum):
    PENDING = "pending"
    LIVE = "live"
    EXPIRED = "expired"
    DELETED = "deleted"


class ObjectKind(StrEnum):
    ADAPTER_MODEL = "adapter_model"
    ADAPTER_CONFIG = "adapter_config"
    ADAPTER_ZIP = "adapter_zip"  # both adapter files as one download, made when first asked for
    OPTIMIZER = "optimizer"
    FILE = "file"


class StoredObject(Base):
    __tablename__ = "objects"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        ForeignKeyConstraint(["tenant_id", "job_id"], ["jobs.tenant_id", "jobs.id"], use_alter=True),
        CheckConstraint(one_of("state", ObjectState), name="state"),
        CheckConstraint(one_of("kind", ObjectKind), name="kind"),
        CheckConstraint("length(sha256) = 64 AND size >= 0", name="sha256_and_size"),
        Index("ix_objects_unsettled", "state", "state_at", postgresql_where=text("state IN ('pending', 'expired')")),
        Index("ix_objects_live", "kind", "job_id", "version", postgresql_where=text("state = 'live'")),
    )

    id: Mapped[UuidKey]
    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id"))
    job_id: Mapped[uuid.UUID | None]
    version: Mapped[int | None]
    kind: Mapped[str]
    key: Mapped[str] = mapped_column(unique=True)
    sha256: Mapped[str]
    size: Mapped[BigInt]
    state: Mapped[str] = mapped_column(default=ObjectState.PENDING)
    state_at: Mapped[Created]  # when the state was entered
    created_at: Mapped[Created]
