"""How far jobs are, for people: phase, version, reward, speed, queue place. Read from live rows, stored nowhere."""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import and_, func, select, text, true
from sqlalchemy.orm import Session

from app.models import Episode, Job, Round, StepMetrics, Tenant
from app.models.job import LIVE, TERMINAL, JobKind, JobState, Wanted
from app.models.round import EpisodeState, RoundKind, RoundState

SPEED_WINDOW_SECONDS = 10.0
ETA_COMMITS = 5  # the time to come is reckoned from this many last commits
MOST_JOBS = 1000


class Phase(StrEnum):
    """What a job does or waits for. A job that is over has its state as its phase."""

    VALIDATING = "validating"
    QUEUED = "queued"  # for its tenant's quota of running jobs
    STARTING = "starting"  # version 0 is being made
    WAITING = "waiting"  # no episode has an engine slot
    ROLLOUT = "rollout"
    ENVIRONMENT = "environment"  # most episodes in flight are with their environment
    BUFFERED = "buffered"  # trajectories complete, the trainer is with another job
    TRAINING = "training"
    EVALUATING = "evaluating"  # trained to the end; an evaluation is under way
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class JobProgress:
    job_id: uuid.UUID
    tenant: str
    name: str
    state: str
    wanted: str
    phase: str
    version: int
    n_steps: int
    reward_mean: float | None  # of the last update's round
    episodes_done: int  # of the live round
    episodes_total: int
    tokens_per_second: float  # generated, over the last SPEED_WINDOW_SECONDS
    queue_place: int | None  # from 1: among ready rounds of the base model, or among the tenant's queued jobs
    eta_seconds: float | None  # until the last version, reckoned from the last commits
    first_step_seconds: float | None  # from submission to the first commit
    elapsed_seconds: float  # from submission, to the end or until now
    error: str | None

    @property
    def over(self) -> bool:
        return self.state in TERMINAL


@dataclass
class LiveRound:
    """The round that a job is busy with: its training round, else an evaluation."""

    kind: str
    state: str
    ready_at: datetime | None
    episodes: Counter[str]

    @property
    def done(self) -> int:
        return self.episodes[EpisodeState.FINISHED] + self.episodes[EpisodeState.FAILED]


def job_progress(
    session: Session, job_ids: Sequence[uuid.UUID] | None = None, tenant_id: uuid.UUID | None = None
) -> list[JobProgress]:
    """Progress of these jobs, or of all live ones but preflights, in order of creation (at most MOST_JOBS).

    `tenant_id`: places in queues are counted among this tenant's jobs alone, as another's are none of its business.
    """
    chosen = Job.id.in_(job_ids) if job_ids is not None else and_(Job.kind == JobKind.TRAIN, Job.state.in_(LIVE))
    now = func.clock_timestamp()
    rows = session.execute(
        select(Job, Tenant.name, func.extract("epoch", func.coalesce(Job.finished_at, now) - Job.created_at))
        .join(Tenant, Tenant.id == Job.tenant_id)
        .where(chosen)
        .order_by(Job.created_at, Job.id)
        .limit(MOST_JOBS)
        .execution_options(populate_existing=True)
    ).all()
    ids = [job.id for job, _, _ in rows]
    live, rewards = live_rounds(session, ids), _rewards(session, ids)
    speeds, etas = _speeds(session, ids), _etas(session, ids)
    places = _ready_places(session, tenant_id) | _queue_places(session)
    return [
        JobProgress(
            job_id=job.id,
            tenant=tenant,
            name=job.name,
            state=job.state,
            wanted=job.wanted,
            phase=phase_of(job, live.get(job.id)),
            version=job.version,
            n_steps=job.spec["hyperparameters"]["n_steps"],
            reward_mean=rewards.get(job.id),
            episodes_done=live[job.id].done if job.id in live else 0,
            episodes_total=live[job.id].episodes.total() if job.id in live else 0,
            tokens_per_second=speeds.get(job.id, 0.0),
            queue_place=places.get(job.id),
            eta_seconds=etas.get(job.id) if job.state == JobState.RUNNING and job.wanted == Wanted.RUN else None,
            first_step_seconds=(job.first_step_at - job.created_at).total_seconds() if job.first_step_at else None,
            elapsed_seconds=float(elapsed),
            error=f"{job.error_code}: {job.error_message}" if job.error_code else None,
        )
        for job, tenant, elapsed in rows
    ]


