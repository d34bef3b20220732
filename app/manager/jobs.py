"""Jobs: submit, start, pause, resume, cancel, fail. Everything here takes the job's row lock before any round's."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Text, cast, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.errors import Conflict, InvalidRequest, NotFound
from app.manager import base_models, doorbells, events, rounds
from app.models import Episode, Job, PolicyVersion, Round, Tenant
from app.models.job import LIVE, TERMINAL, JobState, Wanted
from app.models.round import IN_FLIGHT, RoundKind, RoundState
from app.settings import get_settings
from app.specs.job import JobSpec

# A job that cannot be validated or started after this many doorbells fails by name.
DOORBELL_BUDGET = 20

# A validation or start that was begun is rung for again after this long.
BEGIN_SECONDS = 60


def lock_job(session: Session, job_id: uuid.UUID) -> Job:
    """The job under its row lock. NO KEY UPDATE: inserts that refer to the job do not wait for it."""
    job = session.scalars(
        select(Job).where(Job.id == job_id).with_for_update(key_share=True).execution_options(populate_existing=True)
    ).first()
    if job is None:
        raise NotFound(f"no job {job_id}", param="job")
    return job


def parse_spec(document: Mapping[str, Any]) -> JobSpec:
    """Raises InvalidRequest that names the first wrong field and tells the others."""
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        problems = [(".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors()]
        text = "; ".join(f"{field or 'job'}: {message}" for field, message in problems)
        raise InvalidRequest(text, param=problems[0][0] or None) from error


def submit(session: Session, tenant: Tenant, spec: JobSpec, *, submit_key: str | None = None) -> Job:
    """Creates a job and rings for its validation. The same `submit_key` again finds the first job."""
    if submit_key is not None:
        known = session.scalars(select(Job).where(Job.tenant_id == tenant.id, Job.submit_key == submit_key)).first()
        if known is not None:
            return known
    if tenant.suspended:
        raise Conflict(f"tenant {tenant.name!r} is suspended; an operator can lift that", param="tenant")
    base_models.check_fits(session, spec)
    job = Job(
        tenant_id=tenant.id,
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


def begin(session: Session, job_id: uuid.UUID, state: JobState) -> Job | None:
    """Claims a job's validation or start for a while, so that a doorbell that comes twice does nothing twice at once."""
    claimed = session.scalars(
        update(Job)
        .where(Job.id == job_id, Job.state == state, Job.doorbell_at <= func.now())
        .values(doorbell_at=func.now() + timedelta(seconds=BEGIN_SECONDS))
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


def start_queued(session: Session) -> int:
    """Starts queued jobs, oldest first, while their tenant has running jobs to spare."""
    running = dict(
        session.execute(
            select(Job.tenant_id, func.count()).where(Job.state == JobState.RUNNING).group_by(Job.tenant_id)
        )
        .tuples()
        .all()
    )
    started = 0
    queued = session.execute(
        select(Job.id, Job.tenant_id, Tenant.max_running_jobs)
        .join(Tenant, Tenant.id == Job.tenant_id)
        .where(Job.state == JobState.QUEUED, Job.wanted == Wanted.RUN, Tenant.suspended.is_(False))
        .order_by(Job.created_at, Job.id)
    ).all()
    for job_id, tenant_id, most in queued:
        if running.get(tenant_id, 0) >= most:
            continue
        job = lock_job(session, job_id)
        if job.state != JobState.QUEUED or job.wanted != Wanted.RUN:
            continue
        running[tenant_id] = running.get(tenant_id, 0) + 1
        started += 1
        job.state = JobState.RUNNING
        job.started_at = func.coalesce(Job.started_at, func.clock_timestamp())
        session.flush()
        if has_version(session, job.id):
            rounds.ensure_train_round(session, job)
        else:
            job.doorbell_at = func.now()
            doorbells.ring_start(session, job)
    return started


def finish_done(session: Session) -> int:
    """Ends running jobs whose last version is committed and whose evaluations are over."""
    n_steps = Job.spec["hyperparameters"]["n_steps"].as_integer()
    done = session.scalars(
        select(Job.id).where(Job.state == JobState.RUNNING, Job.version >= n_steps).order_by(Job.id)
    ).all()
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
        rounds.ensure_train_round(session, job)
    events.record(session, job, "job_resumed", f"resumed at version {job.version}")
    ready = session.scalars(
        select(Round.id).where(Round.job_id == job.id, Round.kind == RoundKind.TRAIN, Round.state == RoundState.READY)
    ).first()
    if ready is not None:
        doorbells.ring_training(session, job.base_model)
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


def find_job(session: Session, text: str, tenant: Tenant | None = None) -> Job:
    """A job by its id, by the start of its id (4 characters or more), or by its name if only one live job has it."""
    wanted = text.strip().lower()
    rows: Sequence[Job] = []
    if len(wanted) >= 4:
        rows = session.scalars(_visible(tenant).where(func.starts_with(cast(Job.id, Text), wanted))).all()
    if not rows:
        rows = session.scalars(_visible(tenant).where(Job.name == text)).all()
        rows = [r for r in rows if r.state in LIVE] or rows
    if not rows:
        raise NotFound(f"no job {text!r}; `marlaas job list` shows them", param="job")
    if len(rows) > 1:
        raise InvalidRequest(f"{len(rows)} jobs match {text!r}; give more of the id", param="job")
    return rows[0]


def _visible(tenant: Tenant | None):  # type: ignore[no-untyped-def]
    statement = select(Job)
    return statement if tenant is None else statement.where(Job.tenant_id == tenant.id)


def list_jobs(
    session: Session, tenant: Tenant | None = None, states: Sequence[str] | None = None, limit: int = 100
) -> Sequence[Job]:
    statement = _visible(tenant).order_by(Job.created_at.desc(), Job.id).limit(limit)
    if states:
        statement = statement.where(Job.state.in_(states))
    return session.scalars(statement).all()


def ring_unstarted(session: Session) -> None:
    """Rings again for jobs whose validation or start was asked for and has not come (the sweep's part)."""
    settings = get_settings()
    late = session.scalars(
        select(Job.id).where(
            Job.state.in_((JobState.VALIDATING, JobState.RUNNING)),
            Job.doorbell_at < func.now() - timedelta(seconds=settings.doorbell_seconds),
        )
    ).all()
    for job_id in late:
        job = lock_job(session, job_id)
        if job.state == JobState.RUNNING and has_version(session, job.id):
            session.execute(update(Job).where(Job.id == job.id).values(doorbell_at=None, doorbells=0))
            continue
        if job.state not in (JobState.VALIDATING, JobState.RUNNING):
            continue
        job.doorbells += 1
        job.doorbell_at = func.now()
        if job.doorbells > DOORBELL_BUDGET:
            what, kind = ("validated", "tools") if job.state == JobState.VALIDATING else ("started", "training")
            fail(session, job, "not_started", f"could not be {what}: no {kind} worker answered; is one running?")
            continue
        if job.state == JobState.VALIDATING:
            doorbells.ring_validation(session, job.id)
        else:
            doorbells.ring_start(session, job)
