"""The whole service at a glance, for operators: how busy, how fast, what waits where, who runs, what went wrong."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import redis
import structlog
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from app import calls
from app.manager.workers import live_workers
from app.models import BaseModel, Worker
from app.settings import get_settings

log = structlog.get_logger(__name__)

BUSY_SECONDS = 300.0  # busy shares are of the last minutes
SPEED_SECONDS = 30.0
RATE_SECONDS = 600.0  # steps an hour are reckoned from these last ones
SPAN_SECONDS = 600.0  # a span longer than this is cut off where its start lies before the window
RECENT_EVENTS = 20_000  # errors are looked for among this many last events
ERRORS = 8


@dataclass(frozen=True)
class Queue:
    """Work that waits at one place. Messages are only doorbells: they may be fewer than what waits."""

    name: str
    what: str
    depth: int
    oldest_seconds: float | None
    messages: int | None = None  # in Redis; None: has no messages, or Redis does not answer


@dataclass(frozen=True)
class RecentError:
    job_id: uuid.UUID
    job: str
    tenant: str
    code: str
    message: str
    created_at: datetime


@dataclass(frozen=True)
class Overview:
    rollout_busy: float | None  # share of the live workers' time; None: there are none
    training_busy: float | None
    tokens_per_second: float
    steps_per_hour: float  # as of late, RATE_SECONDS
    phases: dict[str, int]  # live jobs by phase, as in `progress.Phase`
    queues: list[Queue]
    workers: Sequence[Worker]  # alive
    known_workers: int
    slots: int  # of the live engines
    slots_taken: int
    errors: list[RecentError]

    @property
    def live_jobs(self) -> int:
        return sum(self.phases.values())

    @property
    def running_jobs(self) -> int:
        return self.live_jobs - sum(self.phases.get(phase, 0) for phase in ("validating", "queued", "paused"))


def overview(session: Session, messages: dict[str, int] | None) -> Overview:
    """All figures in a dozen queries on indexes; what grows with the number of jobs is counted, never fetched.

    `messages`: what `count_messages` told before the transaction began.
    """
    alive = live_workers(session)
    busy = _busy_shares(session)
    engines = [w for w in alive if w.kind == "rollout"]
    steps = session.execute(
        text(
            "SELECT count(*) FROM rounds WHERE kind = 'train' AND state = 'committed'"
            " AND finished_at > now() - make_interval(secs => :rate)"
        ),
        {"rate": RATE_SECONDS},
    ).scalar_one()
    return Overview(
        rollout_busy=busy.get("rollout"),
        training_busy=busy.get("training"),
        tokens_per_second=_speed(session),
        steps_per_hour=steps * 3600 / RATE_SECONDS,
        phases=_phases(session),
        queues=_queues(session, messages),
        workers=alive,
        # Those that stopped on purpose have gone out of this day.
        known_workers=session.execute(
            text("SELECT count(*) FROM workers WHERE seen_at > now() - interval '1 day'")
        ).scalar_one(),
        slots=sum(w.slots for w in engines),
        slots_taken=sum(int(w.load.get("running", 0)) for w in engines),
        errors=_errors(session),
    )


def _busy_shares(session: Session) -> dict[str, float]:
    """Time in which a worker was with at least one round, over the time that it could have been."""
    rows = session.execute(
        text(
            "WITH frame AS (SELECT now() - make_interval(secs => :window) AS start),"
            " alive AS (SELECT name, kind, greatest(started_at, start) AS since FROM workers, frame"
            "  WHERE kind IN ('rollout', 'training') AND seen_at > now() - make_interval(secs => :dead)),"
            " merged AS (SELECT s.worker, range_agg(tstzrange(greatest(s.started_at, a.since), s.ended_at)) AS ranges"
            "  FROM phase_spans s JOIN alive a ON a.name = s.worker AND a.kind = s.phase, frame"
            "  WHERE s.started_at > start - make_interval(secs => :longest) AND s.ended_at > a.since GROUP BY 1),"
            " taken AS (SELECT worker, extract(epoch FROM sum(upper(r) - lower(r))) AS seconds"
            "  FROM merged, unnest(ranges) AS r GROUP BY 1)"
            " SELECT kind, sum(coalesce(seconds, 0)) / greatest(sum(extract(epoch FROM now() - since)), 1)"
            " FROM alive LEFT JOIN taken ON worker = name GROUP BY kind"
        ),
        {"window": BUSY_SECONDS, "dead": get_settings().worker_dead_seconds, "longest": SPAN_SECONDS},
    )
    return {kind: min(1.0, float(share)) for kind, share in rows}


def _speed(session: Session) -> float:
    tokens = session.execute(
        text("SELECT sum(generated_tokens) FROM usage WHERE created_at > now() - make_interval(secs => :window)"),
        {"window": SPEED_SECONDS},
    ).scalar_one()
    return float(tokens or 0) / SPEED_SECONDS


def _phases(session: Session) -> dict[str, int]:
    """Live jobs by phase: `progress.phase_of`, said in SQL over all of them."""
    rows = session.execute(
        text(
            "WITH flight AS (SELECT round_id, count(*) FILTER (WHERE state = 'generating') AS generating,"
            "  count(*) FILTER (WHERE state <> 'generating') AS acting FROM episodes"
            "  WHERE state IN ('resetting', 'generating', 'acting') GROUP BY 1),"
            " live AS (SELECT DISTINCT ON (job_id) job_id, id, kind, state FROM rounds"
            "  WHERE state IN ('rolling_out', 'ready', 'training') ORDER BY job_id, kind <> 'train', id)"
            " SELECT CASE WHEN j.state = 'validating_files' THEN 'validating' WHEN j.state <> 'running' THEN j.state"
            "  WHEN r.id IS NULL THEN 'starting' WHEN r.state = 'ready' THEN 'buffered'"
            "  WHEN r.state = 'training' THEN 'training' WHEN r.kind <> 'train' THEN 'evaluating'"
            "  WHEN f.round_id IS NULL THEN 'waiting' WHEN f.generating >= f.acting THEN 'rollout'"
            "  ELSE 'environment' END AS phase, count(*) AS jobs"
            " FROM jobs j LEFT JOIN live r ON r.job_id = j.id LEFT JOIN flight f ON f.round_id = r.id"
            " WHERE j.state NOT IN ('succeeded', 'failed', 'cancelled') AND j.kind = 'train' GROUP BY 1"
        )
    )
    return {row.phase: row.jobs for row in rows}


def _queues(session: Session, messages: dict[str, int] | None) -> list[Queue]:
    quota = session.execute(
        text("SELECT count(*), extract(epoch FROM now() - min(created_at)) FROM jobs WHERE state = 'queued'")
    ).one()
    in_flight: dict[str, Any] = {
        row.state: row
        for row in session.execute(
            text(
                "SELECT state, count(*) AS total, count(*) FILTER (WHERE lease_until IS NULL) AS unclaimed,"
                " extract(epoch FROM now() - min(doorbell_at) FILTER (WHERE lease_until IS NULL)) AS oldest"
                " FROM episodes WHERE state IN ('resetting', 'generating', 'acting') GROUP BY state"
            )
        )
    }
    opened = session.execute(
        text(
            "SELECT coalesce(sum(open_episodes), 0) AS episodes, extract(epoch FROM now() - min(created_at) FILTER"
            " (WHERE EXISTS (SELECT FROM episodes e WHERE e.round_id = r.id AND e.state = 'waiting'))) AS oldest"
            " FROM rounds r WHERE state = 'rolling_out'"
        )
    ).one()
    ready = session.execute(
        text("SELECT count(*), extract(epoch FROM now() - min(ready_at)) FROM rounds WHERE state = 'ready'")
    ).one()
    waiting = max(0, int(opened.episodes) - sum(row.total for row in in_flight.values()))

    def claimable(name: str, what: str, *states: str) -> Queue:
        rows = [in_flight[s] for s in states if s in in_flight]
        ages = [float(row.oldest) for row in rows if row.oldest is not None]
        depth = sum(row.unclaimed for row in rows)
        return Queue(name, what, depth, max(ages, default=None), _sum(messages, name))

    return [
        Queue("quota", "jobs queued for their tenant's quota", quota[0], _float(quota[1])),
        Queue("admission", "episodes that wait for an engine slot", waiting, _float(opened.oldest)),
        claimable("rollout", "turns for an engine to take", "generating"),
        claimable("tools", "environment calls for a tools worker to take", "resetting", "acting"),
        Queue("training", "rounds ready to be trained on", ready[0], _float(ready[1]), _sum(messages, "training")),
        Queue("manager", "doorbells of the manager", _sum(messages, "manager") or 0, None, _sum(messages, "manager")),
    ]


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def queue_names(session: Session) -> list[str]:
    """The queues in Redis: those of all base models, and the common ones."""
    suffixes = session.scalars(select(BaseModel.queue_suffix)).all()
    return ["manager", "tools", *(f"{stage}{suffix}" for stage in ("rollout", "training") for suffix in suffixes)]


def count_messages(names: Sequence[str]) -> dict[str, int] | None:
    """Messages by queue, or None where Redis does not answer: the other figures are of Postgres and still shown.

    To be called outside of a transaction, which waits for no network.
    """
    try:
        with calls.client().pipeline(transaction=False) as pipe:
            for name in names:
                pipe.llen(name)
            return dict(zip(names, pipe.execute(), strict=True))
    except redis.RedisError as error:
        log.warning("queues_unknown", error=str(error))
        return None


def _sum(messages: dict[str, int] | None, stage: str) -> int | None:
    """Over the queues of all base models."""
    if messages is None:
        return None
    return sum(count for name, count in messages.items() if name == stage or name.startswith(f"{stage}."))


def _errors(session: Session) -> list[RecentError]:
    rows = session.execute(
        text(
            "SELECT e.job_id, j.name AS job, t.name AS tenant, e.code, e.message, e.created_at"
            " FROM events e JOIN jobs j ON j.id = e.job_id JOIN tenants t ON t.id = e.tenant_id"
            " WHERE e.level = 'error' AND e.id > (SELECT coalesce(max(id), 0) FROM events) - :recent"
            " ORDER BY e.id DESC LIMIT :limit"
        ),
        {"recent": RECENT_EVENTS, "limit": ERRORS},
    )
    return [RecentError(**row._mapping) for row in rows]