def phase_of(job: Job, live: LiveRound | None) -> Phase:
    if job.state == JobState.VALIDATING:
        return Phase.VALIDATING
    if job.state != JobState.RUNNING:
        return Phase(job.state)
    if live is None:
        return Phase.STARTING
    if live.state == RoundState.READY:
        return Phase.BUFFERED
    if live.state == RoundState.TRAINING:
        return Phase.TRAINING
    if live.kind == RoundKind.EVAL:
        return Phase.EVALUATING
    generating = live.episodes[EpisodeState.GENERATING]
    acting = live.episodes[EpisodeState.ACTING] + live.episodes[EpisodeState.RESETTING]
    if generating + acting == 0:
        return Phase.WAITING
    return Phase.ROLLOUT if generating >= acting else Phase.ENVIRONMENT


def live_rounds(session: Session, job_ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, LiveRound]:
    """The live round of each job; where an evaluation runs beside it, the training round is shown."""
    rows = session.execute(
        select(Round.job_id, Round.id, Round.kind, Round.state, Round.ready_at, Episode.state, func.count())
        .join(Episode, Episode.round_id == Round.id)
        .where(
            Round.job_id.in_(job_ids), Round.state.in_((RoundState.ROLLING_OUT, RoundState.READY, RoundState.TRAINING))
        )
        .group_by(Round.id, Episode.state)
        .order_by(Round.kind != RoundKind.TRAIN, Round.id)
    )
    found: dict[uuid.UUID, tuple[int, LiveRound]] = {}
    for job_id, round_id, kind, state, ready_at, episode_state, count in rows:
        first, live = found.setdefault(job_id, (round_id, LiveRound(kind, state, ready_at, Counter())))
        if first == round_id:
            live.episodes[episode_state] += count
    return {job_id: live for job_id, (_, live) in found.items()}


def _rewards(session: Session, job_ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, float]:
    rows = session.execute(
        select(StepMetrics.job_id, StepMetrics.metrics["reward_mean"].as_float())
        .join(Job, (Job.id == StepMetrics.job_id) & (Job.version == StepMetrics.version))
        .where(StepMetrics.job_id.in_(job_ids))
    )
    return {job_id: reward for job_id, reward in rows if reward is not None}


def _speeds(session: Session, job_ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, float]:
    rows = session.execute(
        text(
            "SELECT job_id, sum(generated_tokens) FROM usage"
            " WHERE created_at > now() - make_interval(secs => :window) AND job_id = ANY(:ids) GROUP BY job_id"
        ),
        {"window": SPEED_WINDOW_SECONDS, "ids": list(job_ids)},
    )
    return {job_id: tokens / SPEED_WINDOW_SECONDS for job_id, tokens in rows}


def _etas(session: Session, job_ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, float]:
    rows = session.execute(
        text(
            "SELECT v.job_id, (j.spec #>> '{hyperparameters,n_steps}')::int - j.version AS left,"
            " extract(epoch FROM max(v.created_at) - min(v.created_at))::float8 / nullif(count(*) - 1, 0) AS step,"
            " extract(epoch FROM now() - max(v.created_at))::float8 AS since"
            " FROM policy_versions v JOIN jobs j ON j.id = v.job_id"
            " WHERE v.job_id = ANY(:ids) AND v.version >= j.version - :commits GROUP BY v.job_id, j.id"
        ),
        {"ids": list(job_ids), "commits": ETA_COMMITS},
    )
    return {r.job_id: max(0.0, r.left * r.step - r.since) for r in rows if r.step is not None}


def _ready_places(session: Session, tenant_id: uuid.UUID | None) -> dict[uuid.UUID, int]:
    """First in, first out among the ready rounds of a base model (the tenants' weights may still let one go before)."""
    mine = Job.tenant_id == tenant_id if tenant_id is not None else true()
    rows = session.execute(
        select(Job.id, Job.base_model)
        .join(Round, Round.job_id == Job.id)
        .where(Round.state == RoundState.READY, Job.wanted == Wanted.RUN, mine)
        .order_by(Round.ready_at, Round.id)
    )
    return _places(rows.all())


def _queue_places(session: Session) -> dict[uuid.UUID, int]:
    rows = session.execute(
        select(Job.id, Job.tenant_id)
        .where(Job.kind == JobKind.TRAIN, Job.state == JobState.QUEUED, Job.wanted == Wanted.RUN)
        .order_by(Job.created_at, Job.id)
    )
    return _places(rows.all())


def _places(in_order: Sequence[tuple[uuid.UUID, Any]]) -> dict[uuid.UUID, int]:
    seen: dict[Any, int] = defaultdict(int)
    places = {}
    for job_id, queue in in_order:
        seen[queue] += 1
        places[job_id] = seen[queue]
    return places
