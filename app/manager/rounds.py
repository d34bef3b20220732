"""Opening and closing rounds. A round is born with all its episodes; the last one to close makes it ready."""

from __future__ import annotations

import hashlib
import uuid

from sqlalchemy import Select, func, insert, select, update
from sqlalchemy.orm import Session

from app.manager import doorbells, events, summaries
from app.models import Episode, Group, Job, PolicyVersion, Round
from app.models.job import JobKind, JobState, Wanted
from app.models.round import OPEN, EpisodeState, RoundKind, RoundState
from app.specs.job import JobSpec

LIVE_ROUND = (RoundState.ROLLING_OUT, RoundState.READY, RoundState.TRAINING)


def episode_seed(job_seed: int, kind: str, version: int, group: int, index: int) -> int:
    """A seed of its own for each episode, the same in every run of the same job (63 bits)."""
    text = f"{job_seed}:{kind}:{version}:{group}:{index}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def open_round(session: Session, job: Job, kind: RoundKind) -> Round:
    """Opens a round at the job's committed version and rings for admission. The caller holds the job's row lock."""
    spec = JobSpec.model_validate(job.spec)
    cursor = 0
    if kind == RoundKind.TRAIN:
        groups, size = spec.hyperparameters.prompts_per_round, spec.hyperparameters.group_size
        cursor = job.version * groups
    elif kind == RoundKind.EVAL:
        groups, size = spec.evaluation.prompts, spec.evaluation.samples
    else:
        groups, size = spec.preflight.prompts, spec.preflight.samples
    digest = session.scalars(
        select(PolicyVersion.weights_digest).where(PolicyVersion.job_id == job.id, PolicyVersion.version == job.version)
    ).one()
    round_ = Round(
        tenant_id=job.tenant_id,
        job_id=job.id,
        kind=kind,
        policy_version=job.version,
        weights_digest=digest,
        open_episodes=groups * size,
        cursor=cursor,
    )
    session.add(round_)
    session.flush()
    group_ids = session.scalars(
        insert(Group).returning(Group.id, sort_by_parameter_order=True),
        [{"tenant_id": job.tenant_id, "round_id": round_.id, "index": g, "item": cursor + g} for g in range(groups)],
    ).all()
    session.execute(
        insert(Episode),
        [
            {
                "tenant_id": job.tenant_id,
                "round_id": round_.id,
                "group_id": group_id,
                "index": i,
                "policy_version": job.version,
                "seed": episode_seed(spec.seed, kind, job.version, g, i),
            }
            for g, group_id in enumerate(group_ids)
            for i in range(size)
        ],
    )
    doorbells.ring_admission(session)
    return round_


def lock_rounds(session: Session, round_ids: set[int]) -> dict[int, Round]:
    """Row locks on rounds, in order of id (lock order: job, round, episode)."""
    rounds = session.scalars(
        select(Round)
        .where(Round.id.in_(round_ids))
        .order_by(Round.id)
        .with_for_update(key_share=True)
        .execution_options(populate_existing=True)
    ).all()
    return {r.id: r for r in rounds}


def count_down(session: Session, round_: Round, closed: int) -> None:
    """Takes `closed` episodes off the open ones; the last makes the round ready. The caller holds the round's lock."""
    round_.open_episodes -= closed
    if closed and round_.open_episodes == 0 and round_.state == RoundState.ROLLING_OUT:
        close_round(session, round_)


def close_round(session: Session, round_: Round) -> None:
    """All episodes are closed: a training round goes into the buffer, another one ends with its summary."""
    job = session.get_one(Job, round_.job_id)
    round_.ready_at = func.clock_timestamp()
    if round_.kind == RoundKind.TRAIN:
        round_.state = RoundState.READY
        round_.doorbell_at = func.now()
        doorbells.ring_training(session, job.base_model)
        return
    round_.state = RoundState.COMMITTED
    round_.finished_at = func.clock_timestamp()
    round_.summary = summaries.summarise(session, job, round_)
    events.record(
        session,
        job,
        f"{round_.kind}_finished",
        f"{round_.kind} of version {round_.policy_version}: pass rate {round_.summary['pass_rate']:.3f}",
        data=round_.summary,
    )
    doorbells.ring_admission(session)  # the job may be done; its row is locked there, before any round's


def finish_if_done(session: Session, job: Job) -> bool:
    """Ends the job once all that it is for is committed and no evaluation is under way."""
    if job.state != JobState.RUNNING or not is_complete(session, job):
        return False
    if session.scalars(live_rounds(job.id).limit(1)).first() is not None:
        return False
    job.state = JobState.SUCCEEDED
    job.finished_at = func.clock_timestamp()
    events.record(session, job, "job_succeeded", f"finished with version {job.version}")
    doorbells.ring_admission(session)  # a queued job may start
    return True


def is_complete(session: Session, job: Job) -> bool:
    """Whether the job has its last version or, being a preflight, its one round."""
    if job.kind == JobKind.TRAIN:
        return job.version >= JobSpec.model_validate(job.spec).hyperparameters.n_steps
    done = select(Round.id).where(
        Round.job_id == job.id, Round.kind == RoundKind.PREFLIGHT, Round.state == RoundState.COMMITTED
    )
    return session.scalars(done).first() is not None


def live_rounds(job_id: uuid.UUID) -> Select[int]:
    return select(Round.id).where(Round.job_id == job_id, Round.state.in_(LIVE_ROUND))


def abandon_rounds(session: Session, job: Job) -> None:
    """Ends every live round and its open episodes: claims, commits and renewals find them gone. The caller holds the
    job's row lock."""
    live = set(session.scalars(live_rounds(job.id)))
    for round_ in lock_rounds(session, live).values():
        round_.state = RoundState.ABANDONED
        round_.finished_at = func.clock_timestamp()
        round_.lease_until = None
    session.flush()
    open_ = (
        select(Episode.id)
        .where(Episode.round_id.in_(live), Episode.state.in_(OPEN))
        .order_by(Episode.id)
        .with_for_update(key_share=True)
        .cte("open")
    )
    session.execute(
        update(Episode)
        .where(Episode.id == open_.c.id)
        .values(state=EpisodeState.FAILED, error_code="abandoned", lease_until=None, finished_at=func.clock_timestamp())
        .execution_options(synchronize_session=False)
    )


def ensure_round(session: Session, job: Job) -> bool:
    """Opens the round that a running job misses, of the job's own kind; whether it did. The caller holds the job's row
    lock, and the job has a version."""
    if job.state != JobState.RUNNING or job.wanted != Wanted.RUN or is_complete(session, job):
        return False
    if session.scalars(live_rounds(job.id).where(Round.kind == job.kind).limit(1)).first() is not None:
        return False
    open_round(session, job, RoundKind(job.kind))
    return True
