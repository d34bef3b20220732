"""Jobs: submit, start, pause, resume, cancel, fail. Everything here takes the job's row lock before any round's."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Select, Text, case, cast, exists, func, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from app.manager import base_models, doorbells, environments, events, rounds
from app.models import Episode, Job, PolicyVersion, Round, Tenant
from app.models.job import LIVE, TERMINAL, JobKind, JobState, Wanted
from app.models.round import IN_FLIGHT, RoundKind, RoundState
from app.settings import get_settings
from app.specs.job import JobSpec
from app.specs.problems import problems, summary

# A job that cannot be validated or started after this many doorbells fails by name.
DOORBELL_BUDGET = 20


def lock_job(session: Session, job_id: uuid.UUID) -> Job:
    """The job under its row lock. NO KEY UPDATE: inserts that refer to the job do not wait for it."""
    job = session.scalars(
        select(Job).where(Job.id == job_id).with_for_update(key_share=True).execution_options(populate_existing=True)
    ).first()
    if job is None:
        raise NotFound(f"no job {job_id}", param="job")
    return job


def lock_wanted(session: Session, job_ids: Collection[uuid.UUID]) -> set[uuid.UUID]:
    """Those among the jobs that run and are to run, under their row locks, taken in order of id."""
    if not job_ids:
        return set()
    return set(
        session.scalars(
            select(Job.id)
            .where(Job.id.in_(job_ids), Job.state == JobState.RUNNING, Job.wanted == Wanted.RUN)
            .order_by(Job.id)
            .with_for_update(key_share=True)
        )
    )


def parse_spec(document: Mapping[str, Any]) -> JobSpec:
    """Raises InvalidRequest that names the first wrong field and tells the others."""
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        found = problems(error, JobSpec)
        raise InvalidRequest(summary(found), param=found[0][0] or None) from error


def submit(
    session: Session,
    tenant: Tenant,
    spec: JobSpec,
    *,
    submit_key: str | None = None,
    kind: JobKind = JobKind.TRAIN,
) -> Job:
    """Creates a job and rings for its validation. The same `submit_key` again finds the first job."""
    if submit_key is not None:
        known = session.scalars(select(Job).where(Job.tenant_id == tenant.id, Job.submit_key == submit_key)).first()
        if known is not None:
            return known
    if tenant.suspended:
        raise Conflict(f"tenant {tenant.name!r} is suspended; an operator can lift that", param="tenant")
    base_models.check_fits(session, spec)
    environment = environments.checked(session, tenant.id, spec.environment)
    spec = spec.model_copy(update={"environment": environment})
    if kind == JobKind.TRAIN:
        _check_quota(session, tenant)
    job = Job(
        tenant_id=tenant.id,
        kind=kind,
        name=spec.name,
        base_model=spec.base_model,
        spec=spec.model_dump(mode="json"),
        weight=spec.weight,
        submit_key=submit_key,
        doorbell_at=func.now(),
    )
    try:
        with session.begin_nested():
            session.add(job)
    except IntegrityError:  # the same key at the same time
        return session.scalars(select(Job).where(Job.tenant_id == tenant.id, Job.submit_key == submit_key)).one()
    events.record(session, job, "job_created", "created; its files and prompts are checked next")
    doorbells.ring_validation(session, job.id)
    return job


def _check_quota(session: Session, tenant: Tenant) -> None:
    """Under a lock of the tenant's submissions, so that two at once do not both take the last place."""
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"jobs:{tenant.id}", 0))))
    live = select(func.count()).where(Job.tenant_id == tenant.id, Job.state.in_(LIVE), Job.kind == JobKind.TRAIN)
    count = session.scalars(live).one()
    if count >= tenant.max_live_jobs:
        raise QuotaExceeded(
            f"{count} jobs are queued, running or paused, and the tenant may have {tenant.max_live_jobs}; wait until"
            " one ends, or cancel one"
        )


def begin(session: Session, job_id: uuid.UUID, state: JobState) -> Job | None:
    """Claims a job's validation or start for a while: a doorbell that comes twice does nothing twice at once."""
    claimed = session.scalars(
        update(Job)
        .where(Job.id == job_id, Job.state == state, Job.doorbell_at <= func.now())
        .values(doorbell_at=func.now() + timedelta(seconds=get_settings().lease_seconds))
        .returning(Job.id)
        .execution_options(synchronize_session=False)
    ).first()
    return session.get(Job, claimed, populate_existing=True) if claimed else None


def validated(session: Session, job_id: uuid.UUID) -> None:
    """The job's files, environment and prompts are good: it may start as the tenant's quota allows."""
    job = lock_job(session, job_id)
    if job.state == JobState.VALIDATING:
        job.state = JobState.PAUSED if job.wanted == Wanted.PAUSE else JobState.QUEUED
        job.doorbells = 0
        events.record(session, job, "job_validated", "files and prompts are good")
        doorbells.ring_admission(session)


