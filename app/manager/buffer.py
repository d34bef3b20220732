"""The trajectory buffer: rounds whose episodes are all closed, first in, first out, one claim each."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, func, select, text, update
from sqlalchemy.orm import Session

from app.errors import JobFault
from app.manager import jobs, rounds
from app.manager.episodes import lease
from app.manager.fairness import Ready, next_to_train
from app.manager.packing import unpack_ids, unpack_logprobs
from app.models import Episode, Group, Job, PolicyVersion, Round, StoredObject, Tenant, Turn
from app.models.job import JobState, Wanted
from app.models.round import OPEN, EpisodeState, RoundKind, RoundState, TurnKind
from app.settings import get_settings
from app.specs.job import JobSpec

TurnRow = Row[*tuple[Any, ...]]

# Training time of this long counts for whose turn it is.
FAIRNESS_WINDOW_SECONDS = 600


class MixedVersions(JobFault):
    """A round holds turns that were not made by exactly its policy version."""

    code = "mixed_versions"


@dataclass(frozen=True)
class RoundInput:
    """A round with what its update needs."""

    round_id: int
    tenant_id: uuid.UUID
    job_id: uuid.UUID
    policy_version: int
    weights_digest: str
    spec: JobSpec
    adapter: StoredObject
    config: StoredObject
    optimizer: StoredObject | None


@dataclass(frozen=True)
class TrainingClaim(RoundInput):
    """A ready round that this worker holds."""

    attempt: int
    losses: int


@dataclass(frozen=True)
class StoredTrajectory:
    """A finished episode as it is trained on: ids as sampled and rendered, mask on sampled ids only."""

    group: int
    index: int
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    reward: float
    truncated: bool


def claim_next(session: Session, base_model: str, claimant: str, lease_seconds: float) -> TrainingClaim | None:
    """Takes the next ready round of this base model, or None. Two workers never get the same one."""
    rows = session.execute(
        select(
            Round.id,
            Round.job_id,
            Job.tenant_id,
            func.extract("epoch", Round.ready_at).label("ready_at"),
            Tenant.weight,
        )
        .join(Job, Job.id == Round.job_id)
        .join(Tenant, Tenant.id == Job.tenant_id)
        .where(
            Round.kind == RoundKind.TRAIN,
            Round.state == RoundState.READY,
            Job.base_model == base_model,
            Job.state == JobState.RUNNING,
            Job.wanted == Wanted.RUN,
            Tenant.suspended.is_(False),
        )
    ).all()
    if not rows:
        return None
    spent: dict[Hashable, float] = dict(
        session.execute(
            text(
                "SELECT tenant_id, sum(extract(epoch FROM finished_at - training_at))::float8 FROM rounds"
                " WHERE kind = 'train' AND state = 'committed'"
                " AND finished_at > now() - make_interval(secs => :window) GROUP BY tenant_id"
            ),
            {"window": FAIRNESS_WINDOW_SECONDS},
        ).all()
    )
    ready = {r.id: Ready(r.id, r.tenant_id, float(r.ready_at)) for r in rows}
    jobs_of = {r.id: r.job_id for r in rows}
    while ready:
        chosen = next_to_train(list(ready.values()), spent, {r.tenant_id: r.weight for r in rows})
        with session.begin_nested() as savepoint:
            if claim := _take(session, chosen, jobs_of[chosen], claimant, lease_seconds):
                return claim
            savepoint.rollback()  # frees the job's lock
        del ready[chosen]
    return None


def _take(
    session: Session, round_id: int, job_id: uuid.UUID, claimant: str, lease_seconds: float
) -> TrainingClaim | None:
    """Claims this round, unless another worker has it or its job is not to run any more. The job's lock is what a pause
    takes: an update starts before it or not at all."""
    job = jobs.lock_job(session, job_id)
    if job.state != JobState.RUNNING or job.wanted != Wanted.RUN:
        return None
    taken = session.scalars(
        update(Round)
        .where(Round.id == round_id, Round.state == RoundState.READY)
        .values(
            state=RoundState.TRAINING,
            attempt=Round.attempt + 1,
            lease_until=lease(lease_seconds),
            training_at=func.clock_timestamp(),
            worker=claimant,
        )
        .returning(Round.id)
        .execution_options(synchronize_session=False)
    ).first()
    if taken is None:
        return None
    round_ = session.get_one(Round, round_id, populate_existing=True)
    return TrainingClaim(**_input(session, job, round_), attempt=round_.attempt, losses=round_.losses)


def _input(session: Session, job: Job, round_: Round) -> dict[str, Any]:
    """The fields of a RoundInput."""
    version = session.get_one(PolicyVersion, (job.id, round_.policy_version))
    optimizer = version.optimizer_object_id and session.get_one(StoredObject, version.optimizer_object_id)
    return {
        "round_id": round_.id,
        "tenant_id": round_.tenant_id,
        "job_id": job.id,
        "policy_version": round_.policy_version,
        "weights_digest": round_.weights_digest,
        "spec": JobSpec.model_validate(job.spec),
        "adapter": session.get_one(StoredObject, version.adapter_object_id),
        "config": session.get_one(StoredObject, version.config_object_id),
        "optimizer": optimizer or None,
    }


def closed_group(session: Session, base_model: str, group_id: int) -> tuple[RoundInput, list[StoredTrajectory]] | None:
    """A group whose episodes are all closed, so final, while its training round is still rolled out. None where it is
    not so (any more), or the job is not to run."""
    round_ = session.scalars(
        select(Round)
        .join(Group, Group.round_id == Round.id)
        .where(Group.id == group_id, Round.kind == RoundKind.TRAIN, Round.state == RoundState.ROLLING_OUT)
    ).first()
    if round_ is None:
        return None
    job = session.get_one(Job, round_.job_id)
    wanted = job.base_model == base_model and job.state == JobState.RUNNING and job.wanted == Wanted.RUN
    if not wanted or session.get_one(Tenant, job.tenant_id).suspended:
        return None
    open_ = select(Episode.id).where(
        Episode.round_id == round_.id, Episode.group_id == group_id, Episode.state.in_(OPEN)
    )
    if session.scalars(open_.limit(1)).first() is not None:
        return None
    source = RoundInput(**_input(session, job, round_))
    return source, trajectories(session, source, group_id)[0]


def not_trained_yet(session: Session, round_ids: Collection[int]) -> set[int]:
    """Those of the rounds whose update may still come."""
    states = (RoundState.ROLLING_OUT, RoundState.READY)
    return set(session.scalars(select(Round.id).where(Round.id.in_(round_ids), Round.state.in_(states))))


def renew(session: Session, claim: TrainingClaim, lease_seconds: float) -> bool:
    """Renews the training lease; False when the round is no longer this attempt's."""
    return bool(
        session.execute(
            update(Round)
            .where(Round.id == claim.round_id, Round.attempt == claim.attempt, Round.state == RoundState.TRAINING)
            .values(lease_until=lease(lease_seconds))
        ).rowcount  # type: ignore[attr-defined]
    )


