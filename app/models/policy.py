"""Policy versions: immutable, without gaps; and what each update measured."""

from __future__ import annotations

import uuid
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, ForeignKeyConstraint, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created


class PolicyVersion(Base):
    __tablename__ = "policy_versions"
    __table_args__ = (
        # Without gaps: every version but 0 stands on the one before it.
        CheckConstraint(
            "CASE version WHEN 0 THEN parent_version IS NULL ELSE coalesce(parent_version = version - 1, false) END",
            name="stands_on_parent",
        ),
        ForeignKeyConstraint(
            ["job_id", "parent_version"],
            ["policy_versions.job_id", "policy_versions.version"],
            name="fk_parent_version",
        ),
        ForeignKeyConstraint(["tenant_id", "job_id"], ["jobs.tenant_id", "jobs.id"]),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_object_id"], ["objects.tenant_id", "objects.id"], name="fk_adapter"
        ),
        ForeignKeyConstraint(["tenant_id", "config_object_id"], ["objects.tenant_id", "objects.id"], name="fk_config"),
        ForeignKeyConstraint(
            ["tenant_id", "optimizer_object_id"], ["objects.tenant_id", "objects.id"], name="fk_optimizer"
        ),
        # One commit a round: a round of the parent version makes at most one version.
        UniqueConstraint("round_id"),
        ForeignKeyConstraint(
            ["job_id", "round_id", "parent_version"],
            ["rounds.job_id", "rounds.id", "rounds.policy_version"],
            name="fk_round",
            use_alter=True,
        ),
        CheckConstraint("(version = 0) = (round_id IS NULL)", name="made_by_round"),
        UniqueConstraint("job_id", "version", "weights_digest", name="uq_policy_versions_digest"),
    )

    job_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    parent_version: Mapped[int | None]
    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id"))
    round_id: Mapped[int | None] = mapped_column(BigInteger)
    attempt: Mapped[int] = mapped_column(default=0)  # the training attempt that committed it
    weights_digest: Mapped[str]  # over the compute-dtype cast: what an engine slot holds
    adapter_object_id: Mapped[uuid.UUID]
    config_object_id: Mapped[uuid.UUID]
    optimizer_object_id: Mapped[uuid.UUID | None]
    optimizer_steps: Mapped[int] = mapped_column(default=0)
    signal: Mapped[bool] = mapped_column(default=True)  # false: a round without signal, weights as in the parent
    created_at: Mapped[Created]


class StepMetrics(Base):
    """The metrics of the update that made a version."""

    __tablename__ = "step_metrics"
    __table_args__ = (
        ForeignKeyConstraint(["job_id", "version"], ["policy_versions.job_id", "policy_versions.version"]),
        ForeignKeyConstraint(["tenant_id", "job_id"], ["jobs.tenant_id", "jobs.id"]),
    )

    job_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id"))
    metrics: Mapped[dict[str, Any]]
    created_at: Mapped[Created]
