"""A job's episodes for people, round by round or as one list: prompts, what was said on both sides, rewards."""

from __future__ import annotations

import json
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row, func, select, tuple_
from sqlalchemy.orm import Session

from app.errors import NotFound
from app.models import Episode, Group, Job, Round, Turn
from app.models.round import RoundKind, RoundState, TurnKind

Messages = list[dict[str, Any]]

FIRST_ROUNDS, MOST_ROUNDS = 8, 512  # looked through in one statement, for a page of episodes
TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCallView:
    """A tool call as the policy wrote it; it may be none that any tool takes."""

    text: str
    name: str | None  # None: not what a call looks like
    arguments: Any


@dataclass(frozen=True)
class TurnView:
    kind: str  # policy | environment
    messages: Messages
    tokens: int  # sampled
    finish_reason: str | None
    seconds: float

    @property
    def tool_calls(self) -> list[ToolCallView]:
        """Of a turn of the policy, in order, well or badly formed."""
        if self.kind != TurnKind.POLICY:
            return []
        return [_tool_call(text) for message in self.messages for text in TOOL_CALL.findall(message["content"])]


def _tool_call(text: str) -> ToolCallView:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        call = None
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        return ToolCallView(text, call["name"], call.get("arguments"))
    return ToolCallView(text, None, None)


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
    turns = _turns(session, [round_.id], [e.id for e in rows])
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


@dataclass(frozen=True)
class EpisodeRow:
    """An episode with all that is around it: an entry of a list that goes through rounds."""

    id: int
    round_id: int
    kind: str  # of its round
    version: int
    prompt_index: int  # of its group in the round
    item: int  # cursor index of the prompt in the job's data
    index: int  # in its group
    state: str
    prompt: Messages | None  # None: not reset yet
    tools: list[dict[str, Any]] | None
    turns: list[TurnView]  # empty once retention has dropped them
    reward: float | None
    passed: bool | None
    truncated: bool
    flags: list[str]
    error_code: str | None
    finished_at: datetime | None


@dataclass(frozen=True)
class EpisodesPage:
    episodes: list[EpisodeRow]
    has_more: bool


def episodes_page(
    session: Session,
    job: Job,
    *,
    version: int | None = None,
    kind: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    passed: bool | None = None,
    state: str | None = None,
    after: int = 0,
    limit: int = 20,
) -> EpisodesPage:
    """Up to `limit` episodes of the job that match, in order of round, prompt and index, from behind episode `after`.

    Bounds of the reward are inclusive; an episode without a reward is within none. Raises NotFound when `after` is not
    an episode of the job.
    """
    of_rounds = _meeting((Round.policy_version, operator.eq, version), (Round.kind, operator.eq, kind))
    rounds = select(Round.id).where(Round.job_id == job.id, *of_rounds).order_by(Round.id)
    episodes = _EPISODES.where(
        Episode.tenant_id == job.tenant_id,
        *_meeting(
            (Episode.reward, operator.ge, min_reward),
            (Episode.reward, operator.le, max_reward),
            (Episode.passed, operator.eq, passed),
            (Episode.state, operator.eq, state),
        ),
    )
    first_round = 0
    if after:
        place = _place(session, job, after)
        first_round = place.round_id
        episodes = episodes.where(tuple_(Episode.round_id, Episode.group_id, Episode.index) > tuple_(*place))
    rows: list[Row[Any]] = []
    # A few rounds at a time, as they lie in the index: in one statement the planner may walk all jobs' episodes.
    some = FIRST_ROUNDS
    while len(rows) <= limit and (part := session.scalars(rounds.where(Round.id >= first_round).limit(some)).all()):
        rows += session.execute(episodes.where(Episode.round_id.in_(part)).limit(limit + 1 - len(rows)))
        first_round, some = part[-1] + 1, min(2 * some, MOST_ROUNDS)
    shown = rows[:limit]
    turns = _turns(session, {row.Episode.round_id for row in shown}, [row.Episode.id for row in shown])
    return EpisodesPage([_episode_row(row, turns) for row in shown], has_more=len(rows) > limit)


_EPISODES = (
    select(Episode, Round.kind, Group.index.label("prompt_index"), Group.item, Group.messages, Group.tools)
    .join(Round, Round.id == Episode.round_id)
    .join(Group, Group.id == Episode.group_id)
    .order_by(Episode.round_id, Episode.group_id, Episode.index)
)


def _meeting(*filters: tuple[Any, Callable[[Any, Any], Any], Any]) -> list[Any]:
    """The conditions of those (column, comparison, value) whose value is given."""
    return [compare(column, value) for column, compare, value in filters if value is not None]


def _place(session: Session, job: Job, episode_id: int) -> Any:
    place = session.execute(
        select(Episode.round_id, Episode.group_id, Episode.index)
        .join(Round, Round.id == Episode.round_id)
        .where(Episode.id == episode_id, Round.job_id == job.id)
    ).first()
    if place is None:
        raise NotFound(
            f"job {job.name} has no episode {episode_id}; give `after` the id of one that was listed", param="after"
        )
    return place


def _episode_row(row: Row[Any], turns: dict[int, list[TurnView]]) -> EpisodeRow:
    e: Episode = row.Episode
    return EpisodeRow(
        id=e.id,
        round_id=e.round_id,
        kind=row.kind,
        version=e.policy_version,
        prompt_index=row.prompt_index,
        item=row.item,
        index=e.index,
        state=e.state,
        prompt=row.messages,
        tools=row.tools,
        turns=turns.get(e.id, []),
        reward=e.reward,
        passed=e.passed,
        truncated=e.truncated,
        flags=e.flags or [],
        error_code=e.error_code,
        finished_at=e.finished_at,
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


def _turns(session: Session, round_ids: Collection[int], episode_ids: Sequence[int]) -> dict[int, list[TurnView]]:
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
        .where(Turn.round_id.in_(round_ids), Turn.episode_id.in_(episode_ids))
        .order_by(Turn.episode_id, Turn.index)
    )
    for row in rows:
        turn = TurnView(row.kind, row.messages or [], int(row.tokens), row.finish_reason, row.seconds)
        found[row.episode_id].append(turn)
    return found
