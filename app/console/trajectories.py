"""The trajectory browser: prompts, what was said on both sides, tool calls and rewards of a job's episodes."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from flask import render_template, request, url_for

from app.console.auth import role
from app.console.blueprint import console
from app.console.job import find, head
from app.db import transaction
from app.errors import InvalidRequest
from app.manager.trajectories import EpisodeRow, episodes_page
from app.models import Job
from app.models.job import JobState
from app.models.round import RoundKind

PAGE = 16
MOST_TEXT = 20_000  # characters of one message that a page shows
PREVIEW = 160

_CALL = re.compile(r"(<tool_call>.*?(?:</tool_call>|\Z))", re.DOTALL)


@dataclass(frozen=True)
class Piece:
    text: str
    call: bool  # a tool call of the policy


@console.get("/jobs/<uuid:job_id>/trajectories")
@role("viewer")
def trajectories(job_id: uuid.UUID) -> str:
    """Episodes by version, kind, reward and outcome; at first those of the latest version."""
    with transaction() as session:
        found = find(session, job_id)
        wanted = _filters(found)
        page = episodes_page(session, found, after=_number("after", int) or 0, limit=PAGE, **wanted)
        top = head(session, found)
    groups = [(rows[0], rows) for _, members in groupby(page.episodes, _group_of) if (rows := list(members))]
    return render_template(
        "console/trajectories.html",
        groups=groups,
        wanted=wanted,
        given=request.args,
        kinds=list(RoundKind),
        pieces=pieces,
        preview=preview,
        following=_link(found, after=page.episodes[-1].id) if page.has_more else None,
        first=_link(found) if request.args.get("after") else None,
        **top,
    )


def pieces(content: object) -> list[Piece]:
    """A message's text cut at its tool calls."""
    text = str(content)
    if len(text) > MOST_TEXT:
        text = f"{text[:MOST_TEXT]}\n… {len(text) - MOST_TEXT} more characters"
    return [Piece(part, part.startswith("<tool_call>")) for part in _CALL.split(text) if part]


def preview(episode: EpisodeRow) -> str:
    """The start of the last thing that the policy said."""
    said = [m for turn in episode.turns if turn.kind == "policy" for m in turn.messages]
    if not said:
        return ""
    text = " ".join(str(said[-1].get("content", "")).split())
    return text if len(text) <= PREVIEW else text[:PREVIEW] + "…"


def _group_of(row: EpisodeRow) -> tuple[int, int]:
    return row.round_id, row.prompt_index


def _filters(job: Job) -> dict[str, Any]:
    """What the address asks for. Without any filter: training episodes of the latest version that has some."""
    kind = request.args.get("kind", RoundKind.TRAIN)
    if kind and kind not in set(RoundKind):
        raise InvalidRequest(f"kind is one of {', '.join(RoundKind)}", param="kind")
    version = _number("version", int)
    if "version" not in request.args and kind == RoundKind.TRAIN:
        done = job.state == JobState.SUCCEEDED  # no round was opened at the last version
        version = max(0, job.version - 1) if done else job.version
    passed = request.args.get("passed", "")
    return {
        "version": version,
        "kind": kind or None,
        "min_reward": _number("min_reward", float),
        "max_reward": _number("max_reward", float),
        "passed": {"yes": True, "no": False}.get(passed),
    }


def _number(name: str, kind: type[int] | type[float]) -> Any:
    text = request.args.get(name, "").strip()
    if not text:
        return None
    try:
        value = kind(text)
        if not abs(value) < (2**63 if name == "after" else 2**31):  # what the database can hold; NaN is none
            raise ValueError("too large")
        return value
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"{name.replace('_', ' ')} must be a number, not {text[:40]!r}", param=name) from error


def _link(job: Job, **changes: Any) -> str:
    given = {k: v for k, v in request.args.items() if k != "after"}
    return url_for("console.trajectories", job_id=job.id, **(given | changes))
