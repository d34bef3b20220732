"""`/v1/fine_tuning/preflights`: what a job would meet with and cost, before it is created."""

from __future__ import annotations

import uuid
from typing import Any, Literal

import pydantic
from sqlalchemy.orm import Session

from app.api import idempotency, ids
from app.api.auth import caller, requires, tenant_transaction
from app.api.blueprint import annotate, api
from app.api.documents import JobRequest, in_words_of_request
from app.api.job_objects import JobError, job_error, unix
from app.api.jobs import requested_spec
from app.db import transaction
from app.errors import Conflict, InvalidRequest, NotFound
from app.manager import jobs, preflight
from app.manager.preflight import PreflightReport
from app.manager.progress import job_progress
from app.models import Job, Tenant
from app.models.job import JobState
from app.specs.job import JobSpec, PreflightSpec


class PreflightRequest(JobRequest):
    preflight: PreflightSpec = PreflightSpec()


class PreflightObject(pydantic.BaseModel):
    id: str
    object: Literal["fine_tuning.preflight"]
    created_at: int = pydantic.Field(description="Unix seconds, as are all times")
    finished_at: int | None
    status: JobState
    phase: str = pydantic.Field(description="what the preflight does, or waits for")
    episodes_done: int = pydantic.Field(description="while it runs")
    episodes_total: int
    model: str
    suffix: str
    seed: int
    preflight: PreflightSpec
    error: JobError | None
    report: PreflightReport | None = pydantic.Field(description="once the preflight has succeeded")


@api.post("/fine_tuning/preflights")
@requires("write")
@api.input(PreflightRequest, arg_name="body")
@api.output(PreflightObject)
@api.doc(responses={429: "Too many requests, or the tenant has as many live preflights as it may."})
@idempotency.idempotent
def create_preflight(session: Session, body: PreflightRequest) -> idempotency.Answer:
    """Try a job out

    The body is that of a job. A few of its prompts are sampled with the base model and graded; the report says whether
    the job would learn, and what it would take.
    """
    try:
        spec = requested_spec(session, body)
        tenant = session.get_one(Tenant, caller().tenant_id)
        job = preflight.submit(session, tenant, spec, body.preflight.prompts, body.preflight.samples)
    except InvalidRequest as error:
        raise in_words_of_request(error, with_grader=body.method.reinforcement.grader is not None) from error
    return _document(session, job), 200


@api.get("/fine_tuning/preflights/<preflight_id>")
@requires("read")
@api.output(PreflightObject)
def retrieve_preflight(preflight_id: str) -> dict[str, Any]:
    """Retrieve a preflight and its report"""
    with tenant_transaction() as session:
        return _document(session, _find(session, preflight_id))


@api.post("/fine_tuning/preflights/<preflight_id>/cancel")
@requires("write")
@api.output(PreflightObject)
@api.doc(responses={409: "The preflight is over already."})
def cancel_preflight(preflight_id: str) -> idempotency.Answer:
    """Cancel a preflight"""
    with tenant_transaction() as session:
        job_id = _find(session, preflight_id).id
    mark = idempotency.mark()
    with transaction() as session:  # it ends rounds and episodes, which the tenants' own role may not
        if known := idempotency.stored_answer(session, mark):
            return known
        answer = _document(session, _cancel(session, job_id, preflight_id))
        idempotency.store_answer(session, mark, answer, 200)
    return answer, 200


annotate(cancel_preflight, idempotent=True)


def _cancel(session: Session, job_id: uuid.UUID, shown: str) -> Job:
    try:
        return jobs.cancel(session, job_id)
    except Conflict as error:
        message = f"The preflight is over already. GET /v1/fine_tuning/preflights/{shown} tells how it ended."
        raise Conflict(message, param="preflight_id") from error


def _find(session: Session, text: str) -> Job:
    """The caller's preflight of this id. Raises NotFound."""
    try:
        return preflight.find(session, caller().tenant_id, ids.parse_preflight(text))
    except NotFound as error:
        raise ids.not_found("preflight", text, "preflight_id") from error


def _document(session: Session, job: Job) -> dict[str, Any]:
    session.flush()
    session.refresh(job)
    (progress,) = job_progress(session, [job.id], caller().tenant_id)
    spec = JobSpec.model_validate(job.spec)
    error = job_error(job, spec)
    return PreflightObject(
        id=ids.preflight_id(job.id),
        object="fine_tuning.preflight",
        created_at=unix(job.created_at),
        finished_at=unix(job.finished_at) if job.finished_at else None,
        status=JobState(job.state),
        phase=progress.phase,
        episodes_done=progress.episodes_done,
        episodes_total=progress.episodes_total,
        model=job.base_model,
        suffix=spec.name,
        seed=spec.seed,
        preflight=spec.preflight,
        error=error,
        report=preflight.report(session, job),
    ).model_dump(mode="json")