# Preflights take no place of a running job: how many of them a tenant may have is settled when they are made.
_STARTABLE = """
SELECT id FROM (
    SELECT j.id, j.kind, j.created_at, t.max_running_jobs - (
        SELECT count(*) FROM jobs r WHERE r.tenant_id = t.id AND r.state = 'running' AND r.kind = 'train'
    ) AS room, row_number() OVER (PARTITION BY t.id, j.kind ORDER BY j.created_at, j.id) AS place
    FROM jobs j JOIN tenants t ON t.id = j.tenant_id
    WHERE j.state = 'queued' AND j.wanted = 'run' AND NOT t.suspended
) queued WHERE kind = 'preflight' OR place <= room ORDER BY created_at, id
"""


def start_queued(session: Session) -> int:
    """Starts queued jobs, oldest first, while their tenant has running jobs to spare. Admission alone calls it."""
    started = 0
    for job_id in session.scalars(text(_STARTABLE)).all():
        job = lock_job(session, job_id)
        if job.state != JobState.QUEUED or job.wanted != Wanted.RUN:
            continue
        started += 1
        job.state = JobState.RUNNING
        job.started_at = func.coalesce(Job.started_at, func.clock_timestamp())
        session.flush()
        if has_version(session, job.id):
            _go_on(session, job)
        else:
            job.doorbell_at = func.now()
            doorbells.ring_start(session, job)
    return started


def _go_on(session: Session, job: Job) -> None:
    """Goes on where the job stood: opens its next round, or rings for the one whose trajectories are complete."""
    rounds.ensure_round(session, job)
    if session.scalars(live_train_round(job.id).where(Round.state == RoundState.READY)).first() is not None:
        doorbells.ring_training(session, job.base_model)


def live_train_round(job_id: uuid.UUID) -> Select[int]:
    return rounds.live_rounds(job_id).where(Round.kind == RoundKind.TRAIN)


def finish_done(session: Session) -> int:
    """Ends running jobs that have committed all that they are for, and whose evaluations are over."""
    n_steps = Job.spec["hyperparameters"]["n_steps"].as_integer()
    sampled = exists().where(
        Round.job_id == Job.id, Round.kind == RoundKind.PREFLIGHT, Round.state == RoundState.COMMITTED
    )
    complete = case((Job.kind == JobKind.TRAIN, Job.version >= n_steps), else_=sampled)
    done = session.scalars(select(Job.id).where(Job.state == JobState.RUNNING, complete).order_by(Job.id)).all()
    return sum(rounds.finish_if_done(session, lock_job(session, job_id)) for job_id in done)


def has_version(session: Session, job_id: uuid.UUID) -> bool:
    return session.get(PolicyVersion, (job_id, 0)) is not None


def cancel(session: Session, job_id: uuid.UUID) -> Job:
    """Ends the job now: its rounds are abandoned, so that claims, leases and the commit of its work find it gone."""
    job = lock_job(session, job_id)
    if job.state in TERMINAL:
        raise Conflict(f"job {job.id} is {job.state} already", param="job")
    job.wanted = Wanted.CANCEL
    _end(session, job, JobState.CANCELLED)
    events.record(session, job, "job_cancelled", f"cancelled at version {job.version}", level="warn")
    return job


def pause(session: Session, job_id: uuid.UUID) -> Job:
    """Lets what has started finish (an update still commits) and opens nothing more."""
    job = lock_job(session, job_id)
    if job.state in TERMINAL:
        raise Conflict(f"job {job.id} is {job.state}; only a live job can be paused", param="job")
    if job.kind == JobKind.PREFLIGHT:
        raise Conflict("a preflight cannot be paused; cancel it", param="job")
    if job.wanted != Wanted.PAUSE:
        job.wanted = Wanted.PAUSE
        events.record(session, job, "pause_wanted", "pausing: running episodes and a started update still finish")
        settle_pause(session, job)
    return job


def settle_pause(session: Session, job: Job) -> bool:
    """A job that is to pause is `paused` once nothing of it runs. The caller holds the job's row lock."""
    if job.wanted != Wanted.PAUSE or job.state not in (JobState.RUNNING, JobState.QUEUED):
        return False
    if job.state == JobState.RUNNING and work_in_flight(session, job.id):
        return False
    job.state = JobState.PAUSED
    events.record(session, job, "job_paused", f"paused at version {job.version}; resume goes on from there")
    doorbells.ring_admission(session)
    return True


