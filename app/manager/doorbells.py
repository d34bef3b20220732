"""The messages between stages, each sent after the commit of the transaction that makes it true."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from sqlalchemy import select
from sqlalchemy.orm import Session

from app import broker
from app.db import after_commit
from app.models import BaseModel, Episode, Group, Job, Round
from app.models.round import OPEN, RoundKind, RoundState

# One message carries at most this many episodes; more messages let more workers share a round.
EPISODES_A_MESSAGE = 16


def ring_admission(session: Session) -> None:
    after_commit(session, lambda: broker.ring(broker.ADMIT, "manager"))


def ring_validation(session: Session, job_id: uuid.UUID) -> None:
    after_commit(session, lambda: broker.ring(broker.VALIDATE, "tools", job_id=str(job_id)))


def ring_start(session: Session, job: Job) -> None:
    queue = f"training{queue_suffix(session, job.base_model)}"
    job_id = str(job.id)
    after_commit(session, lambda: broker.ring(broker.START, queue, job_id=job_id))


def ring_training(session: Session, base_model: str) -> None:
    """Carries no choice: the worker claims the next ready round."""
    queue = f"training{queue_suffix(session, base_model)}"
    after_commit(session, lambda: broker.ring(broker.TRAIN, queue))


def ring_streaming(session: Session, group_ids: Collection[int]) -> None:
    """Groups that are closed while their training round is still rolled out: an idle trainer may compute them."""
    if not group_ids:
        return
    open_ = select(Episode.id).where(
        Episode.round_id == Group.round_id, Episode.group_id == Group.id, Episode.state.in_(OPEN)
    )
    rows = session.execute(
        select(Group.id, BaseModel.queue_suffix)
        .join(Round, Round.id == Group.round_id)
        .join(Job, Job.id == Round.job_id)
        .join(BaseModel, BaseModel.name == Job.base_model)
        .where(
            Group.id.in_(group_ids),
            Round.kind == RoundKind.TRAIN,
            Round.state == RoundState.ROLLING_OUT,
            ~open_.exists(),
        )
        .order_by(Group.id)
    )
    for group_id, suffix in rows:
        ring = partial(broker.ring, broker.STREAM, f"training{suffix}", group_id=group_id)
        after_commit(session, ring)


def ring_resets(session: Session, group_ids: Sequence[int]) -> None:
    for part in _parts(group_ids):
        after_commit(session, lambda part=part: broker.ring(broker.RESET, "tools", group_ids=part))  # type: ignore[misc]


def ring_steps(session: Session, episode_ids: Sequence[int]) -> None:
    for part in _parts(episode_ids):
        after_commit(session, lambda part=part: broker.ring(broker.STEP, "tools", episode_ids=part))  # type: ignore[misc]


def ring_generations(session: Session, episode_ids: Sequence[int]) -> None:
    """One message a base model and batch; a batch keeps the episodes of a group together, as they share a prompt."""
    by_queue: dict[str, list[int]] = defaultdict(list)
    rows = session.execute(
        select(Episode.id, BaseModel.queue_suffix)
        .join(Round, Round.id == Episode.round_id)
        .join(Job, Job.id == Round.job_id)
        .join(BaseModel, BaseModel.name == Job.base_model)
        .where(Episode.id.in_(episode_ids))
        .order_by(Episode.round_id, Episode.group_id, Episode.index)
    )
    for episode_id, suffix in rows:
        by_queue[f"rollout{suffix}"].append(episode_id)
    for queue, ids in by_queue.items():
        for part in _parts(ids):
            after_commit(
                session,
                lambda queue=queue, part=part: broker.ring(broker.GENERATE, queue, episode_ids=part),  # type: ignore[misc]
            )


def queue_suffix(session: Session, base_model: str) -> str:
    return session.scalars(select(BaseModel.queue_suffix).where(BaseModel.name == base_model)).one()


def _parts(ids: Sequence[int]) -> Iterable[list[int]]:
    for start in range(0, len(ids), EPISODES_A_MESSAGE):
        yield list(ids[start : start + EPISODES_A_MESSAGE])
