"""The trajectory buffer: rounds whose episodes are all closed, first in, first out, one claim each."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from app.errors import Conflict
from app.manager import jobs, rounds
from app.manager.episodes import lease
from app.manager.fairness import Ready, next_to_train
from app.manager.packing import unpack_ids, unpack_logprobs
from app.models import Episode, Group, Job, PolicyVersion, Round, StoredObject, Tenant, Turn
from app.models.job import JobState, Wanted
from app.models.round import EpisodeState, RoundKind, RoundState, TurnKind
from app.settings import get_settings
from app.specs.job import JobSpec

# Training time of this long counts for whose turn it is.
FAIRNESS_WINDOW_SECONDS = 600


@dataclass(frozen=True)
class TrainingClaim:
    """A ready round that this worker holds, with what the update needs."""

    round_id: int
    attempt: int
    losses: int
    tenant_id: uuid.UUID
    job_id: uuid.UUID
    policy_version: int
    weights_digest: str
    spec: JobSpec
    adapter: StoredObject
    config: StoredObject
    optimizer: StoredObject | None


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
        select(Round.id, Job.tenant_id, func.extract("epoch", Round.ready_at).label("ready_at"), Tenant.weight)
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
        .with_for_update(of=Round, skip_locked=True)
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
        )
        .tuples()
        .all()
    )
    ready = [Ready(r.id, r.tenant_id, float(r.ready_at)) for r in rows]
    chosen = next_to_train(ready, spent, {r.tenant_id: r.weight for r in rows})
    session.execute(
        update(Round)
        .where(Round.id == chosen)
        .values(
            state=RoundState.TRAINING,
            attempt=Round.attempt + 1,
            lease_until=lease(lease_seconds),
            training_at=func.clock_timestamp(),
            worker=claimant,
        )
    )
    round_ = session.get_one(Round, chosen, populate_existing=True)
    job = session.get_one(Job, round_.job_id)
    version = session.get_one(PolicyVersion, (job.id, round_.policy_version))
    optimizer = version.optimizer_object_id and session.get_one(StoredObject, version.optimizer_object_id)
    return TrainingClaim(
        round_id=round_.id,
        attempt=round_.attempt,
        losses=round_.losses,
        tenant_id=round_.tenant_id,
        job_id=job.id,
        policy_version=round_.policy_version,
        weights_digest=round_.weights_digest,
        spec=JobSpec.model_validate(job.spec),
        adapter=session.get_one(StoredObject, version.adapter_object_id),
        config=session.get_one(StoredObject, version.config_object_id),
        optimizer=optimizer or None,
    )


def renew(session: Session, claim: TrainingClaim, lease_seconds: float) -> bool:
    """Renews the training lease; False when the round is no longer this attempt's."""
    return bool(
        session.execute(
            update(Round)
            .where(Round.id == claim.round_id, Round.attempt == claim.attempt, Round.state == RoundState.TRAINING)
            .values(lease_until=lease(lease_seconds))
        ).rowcount  # type: ignore[attr-defined]
    )


def trajectories(session: Session, claim: TrainingClaim) -> list[list[StoredTrajectory]]:
    """The round's finished episodes by group, ordered by (group, index), never by arrival.

    Raises Conflict when a turn is of another version or other weights (rule 1; the schema refuses it as well).
    """
    turns: dict[int, list[Turn]] = defaultdict(list)
    for turn in session.scalars(
        select(Turn).where(Turn.round_id == claim.round_id).order_by(Turn.episode_id, Turn.index)
    ):
        turns[turn.episode_id].append(turn)
    groups: dict[int, list[StoredTrajectory]] = {}
    rows = session.execute(
        select(Group.index.label("group"), Episode.id, Episode.index.label("place"), Episode.reward, Episode.truncated, Episode.state)
        .join(Episode, Episode.group_id == Group.id)
        .where(Group.round_id == claim.round_id, Episode.round_id == claim.round_id)
        .order_by(Group.index, Episode.index)
    )
    for row in rows:
        group = groups.setdefault(row.group, [])
        if row.state == EpisodeState.FINISHED:
            check_consistent(claim, turns[row.id])
            group.append(_assemble(row.group, row.place, row.reward, row.truncated, turns[row.id]))
    return list(groups.values())


def check_consistent(claim: TrainingClaim, turns: Sequence[Turn]) -> None:
    for turn in turns:
        policy = turn.kind == TurnKind.POLICY
        if turn.policy_version != claim.policy_version or (policy and turn.weights_digest != claim.weights_digest):
            raise Conflict(
                f"episode {turn.episode_id} holds a turn of version {turn.policy_version} ({turn.weights_digest});"
                f" round {claim.round_id} is of version {claim.policy_version} ({claim.weights_digest})",
                code="mixed_versions",
            )


def _assemble(group: int, index: int, reward: float, truncated: bool, turns: Sequence[Turn]) -> StoredTrajectory:
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