def trajectories(session: Session, source: RoundInput, group_id: int | None = None) -> list[list[StoredTrajectory]]:
    """The round's finished episodes by group, or those of one group: ordered by (group, index), never by arrival.

    Raises MixedVersions when a turn is of another version or other weights (rule 1; the schema refuses it as well).
    """
    which = [Episode.round_id == source.round_id]
    of_group = []
    if group_id is not None:
        which.append(Episode.group_id == group_id)
        of_group.append(Turn.episode_id.in_(select(Episode.id).where(*which)))
    turns: dict[int, list[TurnRow]] = defaultdict(list)
    for turn in session.execute(
        select(
            Turn.episode_id,
            Turn.kind,
            Turn.policy_version,
            Turn.weights_digest,
            Turn.context_ids,
            Turn.sampled_ids,
            Turn.logprobs,
        )
        .where(Turn.round_id == source.round_id, *of_group)
        .order_by(Turn.episode_id, Turn.index)
    ):
        turns[turn.episode_id].append(turn)
    groups: dict[int, list[StoredTrajectory]] = {}
    rows = session.execute(
        select(
            Group.index.label("group"),
            Episode.id,
            Episode.index.label("place"),
            Episode.reward,
            Episode.truncated,
            Episode.state,
        )
        .join(Episode, Episode.group_id == Group.id)
        .where(Group.round_id == source.round_id, *which)
        .order_by(Group.index, Episode.index)
    )
    for row in rows:
        group = groups.setdefault(row.group, [])
        if row.state == EpisodeState.FINISHED:
            check_consistent(source, turns[row.id])
            group.append(_assemble(row.group, row.place, row.reward, row.truncated, turns[row.id]))
    return list(groups.values())


def check_consistent(source: RoundInput, turns: Sequence[TurnRow]) -> None:
    for turn in turns:
        policy = turn.kind == TurnKind.POLICY
        if turn.policy_version != source.policy_version or (policy and turn.weights_digest != source.weights_digest):
            raise MixedVersions(
                f"episode {turn.episode_id} holds a turn of version {turn.policy_version} ({turn.weights_digest});"
                f" round {source.round_id} is of version {source.policy_version} ({source.weights_digest})"
            )


def _assemble(group: int, index: int, reward: float, truncated: bool, turns: Sequence[TurnRow]) -> StoredTrajectory:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for turn in turns:
        if turn.kind != TurnKind.POLICY:
            continue
        context, sampled = unpack_ids(turn.context_ids or b""), unpack_ids(turn.sampled_ids or b"")
        ids += context + sampled
        mask += [0] * len(context) + [1] * len(sampled)
        logprobs += [0.0] * len(context) + unpack_logprobs(turn.logprobs or b"")
    return StoredTrajectory(group, index, ids, mask, logprobs, reward, truncated)


def give_back(session: Session, claim: TrainingClaim, message: str) -> None:
    """An infrastructure fault of the update: back into the buffer, within a budget; past it the job fails."""
    job = jobs.lock_job(session, claim.job_id)
    round_ = rounds.lock_rounds(session, {claim.round_id})[claim.round_id]
    if round_.state != RoundState.TRAINING or round_.attempt != claim.attempt:
        return
    if round_.retries >= get_settings().infrastructure_retries:
        jobs.fail(session, job, "infrastructure", f"the update of version {claim.policy_version} failed: {message}")
        return
    round_.retries += 1
    round_.state = RoundState.READY
    round_.lease_until = None
    round_.worker = None
    round_.doorbell_at = func.now()  # rung again by the sweep: that is the back-off


def fail_job(session: Session, claim: TrainingClaim, code: str, message: str) -> None:
    """A fault of the job's own fails it, unless the round is another attempt's by now: that one decides."""
    job = jobs.lock_job(session, claim.job_id)
    round_ = rounds.lock_rounds(session, {claim.round_id})[claim.round_id]
    if round_.state == RoundState.TRAINING and round_.attempt == claim.attempt:
        jobs.fail(session, job, code, message)
