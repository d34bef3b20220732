"""Rounds, groups, episodes and turns: how a batch of trajectories at one policy version comes to be."""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    SmallInteger,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, BigInt, BigKey, Created, one_of


class RoundKind(StrEnum):
    TRAIN = "train"
    EVAL = "eval"
    PREFLIGHT = "preflight"


class RoundState(StrEnum):
    ROLLING_OUT = "rolling_out"
    READY = "ready"
    TRAINING = "training"
    COMMITTED = "committed"
    ABANDONED = "abandoned"


class EpisodeState(StrEnum):
    WAITING = "waiting"
    RESETTING = "resetting"
    GENERATING = "generating"
    ACTING = "acting"
    FINISHED = "finished"
    FAILED = "failed"


IN_FLIGHT = (EpisodeState.RESETTING, EpisodeState.GENERATING, EpisodeState.ACTING)
OPEN = (EpisodeState.WAITING, *IN_FLIGHT)
IN_FLIGHT_SQL = "state IN ('resetting', 'generating', 'acting')"


class Round(Base):
    __tablename__ = "rounds"
    __table_args__ = (
        CheckConstraint(one_of("kind", RoundKind), name="kind"),
        CheckConstraint(one_of("state", RoundState), name="state"),
        CheckConstraint("open_episodes >= 0", name="open_episodes_not_negative"),
        CheckConstraint("state IN ('rolling_out', 'abandoned') OR open_episodes = 0", name="ready_when_closed"),
        ForeignKeyConstraint(["tenant_id", "job_id"], ["jobs.tenant_id", "jobs.id"]),
        # A round pins a committed version and the very weights of it.
        ForeignKeyConstraint(
            ["job_id", "policy_version", "weights_digest"],
            ["policy_versions.job_id", "policy_versions.version", "policy_versions.weights_digest"],
            name="fk_policy_version",
        ),
        # What groups, episodes, turns and policy versions refer to: they cannot be of another tenant, job or version.
        UniqueConstraint("tenant_id", "id"),
        UniqueConstraint("tenant_id", "id", "policy_version"),
        UniqueConstraint("id", "policy_version", "weights_digest"),
        UniqueConstraint("job_id", "id", "policy_version"),
        # One live training round a job, and one training round a version.
        Index(
            "uq_rounds_live_train",
            "job_id",
            unique=True,
            postgresql_where=text("kind = 'train' AND state IN ('rolling_out', 'ready', 'training')"),
        ),
        Index(
            "uq_rounds_train_version",
            "job_id",
            "policy_version",
            unique=True,
            postgresql_where=text("kind = 'train' AND state <> 'abandoned'"),
        ),
        Index("ix_rounds_live", "state", "id", postgresql_where=text("state IN ('rolling_out', 'ready', 'training')")),
        # Training time of late, by tenant: whose turn it is.
        Index("ix_rounds_trained", "finished_at", postgresql_where=text("kind = 'train' AND state = 'committed'")),
    )

    id: Mapped[BigKey]
    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id"))
    job_id: Mapped[uuid.UUID]
    kind: Mapped[str]
    policy_version: Mapped[int]
    weights_digest: Mapped[str]
    state: Mapped[str] = mapped_column(default=RoundState.ROLLING_OUT)
    open_episodes: Mapped[int]
    cursor: Mapped[BigInt] = mapped_column(default=0)  # data cursor of the first group
    created_at: Mapped[Created]
    admitted_at: Mapped[datetime | None]  # the first episode was admitted
    ready_at: Mapped[datetime | None]
    training_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    # The training claim (rule 2)
    attempt: Mapped[int] = mapped_column(default=0)
    lease_until: Mapped[datetime | None]
    doorbell_at: Mapped[datetime | None]
    worker: Mapped[str | None]
    losses: Mapped[int] = mapped_column(default=0)
    retries: Mapped[int] = mapped_column(default=0)
    summary: Mapped[dict[str, Any] | None]  # eval and preflight: pass rate, flags


class Group(Base):
    __tablename__ = "groups"
    __table_args__ = (
        UniqueConstraint("round_id", "index"),
        UniqueConstraint("round_id", "id"),
        ForeignKeyConstraint(["tenant_id", "round_id"], ["rounds.tenant_id", "rounds.id"]),
    )

    id: Mapped[BigKey]
    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id"))
    round_id: Mapped[int] = mapped_column(BigInteger)
    index: Mapped[int]
    item: Mapped[BigInt]  # cursor index of its prompt
    messages: Mapped[list[dict[str, Any]] | None]  # once reset
    tools: Mapped[list[dict[str, Any]] | None]
    state: Mapped[dict[str, Any] | None]


