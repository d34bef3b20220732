"""Admission: as engine slots free, waiting episodes of live rounds get in, and only then have a message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from sqlalchemy import Text, case, func, select, text, update
from sqlalchemy.orm import Session

from app.manager import doorbells, jobs
from app.manager.fairness import Demand, Share, allocate
from app.manager.workers import live_workers
from app.models import Episode, Group, Job, Round, Tenant
from app.models.job import Wanted
from app.models.round import EpisodeState, RoundState
from app.models.worker import WorkerKind

# Advisory lock: one admission at a time, so that two cannot hand out the same slots.
ADMISSION_LOCK = 0x4D41524C41

HOLDS_SLOT = (EpisodeState.RESETTING, EpisodeState.GENERATING)


@dataclass(frozen=True, slots=True)
class Capacity:
    slots: int
    adapter_slots: int


def admit(session: Session) -> int:
    """Ends jobs that are done, starts queued ones within their tenants' quotas, then admits episodes; returns how many episodes got in."""
    session.execute(select(func.pg_advisory_xact_lock(ADMISSION_LOCK)))
    jobs.finish_done(session)
    jobs.start_queued(session)
    admitted = 0
    for base_model, capacity in engine_capacity(session).items():
        admitted += _admit_for(session, base_model, capacity)
    return admitted


def engine_capacity(session: Session) -> dict[str, Capacity]:
    """What the live rollout workers that are not draining announce, by base model."""
    slots: dict[str, int] = defaultdict(int)
    adapters: dict[str, int] = defaultdict(int)
    for worker in live_workers(session, WorkerKind.ROLLOUT):
        if worker.base_model is not None and not worker.draining:
            slots[worker.base_model] += worker.slots
            adapters[worker.base_model] += worker.adapter_slots
    return {model: Capacity(slots[model], adapters[model]) for model in slots}


def _admit_for(session: Session, base_model: str, capacity: Capacity) -> int:
    rows = session.execute(
        select(
            Round.id,
            Job.tenant_id,
            Job.weight,
            func.concat(Job.id.cast(Text), ":", Round.policy_version).label("adapter"),
            func.extract("epoch", func.now() - Round.created_at).label("age"),
            func.count().filter(Episode.state == EpisodeState.WAITING).label("waiting"),
            func.count().filter(Episode.state.in_(HOLDS_SLOT)).label("running"),
            func.count().filter(Episode.state == EpisodeState.ACTING).label("acting"),
            case((Job.wanted == Wanted.RUN, True), else_=False).label("wanted"),
        )
        .join(Job, Job.id == Round.job_id)
        .join(Episode, Episode.round_id == Round.id)
        .where(Round.state == RoundState.ROLLING_OUT, Job.base_model == base_model)
        .group_by(Round.id, Job.id)
    ).all()
    if not any(row.waiting and row.wanted for row in rows):
        return 0
    in_flight: dict[object, int] = defaultdict(int)
    for row in rows:
        in_flight[row.tenant_id] += row.running + row.acting
    shares: dict[Hashable, Share] = {
        t.id: Share(t.weight, 0 if t.suspended else t.max_inflight_episodes - in_flight[t.id])
        for t in session.scalars(select(Tenant).where(Tenant.id.in_(in_flight)))
    }
    demands = [
        Demand(
            round=row.id,
            tenant=row.tenant_id,
            waiting=row.waiting if row.wanted else 0,
            running=row.running,
            age=float(row.age),
            weight=row.weight,
            adapter=row.adapter,
        )
        for row in rows
    ]
    free = capacity.slots - sum(d.running for d in demands)
    given = allocate(free, demands, shares, capacity.adapter_slots)
    for round_id, count in given.items():
        _admit_episodes(session, int(round_id), count)  # type: ignore[call-overload]
    return sum(given.values())


def _admit_episodes(session: Session, round_id: int, count: int) -> None:
    """Lets the round's next `count` episodes in, in order of (group, index): to reset, or to generate where the group
    has its prompt."""
    picked = (
        select(Episode.id)
        .where(Episode.round_id == round_id, Episode.state == EpisodeState.WAITING)
        .order_by(Episode.group_id, Episode.index)
        .limit(count)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    state = case((Group.messages.is_(None), EpisodeState.RESETTING.value), else_=EpisodeState.GENERATING.value)
    rows = session.execute(
        update(Episode)
        .where(Episode.id.in_(picked), Group.id == Episode.group_id)
        .values(state=state, doorbell_at=func.now())
        .returning(Episode.id, Episode.group_id, Episode.state)
        .execution_options(synchronize_session=False)
    ).all()
    session.execute(
        update(Round)
        .where(Round.id == round_id, Round.admitted_at.is_(None))
        .values(admitted_at=func.clock_timestamp())
        .execution_options(synchronize_session=False)
    )
    doorbells.ring_resets(session, sorted({r.group_id for r in rows if r.state == EpisodeState.RESETTING}))
    generating = [r.id for r in rows if r.state == EpisodeState.GENERATING]
    if generating:
        doorbells.ring_generations(session, generating)


def backlog(session: Session) -> bool:
    """Whether any episode waits for admission: if so a freed slot rings."""
    return bool(
        session.execute(
            text(
                "SELECT EXISTS (SELECT 1 FROM episodes e JOIN rounds r ON r.id = e.round_id"
                " WHERE e.state = 'waiting' AND r.state = 'rolling_out')"
            )
        ).scalar()
    )
