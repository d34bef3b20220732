"""Admission: as engine slots free, waiting episodes of live rounds get in, and only then have a message."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, case, func, select, text, update
from sqlalchemy.orm import Session

from app.manager import doorbells, jobs
from app.manager.fairness import Demand, Share, allocate
from app.manager.workers import live_workers
from app.models import Episode, Group, Round, Tenant
from app.models.round import EpisodeState
from app.models.worker import WorkerKind

# Advisory lock: one admission at a time, so that two cannot hand out the same slots.
ADMISSION_LOCK = 0x4D41524C41


@dataclass(frozen=True, slots=True)
class Capacity:
    slots: int
    adapter_slots: int


def admit(session: Session) -> int:
    """Ends jobs that are done, starts queued ones within their tenants' quotas, then admits episodes; returns how many
    episodes got in."""
    session.execute(select(func.pg_advisory_xact_lock(ADMISSION_LOCK)))
    jobs.finish_done(session)
    jobs.start_queued(session)
    given = allot(session)
    # The locks keep a pause out: what is admitted is in before it, and nothing gets in after it.
    wanted = jobs.lock_wanted(session, {row.job_id for row in given})
    return sum(_admit_episodes(session, row.id, given[row]) for row in sorted(given) if row.job_id in wanted)


def engine_capacity(session: Session) -> dict[str, Capacity]:
    """What the live rollout workers that are not draining announce, by base model."""
    slots: dict[str, int] = defaultdict(int)
    adapters: dict[str, int] = defaultdict(int)
    for worker in live_workers(session, WorkerKind.ROLLOUT):
        if worker.base_model is not None and not worker.draining:
            slots[worker.base_model] += worker.slots
            adapters[worker.base_model] += worker.adapter_slots
    return {model: Capacity(slots[model], adapters[model]) for model in slots}


_LIVE_ROUNDS = """
SELECT r.id, r.job_id, j.tenant_id, j.base_model, j.weight, r.job_id || ':' || r.policy_version AS adapter,
    extract(epoch FROM now() - r.created_at)::float8 AS age, held.running, held.acting,
    CASE WHEN j.state = 'running' AND j.wanted = 'run' THEN backlog.waiting ELSE 0 END AS waiting
FROM rounds r JOIN jobs j ON j.id = r.job_id,
LATERAL (
    SELECT count(*) FILTER (WHERE e.state <> 'acting') AS running, count(*) FILTER (WHERE e.state = 'acting') AS acting
    FROM episodes e WHERE e.round_id = r.id AND e.state IN ('resetting', 'generating', 'acting')
) held,
LATERAL (
    SELECT count(*) AS waiting FROM (
        SELECT FROM episodes e WHERE e.round_id = r.id AND e.state = 'waiting' LIMIT :most
    ) first
) backlog
WHERE r.state = 'rolling_out'
"""


def allot(session: Session) -> dict[Row[Any], int]:
    """How many episodes each live round may let in now. A tenant's quota of episodes is over all base models."""
    capacity = engine_capacity(session)
    if not capacity:
        return {}
    most = max(c.slots for c in capacity.values())
    rows = session.execute(text(_LIVE_ROUNDS), {"most": most}).all()
    if not any(row.waiting for row in rows):
        return {}
    in_flight: dict[uuid.UUID, int] = defaultdict(int)
    for row in rows:
        in_flight[row.tenant_id] += row.running + row.acting
    tenants = session.scalars(select(Tenant).where(Tenant.id.in_(in_flight))).all()
    room = {t.id: 0 if t.suspended else t.max_inflight_episodes - in_flight[t.id] for t in tenants}
    given: dict[Row[Any], int] = {}
    for base_model, announced in capacity.items():
        mine = {row.id: row for row in rows if row.base_model == base_model}
        demands = [
            Demand(row.id, row.tenant_id, row.waiting, row.running, row.age, row.weight, row.adapter)
            for row in mine.values()
        ]
        shares: dict[Hashable, Share] = {t.id: Share(t.weight, room[t.id]) for t in tenants}
        free = announced.slots - sum(row.running for row in mine.values())
        for round_id, count in allocate(free, demands, shares, announced.adapter_slots).items():
            row = mine[round_id]
            given[row] = count
            room[row.tenant_id] -= count
    return given


def _admit_episodes(session: Session, round_id: int, count: int) -> int:
    """Lets the round's next `count` episodes in, in order of (group, index): to reset, or to generate where the group
    has its prompt."""
    session.execute(
        update(Round)
        .where(Round.id == round_id, Round.admitted_at.is_(None))
        .values(admitted_at=func.clock_timestamp())
        .execution_options(synchronize_session=False)
    )
    next_ = (
        select(Episode.id, Group.messages.is_(None).label("resets"))
        .join(Group, Group.id == Episode.group_id)
        .where(Episode.round_id == round_id, Episode.state == EpisodeState.WAITING)
        .order_by(Episode.group_id, Episode.index)
        .limit(count)
        .with_for_update(of=Episode, key_share=True, skip_locked=True)
        .cte("next")
    )
    state = case((next_.c.resets, EpisodeState.RESETTING.value), else_=EpisodeState.GENERATING.value)
    rows = session.execute(
        update(Episode)
        .where(Episode.id == next_.c.id)
        .values(state=state, doorbell_at=func.now())
        .returning(Episode.id, Episode.group_id, Episode.state)
        .execution_options(synchronize_session=False)
    ).all()
    doorbells.ring_resets(session, sorted({r.group_id for r in rows if r.state == EpisodeState.RESETTING}))
    if generating := [r.id for r in rows if r.state == EpisodeState.GENERATING]:
        doorbells.ring_generations(session, generating)
    return len(rows)


def backlog(session: Session) -> bool:
    """Whether any episode waits for admission: if so a freed slot rings."""
    return bool(
        session.execute(
            text(
                "SELECT EXISTS (SELECT FROM rounds r WHERE r.state = 'rolling_out' AND EXISTS ("
                "SELECT FROM episodes e WHERE e.round_id = r.id AND e.state = 'waiting'))"
            )
        ).scalar()
    )
