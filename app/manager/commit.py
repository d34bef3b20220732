"""The one transaction that consumes a round and publishes version v+1 (rule 3), and that of version 0."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, insert, select, text, update
from sqlalchemy.orm import Session

from app.errors import Conflict
from app.manager import events, jobs, rounds
from app.manager.buffer import MixedVersions, TrainingClaim
from app.models import Job, PolicyVersion, Round, StepMetrics, StoredObject, UsageEntry
from app.models.job import JobKind, JobState, Wanted
from app.models.object import ObjectState
from app.models.round import RoundKind, RoundState
from app.specs.job import JobSpec


class LostClaim(Conflict):
    """The round is not this attempt's any more: cancelled, taken over, or committed already."""

    code = "lost_claim"


@dataclass(frozen=True)
class NewVersion:
    """What an update made: uploaded objects (pending until the commit) and the digest of the weights."""

    weights_digest: str
    adapter_object_id: uuid.UUID
    config_object_id: uuid.UUID
    optimizer_object_id: uuid.UUID | None
    optimizer_steps: int
    signal: bool

    @property
    def objects(self) -> tuple[uuid.UUID, ...]:
        return tuple(
            i for i in (self.adapter_object_id, self.config_object_id, self.optimizer_object_id) if i is not None
        )


def commit_round(session: Session, claim: TrainingClaim, new: NewVersion, metrics: dict[str, Any]) -> int:
    """Publishes version v+1 and opens the next round or ends the job; returns the new version.

    Raises LostClaim when the claim is not held any more, MixedVersions when the round is not of one version.
    """
    job = jobs.lock_job(session, claim.job_id)
    round_ = rounds.lock_rounds(session, {claim.round_id})[claim.round_id]
    if round_.state != RoundState.TRAINING or round_.attempt != claim.attempt or job.state != JobState.RUNNING:
        raise LostClaim(
            f"round {round_.id} is {round_.state} at attempt {round_.attempt}; this was attempt {claim.attempt}"
        )
    check_single_version(session, job, round_)
    version = job.version + 1
    make_live(session, new.objects)
    session.add(
        PolicyVersion(
            job_id=job.id,
            version=version,
            parent_version=job.version,
            tenant_id=job.tenant_id,
            round_id=round_.id,
            attempt=claim.attempt,
            weights_digest=new.weights_digest,
            adapter_object_id=new.adapter_object_id,
            config_object_id=new.config_object_id,
            optimizer_object_id=new.optimizer_object_id,
            optimizer_steps=new.optimizer_steps,
            signal=new.signal,
        )
    )
    session.flush()
    session.add(StepMetrics(job_id=job.id, version=version, tenant_id=job.tenant_id, metrics=metrics))
    session.execute(
        insert(UsageEntry).values(
            tenant_id=job.tenant_id,
            job_id=job.id,
            round_id=round_.id,
            episode_id=0,
            turn=0,
            attempt=claim.attempt,
            trained_tokens=int(metrics.get("total_tokens", 0)),
            busy_seconds=float(metrics.get("seconds", 0.0)),
        )
    )
    round_.state = RoundState.COMMITTED
    round_.finished_at = func.clock_timestamp()
    round_.lease_until = None
    job.version = version
    if job.first_step_at is None:
        job.first_step_at = func.clock_timestamp()
    job.rounds_without_signal = 0 if new.signal else job.rounds_without_signal + 1
    session.flush()
    _go_on(session, job, new)
    return version


def _go_on(session: Session, job: Job, new: NewVersion) -> None:
    """Opens what comes after a commit: an evaluation where it is due, the next round, or the end of the job."""
    spec = JobSpec.model_validate(job.spec)
    if not new.signal:
        events.record(
            session,
            job,
            "round_without_signal",
            f"version {job.version} has the weights of {job.version - 1}: every group's rewards were equal",
            level="warn",
        )
    if job.rounds_without_signal >= spec.hyperparameters.no_signal_patience:
        jobs.fail(
            session,
            job,
            "no_signal",
            f"{job.rounds_without_signal} rounds in a row gave no signal: all episodes of each prompt had the same"
            " reward. Choose easier or more varied prompts, raise group_size or temperature, or check the grader.",
        )
        return
    if spec.evaluation.every and job.version % spec.evaluation.every == 0:
        rounds.open_round(session, job, RoundKind.EVAL)
    if rounds.finish_if_done(session, job):
        return
    rounds.ensure_round(session, job)
    jobs.settle_pause(session, job)


def check_single_version(session: Session, job: Job, round_: Round) -> None:
    """Rule 1, once more at the commit: all of the round's turns are of its version and of its weights."""
    if job.version != round_.policy_version or round_.open_episodes != 0:
        raise MixedVersions(
            f"round {round_.id} is of version {round_.policy_version} with {round_.open_episodes} episodes open;"
            f" the job is at version {job.version}"
        )
    mixed = session.execute(
        text(
            "SELECT count(*) FROM turns WHERE round_id = :round AND (policy_version <> :version"
            " OR (kind = 'policy' AND weights_digest <> :digest))"
        ),
        {"round": round_.id, "version": round_.policy_version, "digest": round_.weights_digest},
    ).scalar_one()
    if mixed:
        raise MixedVersions(f"round {round_.id} holds {mixed} turns that are not of version {round_.policy_version}")


def make_live(session: Session, object_ids: Sequence[uuid.UUID]) -> None:
    """Turns uploaded objects from pending to live, under row locks that the orphan sweep takes as well."""
    found = session.scalars(
        select(StoredObject).where(StoredObject.id.in_(object_ids)).order_by(StoredObject.id).with_for_update()
    ).all()
    gone = set(object_ids) - {o.id for o in found if o.state in (ObjectState.PENDING, ObjectState.LIVE)}
    if gone:
        raise LostClaim(f"objects {sorted(map(str, gone))} were swept before the commit")
    session.execute(
        update(StoredObject)
        .where(StoredObject.id.in_(object_ids), StoredObject.state == ObjectState.PENDING)
        .values(state=ObjectState.LIVE, state_at=func.now())
    )


def is_committed(session: Session, claim: TrainingClaim) -> bool:
    """Reads an unknown outcome again: whether this very attempt's commit is in."""
    return (
        session.scalars(
            select(PolicyVersion.version).where(
                PolicyVersion.round_id == claim.round_id, PolicyVersion.attempt == claim.attempt
            )
        ).first()
        is not None
    )


def commit_initial(session: Session, job_id: uuid.UUID, new: NewVersion) -> bool:
    """Publishes version 0, the fresh adapter, and opens the first round. False where it is there, or not wanted."""
    job = jobs.lock_job(session, job_id)
    if job.state != JobState.RUNNING or jobs.has_version(session, job.id):
        return False
    make_live(session, new.objects)
    session.add(
        PolicyVersion(
            job_id=job.id,
            version=0,
            tenant_id=job.tenant_id,
            weights_digest=new.weights_digest,
            adapter_object_id=new.adapter_object_id,
            config_object_id=new.config_object_id,
            optimizer_object_id=new.optimizer_object_id,
            optimizer_steps=0,
        )
    )
    session.flush()
    events.record(session, job, "job_started", "version 0, the fresh adapter, is published")
    spec = JobSpec.model_validate(job.spec)
    if spec.evaluation.every and job.kind == JobKind.TRAIN:
        rounds.open_round(session, job, RoundKind.EVAL)
    if job.wanted == Wanted.RUN:
        rounds.ensure_round(session, job)
    return True