def work_in_flight(session: Session, job_id: uuid.UUID) -> bool:
    """Whether any episode of the job is between admission and its end, or an update is under way."""
    training = select(Round.id).where(Round.job_id == job_id, Round.state == RoundState.TRAINING)
    episodes = (
        select(Episode.id)
        .join(Round, Round.id == Episode.round_id)
        .where(Round.job_id == job_id, Round.state == RoundState.ROLLING_OUT, Episode.state.in_(IN_FLIGHT))
    )
    return any(session.scalars(q.limit(1)).first() is not None for q in (training, episodes))


def resume(session: Session, job_id: uuid.UUID) -> Job:
    """Goes on with the version, buffer and optimizer state that the job had."""
    job = lock_job(session, job_id)
    if job.wanted != Wanted.PAUSE:
        raise Conflict(f"job {job.id} is {job.state}, not paused", param="job")
    job.wanted = Wanted.RUN
    if job.state == JobState.PAUSED:
        job.state = JobState.QUEUED  # the tenant's quota may be taken by now
    elif has_version(session, job.id):
        _go_on(session, job)
    events.record(session, job, "job_resumed", f"resumed at version {job.version}")
    doorbells.ring_admission(session)
    return job


def fail(session: Session, job: Job, code: str, message: str) -> None:
    """Ends the job with a typed error. The caller holds the job's row lock."""
    if job.state in TERMINAL:
        return
    job.error_code = code
    job.error_message = message[:2000]
    _end(session, job, JobState.FAILED)
    events.record(session, job, code, message, level="error")


def fail_by_id(session: Session, job_id: uuid.UUID, code: str, message: str) -> None:
    fail(session, lock_job(session, job_id), code, message)


def _end(session: Session, job: Job, state: JobState) -> None:
    job.state = state
    job.finished_at = func.clock_timestamp()
    session.flush()
    rounds.abandon_rounds(session, job)
    doorbells.ring_admission(session)  # its slots and its place are free


def warn(session: Session, job_id: uuid.UUID, code: str, message: str) -> None:
    events.record(session, session.get_one(Job, job_id), code, message, level="warn")


def find_job(session: Session, name: str, tenant: Tenant | None = None) -> Job:
    """A job by its id, by the start of its id (4 characters or more), or by its name if only one live job has it.
    Preflights are not among them."""
    wanted = name.strip().lower()
    rows: Sequence[Job] = []
    if len(wanted) >= 4:
        rows = session.scalars(_visible(tenant).where(func.starts_with(cast(Job.id, Text), wanted))).all()
    if not rows:
        rows = session.scalars(_visible(tenant).where(Job.name == name)).all()
        rows = [r for r in rows if r.state in LIVE] or rows
    if not rows:
        short = "" if len(wanted) >= 4 else "; the start of an id needs at least 4 characters"
        raise NotFound(f"no job {name!r}{short}; `marlaas job list` shows them", param="job")
    if len(rows) > 1:
        raise InvalidRequest(f"{len(rows)} jobs match {name!r}; give more of the id", param="job")
    return rows[0]


def _visible(tenant: Tenant | None):  # type: ignore[no-untyped-def]
    statement = select(Job).where(Job.kind == JobKind.TRAIN)
    return statement if tenant is None else statement.where(Job.tenant_id == tenant.id)


def list_jobs(
    session: Session, tenant: Tenant | None = None, states: Sequence[str] | None = None, limit: int = 100
) -> Sequence[Job]:
    statement = _visible(tenant).order_by(Job.created_at.desc(), Job.id).limit(limit)
    if states:
        statement = statement.where(Job.state.in_(states))
    return session.scalars(statement).all()


def unstarted(session: Session) -> Sequence[uuid.UUID]:
    """Jobs whose validation or start was rung for a while ago and has not come."""
    return session.scalars(
        select(Job.id).where(
            Job.state.in_((JobState.VALIDATING, JobState.RUNNING)),
            Job.doorbell_at < func.now() - timedelta(seconds=get_settings().doorbell_seconds),
        )
    ).all()


def ring_unstarted(session: Session, job_id: uuid.UUID) -> None:
    """Rings again for one of them, within a budget."""
    job = lock_job(session, job_id)
    validating = job.state == JobState.VALIDATING
    if not validating and (job.state != JobState.RUNNING or has_version(session, job.id)):
        job.doorbell_at = None
        job.doorbells = 0
        return
    job.doorbells += 1
    job.doorbell_at = func.now()
    if job.doorbells > DOORBELL_BUDGET:
        what, kind = ("validated", "tools") if validating else ("started", "training")
        fail(session, job, "not_started", f"could not be {what}: no {kind} worker answered; is one running?")
    elif validating:
        doorbells.ring_validation(session, job.id)
    else:
        doorbells.ring_start(session, job)
