"""`…/trajectories`: what a job's policy said, what its environment answered, and what that was worth."""

from __future__ import annotations

import re
from typing import Any, Literal

import pydantic

from app.api import ids
from app.api.auth import requires, tenant_transaction
from app.api.blueprint import api
from app.api.job_objects import unix
from app.api.jobs import find_job
from app.api.pages import ListOf, PageQuery, page
from app.manager.trajectories import EpisodeRow, TurnView, episodes_page
from app.models.round import EpisodeState, RoundKind

PREFIX = "trajectory-"


class TrajectoryQuery(PageQuery):
    model_config = pydantic.ConfigDict(allow_inf_nan=False)

    kind: RoundKind | None = pydantic.Field(None, description="of rounds: train or eval")
    version: int | None = pydantic.Field(None, ge=0, le=ids.MAX_INTEGER, description="the policy's")
    min_reward: float | None = pydantic.Field(None, description="at least")
    max_reward: float | None = pydantic.Field(None, description="at most")
    passed: bool | None = None
    state: EpisodeState | None = None


class ToolCall(pydantic.BaseModel):
    text: str
    name: str | None = pydantic.Field(description="null: not what a call looks like")
    arguments: Any


class TurnObject(pydantic.BaseModel):
    by: Literal["policy", "environment"]
    messages: list[dict[str, Any]]
    tool_calls: list[ToolCall]
    tokens: int = pydantic.Field(description="sampled")
    finish_reason: str | None
    seconds: float


class TrajectoryObject(pydantic.BaseModel):
    id: str
    object: Literal["fine_tuning.job.trajectory"]
    kind: RoundKind
    version: int = pydantic.Field(description="the policy's")
    prompt_index: int = pydantic.Field(description="in its round")
    index: int = pydantic.Field(description="among the answers to the same prompt")
    state: EpisodeState
    prompt: list[dict[str, Any]] | None = pydantic.Field(description="null: its environment has not been asked yet")
    tools: list[dict[str, Any]] | None
    turns: list[TurnObject] = pydantic.Field(description="empty once retention has removed them")
    reward: float | None
    passed: bool | None
    truncated: bool
    flags: list[str]
    error_code: str | None
    finished_at: int | None = pydantic.Field(description="Unix seconds")


class TrajectoryList(ListOf[TrajectoryObject]):
    pass


@api.get("/fine_tuning/jobs/<fine_tuning_job_id>/trajectories")
@requires("read")
@api.input(TrajectoryQuery, location="query", arg_name="query")
@api.output(TrajectoryList)
def list_trajectories(fine_tuning_job_id: str, query: TrajectoryQuery) -> dict[str, Any]:
    """List a job's trajectories, round by round"""
    filters = query.model_dump(exclude={"after", "limit"})
    after = 0 if query.after is None else _parse(query.after)
    with tenant_transaction() as session:
        job = find_job(session, fine_tuning_job_id)
        found = episodes_page(session, job, after=after, limit=query.limit, **filters)
    return page([_document(episode) for episode in found.episodes], found.has_more)


def _parse(text: str) -> int:
    match = re.fullmatch(rf"{PREFIX}([1-9][0-9]{{0,18}})", text, re.ASCII)
    if match is None or int(match[1]) > ids.MAX_BIG_INTEGER:
        raise ids.not_found("trajectory", text, "after")
    return int(match[1])


def _document(e: EpisodeRow) -> dict[str, Any]:
    return {
        "id": f"{PREFIX}{e.id}",
        "object": "fine_tuning.job.trajectory",
        "kind": e.kind,
        "version": e.version,
        "prompt_index": e.prompt_index,
        "index": e.index,
        "state": e.state,
        "prompt": e.prompt,
        "tools": e.tools,
        "turns": [_turn(turn) for turn in e.turns],
        "reward": e.reward,
        "passed": e.passed,
        "truncated": e.truncated,
        "flags": e.flags,
        "error_code": e.error_code,
        "finished_at": unix(e.finished_at) if e.finished_at else None,
    }


def _turn(turn: TurnView) -> dict[str, Any]:
    return {
        "by": turn.kind,
        "messages": turn.messages,
        "tool_calls": [{"text": c.text, "name": c.name, "arguments": c.arguments} for c in turn.tool_calls],
        "tokens": turn.tokens,
        "finish_reason": turn.finish_reason,
        "seconds": turn.seconds,
    }
