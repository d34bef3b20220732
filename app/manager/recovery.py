"""The sweep: finds work that was admitted or claimed and is not making progress, and rings again (rule 2).

Each part is a short transaction of its own, or several. Losing every message, or any process, loses nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from app.db import after_commit, engine, transaction
from app.manager import doorbells, jobs, rounds
from app.models import Episode, Job, Round
from app.models.job import JobState, Wanted
from app.models.round import IN_FLIGHT, OPEN, EpisodeState, RoundState
from app.settings import get_settings

SWEEP_LOCK = 0x4D41524C53
BATCH = 1000  # rows a part handles at most; the next sweep takes the rest


def sweep() -> dict[str, int]:
    """One pass; returns what it did by name. Parts that found nothing are left out."""
    done: dict[str, int] = {}
    with sweeping() as mine:
        if mine:
            for part in (expire_episode_leases, expire_training_leases, ring_episodes, ring_training, recount_rounds):
                done[part.__name__] = in_transaction(part)
            done["ring_unstarted"] = ring_unstarted()
            done["settle_jobs"] = settle_jobs()
    return {name: count for name, count in done.items() if count}


@contextmanager
def sweeping() -> Iterator[bool]:
    """Whether this is the only sweep now. The lock belongs to a connection, so it ends with its process."""
    with engine("service").connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        mine = connection.execute(select(func.pg_try_advisory_lock(SWEEP_LOCK))).scalar_one()
        try:
            yield mine
        finally:
            if mine:
                connection.execute(select(func.pg_advisory_unlock(SWEEP_LOCK)))


def in_transaction(part: Callable[[Session], int]) -> int:
    with transaction() as session:
        return part(session)


# Whether a claim is lost: its lease ran out, or its process sends no heartbeats any more. Just after a database restart
# nobody is dead: they could not have been heard.
_LOST = """
    (x.lease_until < now() OR (
        pg_postmaster_start_time() < now() - make_interval(secs => :dead) AND NOT EXISTS (
            SELECT FROM workers w
            WHERE w.name || '/' || w.boot = x.worker AND w.seen_at > now() - make_interval(secs => :dead)
        )
    ))
