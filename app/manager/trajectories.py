"""A round's episodes for people: prompts, what was said on both sides, rewards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.errors import NotFound
from app.models import Episode, Group, Job, Round, Turn
from app.models.round import RoundKind, RoundState

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class TurnView:
    kind: str  # policy | environment
    messages: Messages
    tokens: int  # sampled
    finish_reason: str | None
    seconds: float


@dataclass(frozen=True)
class EpisodeView:
    id: int
    index: int
    state: str
    reward: float | None
    passed: bool | None
    truncated: bool
    flags: list[str]
    error_code: str | None
    turns: list[TurnView]  # empty once retention has dropped them


@dataclass(frozen=True)
class GroupView:
    index: int
    item: int
    messages: Messages | None  # None: not reset yet
    episodes: list[EpisodeView]


@dataclass(frozen=True)
class RoundView:
    id: int
    kind: str
    version: int
    state: str
    groups_total: int
    offset: int
    groups: list[GroupView]


def trajectories(
    session: Session,
    job: Job,
    *,
    version: int | None = None,
    kind: RoundKind = RoundKind.TRAIN,
    offset: int = 0,
    limit: int = 4,
) -> RoundView:
    """`limit` groups from `offset` of the job's round of that kind at `version`, by default the latest round.

    Raises NotFound naming the versions that have such a round.
    """
    round_ = _find_round(session, job, version, kind)
    total = session.scalar(select(func.count()).where(Group.round_id == round_.id)) or 0
    groups = session.scalars(
        select(Group).where(Group.round_id == round_.id).order_by(Group.index).offset(offset).limit(limit)
    ).all()
    episodes: dict[int, list[EpisodeView]] = defaultdict(list)
    rows = session.scalars(
        select(Episode)
        .where(Episode.round_id == round_.id, Episode.group_id.in_([g.id for g in groups]))
        .order_by(Episode.group_id, Episode.index)
    ).all()
    turns = _turns(session, round_.id, [e.id for e in rows])
    for e in rows:
        view = EpisodeView(
            id=e.id,
            index=e.index,
            state=e.state,
            reward=e.reward,
            passed=e.passed,
            truncated=e.truncated,
            flags=e.flags or [],
            error_code=e.error_code,
            turns=turns.get(e.id, []),
        )
        episodes[e.group_id].append(view)
    return RoundView(
        id=round_.id,
        kind=round_.kind,
        version=round_.policy_version,
        state=round_.state,
        groups_total=total,
        offset=offset,
        groups=[GroupView(g.index, g.item, g.messages, episodes[g.id]) for g in groups],
    )


def _find_round(session: Session, job: Job, version: int | None, kind: RoundKind) -> Round:
    mine = select(Round).where(Round.job_id == job.id, Round.kind == kind)
    wanted = mine if version is None else mine.where(Round.policy_version == version)
    # An abandoned round only where there is no other.
    round_ = session.scalars(wanted.order_by(Round.state == RoundState.ABANDONED, Round.id.desc()).limit(1)).first()
    if round_ is not None:
        return round_
    first, last = session.execute(
        select(func.min(Round.policy_version), func.max(Round.policy_version)).where(
            Round.job_id == job.id, Round.kind == kind
        )
    ).one()
    known = f"they are of versions {first} to {last}" if first is not None else "it has none yet"
    raise NotFound(f"job {job.name} has no {kind} round of version {version}; {known}", param="version")


def _turns(session: Session, round_id: int, episode_ids: Sequence[int]) -> dict[int, list[TurnView]]:
    found: dict[int, list[TurnView]] = defaultdict(list)
    rows = session.execute(
        select(
            Turn.episode_id,
            Turn.kind,
            Turn.messages,
            func.coalesce(func.octet_length(Turn.sampled_ids) / 4, 0).label("tokens"),
            Turn.finish_reason,
            Turn.seconds,
        )
        .where(Turn.round_id == round_id, Turn.episode_id.in_(episode_ids))
        .order_by(Turn.episode_id, Turn.index)
    )
    for row in rows:
        turn = TurnView(row.kind, row.messages or [], int(row.tokens), row.finish_reason, row.seconds)
        found[row.episode_id].append(turn)
    return found
