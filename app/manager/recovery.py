"""The sweep: finds work that was admitted or claimed and is not making progress, and rings again (rule 2).

Each part is a short transaction of its own. Losing every message, or any process, loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from app.db import after_commit, transaction
from app.manager import doorbells, jobs, rounds
from app.models import Episode, Job, Round
from app.models.job import JobState, Wanted
from app.models.round import IN_FLIGHT, EpisodeState, RoundState
from app.settings import get_settings

SWEEP_LOCK = 0x4D41524C53
BATCH = 1000  # rows a part handles at most; the next sweep takes the rest


def sweep() -> dict[str, int]:
    """One pass; returns what it did by name. Parts that found nothing are left out."""
    done: dict[str, int] = {}
    for part in (
        expire_episode_leases,
        expire_training_leases,
        ring_episodes,
        ring_training,
        recount_rounds,
        settle_jobs,
    ):
        with transaction() as session:
            if not session.scalar(select(func.pg_try_advisory_xact_lock(SWEEP_LOCK))):
                return done  # another manager sweeps
            if count := part(session):
                done[part.__name__] = count
    return done


def dead_claimants(session: Session, claimants: Sequence[str]) -> set[str]:
    """Those among `claimants` whose process no longer sends heartbeats. Just after a database restart nobody is dead:
    they could not have been heard."""
    if not claimants:
        return set()
    seconds = get_settings().worker_dead_seconds
    alive = session.scalars(
        text(
            "SELECT name || '/' || boot FROM workers WHERE seen_at > now() - make_interval(secs => :s)"
            " OR pg_postmaster_start_time() > now() - make_interval(secs => :s)"
        ),
        {"s": seconds},
    ).all()
    return set(claimants) - set(alive)


def expire_episode_leases(session: Session) -> int:
    """Leases that ran out, or whose process died, are lost: the episode is free again. Lost too often, it fails its job."""
    held = session.execute(
        select(Episode.id, Episode.worker, (Episode.lease_until < func.now()).label("late"), Round.job_id)
        .join(Round, Round.id == Episode.round_id)
        .where(Episode.state.in_(IN_FLIGHT), Episode.lease_until.is_not(None), Round.state == RoundState.ROLLING_OUT)
    ).all()
    dead = dead_claimants(session, sorted({h.worker for h in held if h.worker}))
    lost = [h.id for h in held if h.late or h.worker in dead][:BATCH]
    if not lost:
        return 0
    rows = session.execute(
        update(Episode)
        .where(
            Episode.id.in_(lost),
            Episode.lease_until.is_not(None),
            (Episode.lease_until < func.now()) | Episode.worker.in_(dead),
        )
        .values(
            lease_until=None,
            worker=None,
            losses=Episode.losses + 1,
            doorbell_at=func.now() - timedelta(seconds=get_settings().doorbell_seconds),
        )
        .returning(Episode.id, Episode.losses, Episode.round_id)
        .execution_options(synchronize_session=False)
    ).all()
    budget = get_settings().losses_before_alone
    for row in rows:
        if row.losses > budget:
            _fail_for_losses(row.round_id, f"episode {row.id}", row.losses, session)
    return len(rows)


def expire_training_leases(session: Session) -> int:
    """An update whose process died goes back into the buffer at its old place; lost too often, it fails its job."""
    held = session.execute(
        select(Round.id, Round.worker, (Round.lease_until < func.now()).label("late")).where(
            Round.state == RoundState.TRAINING
        )
    ).all()
    dead = dead_claimants(session, sorted({h.worker for h in held if h.worker}))
    lost = [h.id for h in held if h.late or h.worker in dead]
    if not lost:
        return 0
    rows = session.execute(
        update(Round)
        .where(
            Round.id.in_(lost),
            Round.state == RoundState.TRAINING,
            (Round.lease_until < func.now()) | Round.worker.in_(dead),
        )
        .values(
            state=RoundState.READY,
            lease_until=None,
            worker=None,
            losses=Round.losses + 1,
            doorbell_at=func.now() - timedelta(seconds=get_settings().doorbell_seconds),
        )
        .returning(Round.id, Round.losses)
        .execution_options(synchronize_session=False)
    ).all()
    for row in rows:
        if row.losses > get_settings().losses_before_alone:
            _fail_for_losses(row.id, f"the update of round {row.id}", row.losses, session)
    return len(rows)


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
    rows = session.execute(
        update(Episode)
        .where(
            Episode.id.in_(
                select(Episode.id)
                .join(Round, Round.id == Episode.round_id)
                .where(
                    Episode.state.in_(IN_FLIGHT),
                    Episode.lease_until.is_(None),
                    Episode.doorbell_at <= func.now() - timedelta(seconds=get_settings().doorbell_seconds),
                    Round.state == RoundState.ROLLING_OUT,
                )
                .limit(BATCH)
                .with_for_update(of=Episode, skip_locked=True)
                .scalar_subquery()
            )
        )
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
    rows = session.execute(
        update(Round)
        .where(
            Round.state == RoundState.READY,
            Round.doorbell_at <= func.now() - timedelta(seconds=get_settings().doorbell_seconds),
            Job.id == Round.job_id,
            Job.wanted == Wanted.RUN,
        )
        .values(doorbell_at=func.now())
        .returning(Round.id, Job.base_model)
        .execution_options(synchronize_session=False)
    ).all()
    for row in rows:
        doorbells.ring_training(session, row.base_model)
    return len(rows)


def recount_rounds(session: Session) -> int:
    """Re-checks the count of open episodes; a round whose last episode closed without it becomes ready."""
    rows = session.execute(
        text(
            "SELECT r.id, count(e.id) FILTER (WHERE e.state NOT IN ('finished', 'failed')) AS open"
            " FROM rounds r JOIN episodes e ON e.round_id = r.id WHERE r.state = 'rolling_out'"
            " GROUP BY r.id HAVING count(e.id) FILTER (WHERE e.state NOT IN ('finished', 'failed')) <> r.open_episodes"
        )
    ).all()
    mended = 0
    for round_id, round_ in rounds.lock_rounds(session, {r.id for r in rows}).items():
        open_now = session.scalar(
            select(func.count()).where(
                Episode.round_id == round_id, Episode.state.not_in((EpisodeState.FINISHED, EpisodeState.FAILED))
            )
        )
        if round_.state == RoundState.ROLLING_OUT and open_now != round_.open_episodes:
            rounds.count_down(session, round_, round_.open_episodes - (open_now or 0))
            mended += 1
    return mended


def settle_jobs(session: Session) -> int:
    """Jobs whose next state nobody was there to make: pauses that are complete, ends, missing rounds, late starts."""
    jobs.ring_unstarted(session)
    candidates = session.scalars(
        select(Job.id).where(Job.state.in_((JobState.RUNNING, JobState.QUEUED))).order_by(Job.id)
    ).all()
    settled = 0
    for job_id in candidates:
        job = jobs.lock_job(session, job_id)
        if jobs.settle_pause(session, job) or rounds.finish_if_done(session, job):
            settled += 1
        elif job.state == JobState.RUNNING and jobs.has_version(session, job.id):
            rounds.ensure_train_round(session, job)
    return settled