"""


def expire_episode_leases(session: Session) -> int:
    """Leases that ran out, or whose process died: the episode is free again. Lost too often, it fails its job."""
    rows = session.execute(
        text(
            "WITH lost AS ("
            " SELECT x.id FROM episodes x JOIN rounds r ON r.id = x.round_id"
            " WHERE x.state IN ('resetting', 'generating', 'acting') AND x.lease_until IS NOT NULL"
            f" AND r.state = 'rolling_out' AND {_LOST}"
            " ORDER BY x.id LIMIT :batch FOR NO KEY UPDATE OF x SKIP LOCKED)"
            " UPDATE episodes e SET lease_until = NULL, worker = NULL, losses = losses + 1,"
            " doorbell_at = now() - make_interval(secs => :bell)"
            " FROM lost WHERE e.id = lost.id RETURNING e.id, e.losses, e.round_id"
        ),
        _lost_parameters(),
    ).all()
    for row in rows:
        if row.losses > get_settings().losses_before_alone:
            _fail_for_losses(row.round_id, f"episode {row.id}", row.losses, session)
    return len(rows)


def expire_training_leases(session: Session) -> int:
    """An update whose process died goes back into the buffer at its old place; lost too often, it fails its job."""
    rows = session.execute(
        text(
            "WITH lost AS ("
            f" SELECT x.id FROM rounds x WHERE x.state = 'training' AND {_LOST}"
            " ORDER BY x.id LIMIT :batch FOR NO KEY UPDATE SKIP LOCKED)"
            " UPDATE rounds r SET state = 'ready', lease_until = NULL, worker = NULL, losses = losses + 1,"
            " doorbell_at = now() - make_interval(secs => :bell)"
            " FROM lost WHERE r.id = lost.id RETURNING r.id, r.losses"
        ),
        _lost_parameters(),
    ).all()
    for row in rows:
        if row.losses > get_settings().losses_before_alone:
            _fail_for_losses(row.id, f"the update of round {row.id}", row.losses, session)
    return len(rows)


def _lost_parameters() -> dict[str, float]:
    settings = get_settings()
    return {"dead": settings.worker_dead_seconds, "bell": settings.doorbell_seconds, "batch": BATCH}


def _fail_for_losses(round_id: int, what: str, losses: int, session: Session) -> None:
    """Fails the job after this transaction, as the job's lock comes before the episode's."""
    job_id = session.scalars(select(Round.job_id).where(Round.id == round_id)).one()

    def fail() -> None:
        with transaction() as later:
            jobs.fail_by_id(
                later,
                job_id,
                "worker_lost",
                f"{what} was lost {losses} times with the process that worked on it,"
                " the last time with nothing else beside it",
            )

    after_commit(session, fail)


def ring_episodes(session: Session) -> int:
    """Admitted work that nobody holds, and that was last rung for a while ago, is rung for again."""
    late = (
        select(Episode.id)
        .join(Round, Round.id == Episode.round_id)
        .where(
            Episode.state.in_(IN_FLIGHT),
            Episode.lease_until.is_(None),
            Episode.doorbell_at <= func.now() - timedelta(seconds=get_settings().doorbell_seconds),
            Round.state == RoundState.ROLLING_OUT,
        )
        .order_by(Episode.id)
        .limit(BATCH)
        .with_for_update(of=Episode, key_share=True, skip_locked=True)
        .cte("late")
    )
    rows = session.execute(
        update(Episode)
        .where(Episode.id == late.c.id)
        .values(doorbell_at=func.now())
        .returning(Episode.id, Episode.group_id, Episode.state)
        .execution_options(synchronize_session=False)
    ).all()
    doorbells.ring_resets(session, sorted({r.group_id for r in rows if r.state == EpisodeState.RESETTING}))
    doorbells.ring_steps(session, sorted(r.id for r in rows if r.state == EpisodeState.ACTING))
    if generating := [r.id for r in rows if r.state == EpisodeState.GENERATING]:
        doorbells.ring_generations(session, generating)
    return len(rows)


def ring_training(session: Session) -> int:
    """Ready rounds that nobody took."""
    late = (
        select(Round.id, Job.base_model)
        .join(Job, Job.id == Round.job_id)
        .where(
            Round.state == RoundState.READY,
            Round.doorbell_at <= func.now() - timedelta(seconds=get_settings().doorbell_seconds),
            Job.state == JobState.RUNNING,
            Job.wanted == Wanted.RUN,
        )
        .order_by(Round.id)
        .limit(BATCH)
        .with_for_update(of=Round, key_share=True, skip_locked=True)
        .cte("late")
    )
    rows = session.execute(
        update(Round)
        .where(Round.id == late.c.id)
        .values(doorbell_at=func.now())
        .returning(late.c.base_model)
        .execution_options(synchronize_session=False)
    ).all()
    for row in rows:
        doorbells.ring_training(session, row.base_model)
    return len(rows)


def recount_rounds(session: Session) -> int:
    """Re-checks the count of open episodes; a round whose last episode closed without it becomes ready."""
    wrong = session.scalars(
        text(
            "SELECT r.id FROM rounds r WHERE r.state = 'rolling_out' AND r.open_episodes <>"
            " (SELECT count(*) FROM episodes e WHERE e.round_id = r.id AND e.state = 'waiting')"
            " + (SELECT count(*) FROM episodes e"
            "    WHERE e.round_id = r.id AND e.state IN ('resetting', 'generating', 'acting'))"
        )
    ).all()
    if not wrong:
        return 0
    mended = 0
    for round_id, round_ in rounds.lock_rounds(session, set(wrong)).items():
        open_now = session.scalars(
            select(func.count()).where(Episode.round_id == round_id, Episode.state.in_(OPEN))
        ).one()
        if round_.state == RoundState.ROLLING_OUT and open_now != round_.open_episodes:
            rounds.count_down(session, round_, round_.open_episodes - open_now)
            mended += 1
    return mended


def ring_unstarted() -> int:
    """Rings again for jobs whose validation or start was asked for and has not come."""
    with transaction() as session:
        late = jobs.unstarted(session)
    for job_id in late:
        with transaction() as session:
            jobs.ring_unstarted(session, job_id)
    return len(late)


# A running job without a live training round is done, or misses one; without a version it is still being started.
_UNSETTLED = """
SELECT j.id FROM jobs j WHERE j.state IN ('running', 'queued') AND j.wanted = 'pause'
UNION
SELECT j.id FROM jobs j WHERE j.state = 'running'
    AND NOT EXISTS (
        SELECT FROM rounds r
        WHERE r.job_id = j.id AND r.kind = 'train' AND r.state IN ('rolling_out', 'ready', 'training')
    )
    AND EXISTS (SELECT FROM policy_versions v WHERE v.job_id = j.id AND v.version = 0)
"""


def settle_jobs() -> int:
    """Jobs whose next state nobody was there to make: pauses that are complete, ends, missing rounds."""
    with transaction() as session:
        candidates = session.scalars(text(_UNSETTLED)).all()
    return sum(in_transaction(lambda session, job_id=job_id: settle(session, job_id)) for job_id in candidates)  # type: ignore[misc]


def settle(session: Session, job_id: uuid.UUID) -> bool:
    job = jobs.lock_job(session, job_id)
    return (
        jobs.settle_pause(session, job)
        or rounds.finish_if_done(session, job)
        or rounds.ensure_train_round(session, job)
    )