class Episode(Base):
    __tablename__ = "episodes"
    __table_args__ = (
        UniqueConstraint("group_id", "index"),
        CheckConstraint(one_of("state", EpisodeState), name="state"),
        CheckConstraint("(state = 'finished') = (reward IS NOT NULL)", name="finished_has_reward"),
        CheckConstraint("reward IS NULL OR (reward > '-Infinity' AND reward < 'Infinity')", name="reward_finite"),
        # Its tenant and version equal its round's, its round is its group's.
        ForeignKeyConstraint(
            ["tenant_id", "round_id", "policy_version"],
            ["rounds.tenant_id", "rounds.id", "rounds.policy_version"],
            name="fk_round_version",
        ),
        ForeignKeyConstraint(["round_id", "group_id"], ["groups.round_id", "groups.id"], name="fk_group"),
        Index("ix_episodes_in_flight", "round_id", postgresql_where=text(IN_FLIGHT_SQL)),
        Index("ix_episodes_waiting", "round_id", "group_id", "index", postgresql_where=text("state = 'waiting'")),
        Index("ix_episodes_round", "round_id", "group_id", "index"),
    )

    id: Mapped[BigKey]
    tenant_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("tenants.id"))
    round_id: Mapped[int] = mapped_column(BigInteger)
    group_id: Mapped[int] = mapped_column(BigInteger)
    index: Mapped[int] = mapped_column(SmallInteger)
    policy_version: Mapped[int]
    state: Mapped[str] = mapped_column(default=EpisodeState.WAITING)
    turn: Mapped[int] = mapped_column(SmallInteger, default=0)  # turns recorded so far; the next one has this index
    seed: Mapped[BigInt]
    reward: Mapped[float | None]
    passed: Mapped[bool | None]
    truncated: Mapped[bool] = mapped_column(default=False)
    flags: Mapped[list[str] | None]
    error_code: Mapped[str | None]
    # The claim (rule 2)
    attempt: Mapped[int] = mapped_column(default=0)
    lease_until: Mapped[datetime | None]
    doorbell_at: Mapped[datetime | None]
    worker: Mapped[str | None]
    losses: Mapped[int] = mapped_column(SmallInteger, default=0)
    retries: Mapped[int] = mapped_column(SmallInteger, default=0)
    finished_at: Mapped[datetime | None]


class TurnKind(StrEnum):
    POLICY = "policy"  # token ids: what was sampled
    ENVIRONMENT = "environment"  # observation: messages


class Turn(Base):
    """Only ever inserted. Policy turns hold the ids new to the context, the sampled ids and their logprobs.

    `weights_digest` is what the engine read from its slot; the foreign keys to the round make a turn of another version
    or of other weights impossible to store. Partitioned by round id, dropped by retention.
    """

    __tablename__ = "turns"
    __table_args__ = (
        CheckConstraint(one_of("kind", TurnKind), name="kind"),
        CheckConstraint("(kind = 'policy') = (weights_digest IS NOT NULL)", name="policy_has_digest"),
        CheckConstraint("(kind = 'policy') = (context_ids IS NOT NULL)", name="policy_has_context"),
        CheckConstraint(
            "CASE kind WHEN 'policy' THEN coalesce(octet_length(sampled_ids) = octet_length(logprobs), false)"
            " ELSE sampled_ids IS NULL AND logprobs IS NULL END",
            name="a_logprob_a_token",
        ),
        # Its tenant and version equal its round's; where the policy speaks, the weights as well.
        ForeignKeyConstraint(
            ["tenant_id", "round_id", "policy_version"],
            ["rounds.tenant_id", "rounds.id", "rounds.policy_version"],
            name="fk_round_version",
        ),
        ForeignKeyConstraint(
            ["round_id", "policy_version", "weights_digest"],
            ["rounds.id", "rounds.policy_version", "rounds.weights_digest"],
            name="fk_round_weights",
        ),
        {"postgresql_partition_by": "RANGE (round_id)"},
    )

    round_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    episode_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    index: Mapped[int] = mapped_column(SmallInteger, primary_key=True)
    tenant_id: Mapped[uuid.UUID]
    policy_version: Mapped[int]
    kind: Mapped[str]
    attempt: Mapped[int]
    weights_digest: Mapped[str | None]
    context_ids: Mapped[bytes | None] = mapped_column(LargeBinary)  # int32 little endian: ids appended before sampling
    sampled_ids: Mapped[bytes | None] = mapped_column(LargeBinary)  # int32 little endian
    logprobs: Mapped[bytes | None] = mapped_column(LargeBinary)  # float32 little endian
    finish_reason: Mapped[str | None]
    messages: Mapped[list[dict[str, Any]] | None]  # environment turns: the observation; policy turns: decoded text
    state: Mapped[dict[str, Any] | None]  # environment state after this turn
    seconds: Mapped[float] = mapped_column(default=0.0)
    created_at: Mapped[Created]
