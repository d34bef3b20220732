"""The sweep: finds work that was admitted or claimed and is not making progress, and rings again (rule 2).

Each part is a short transaction of its own, or several. Losing every message, or any process, loses nothing.
"""

from __future__ import annotations

import uuid

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from app.db import after_commit, transaction
from app.manager import doorbells, jobs, preflight, rounds
from app.models import Episode, Round
from app.models.round import OPEN, EpisodeState, RoundState
from app.settings import get_settings

BATCH = 1000  # rows a part handles at most; the next sweep takes the rest


def sweep() -> dict[str, int]:
    """One pass; returns what it did by name. Parts that found nothing are left out. Two sweeps at once share the work:
    each skips the rows that the other has locked."""
    done: dict[str, int] = {}
    for part in (expire_episode_leases, expire_training_leases, ring_episodes, ring_training, recount_rounds):
        with transaction() as session:
            done[part.__name__] = part(session)
    done["ring_unstarted"] = ring_unstarted()
    done["settle_jobs"] = settle_jobs()
    done["expire_preflights"] = preflight.expire_late()
    return {name: count for name, count in done.items() if count}


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
    rows = session.execute(
        text(
            "WITH late AS ("
            " SELECT e.id FROM episodes e JOIN rounds r ON r.id = e.round_id"
            " WHERE e.state IN ('resetting', 'generating', 'acting') AND e.lease_until IS NULL"
            " AND e.doorbell_at <= now() - make_interval(secs => :bell) AND r.state = 'rolling_out'"
            " ORDER BY e.id LIMIT :batch FOR NO KEY UPDATE OF e SKIP LOCKED)"
            " UPDATE episodes e SET doorbell_at = now()"
            " FROM late WHERE e.id = late.id RETURNING e.id, e.group_id, e.state"
        ),
        {"bell": get_settings().doorbell_seconds, "batch": BATCH},
    ).all()
    doorbells.ring_resets(session, sorted({r.group_id for r in rows if r.state == EpisodeState.RESETTING}))
    doorbells.ring_steps(session, sorted(r.id for r in rows if r.state == EpisodeState.ACTING))
    if generating := [r.id for r in rows if r.state == EpisodeState.GENERATING]:
        doorbells.ring_generations(session, generating)
    return len(rows)


def ring_training(session: Session) -> int:
    """Ready rounds that nobody took."""
    rows = session.execute(
        text(
            "WITH late AS ("
            " SELECT r.id, j.base_model FROM rounds r JOIN jobs j ON j.id = r.job_id"
            " WHERE r.state = 'ready' AND r.doorbell_at <= now() - make_interval(secs => :bell)"
            " AND j.state = 'running' AND j.wanted = 'run'"
            " ORDER BY r.id LIMIT :batch FOR NO KEY UPDATE OF r SKIP LOCKED)"
            " UPDATE rounds r SET doorbell_at = now() FROM late WHERE r.id = late.id RETURNING late.base_model"
        ),
        {"bell": get_settings().doorbell_seconds, "batch": BATCH},
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


# A running job without a live round of its kind is done, or misses one; without a version it is still being started.
_UNSETTLED = """
SELECT j.id FROM jobs j WHERE j.state IN ('running', 'queued') AND j.wanted = 'pause'
UNION
SELECT j.id FROM jobs j WHERE j.state = 'running'
    AND NOT EXISTS (
        SELECT FROM rounds r
        WHERE r.job_id = j.id AND r.kind = j.kind AND r.state IN ('rolling_out', 'ready', 'training')
    )
    AND EXISTS (SELECT FROM policy_versions v WHERE v.job_id = j.id AND v.version = 0)
"""


def settle_jobs() -> int:
    """Jobs whose next state nobody was there to make: pauses that are complete, ends, missing rounds."""
    with transaction() as session:
        candidates = session.scalars(text(_UNSETTLED)).all()
    settled = 0
    for job_id in candidates:
        with transaction() as session:
            settled += settle(session, job_id)
    return settled


def settle(session: Session, job_id: uuid.UUID) -> bool:
    job = jobs.lock_job(session, job_id)
    return jobs.settle_pause(session, job) or rounds.finish_if_done(session, job) or rounds.ensure_round(session, job)
