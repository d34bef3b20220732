"""`/v1/fine_tuning/jobs`: create, look, steer."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import Any

from flask import request
from sqlalchemy import Select, select
from sqlalchemy.exc import NoResultFound
from sqlalchemy.orm import Session

from app.api import idempotency, ids
from app.api.auth import caller, requires, tenant_transaction
from app.api.blueprint import annotate, api
from app.api.documents import DataFile, JobRequest, in_words_of_request, job_document
from app.api.job_objects import EventList, JobList, JobObject, event_object, job_objects
from app.api.pages import PageQuery, page, select_page
from app.db import transaction
from app.errors import Conflict, InvalidRequest, NotFound
from app.manager import events, jobs
from app.manager.files import of_tenant
from app.models import File, Job, Tenant
from app.models.job import JobKind, JobState
from app.specs.job import JobSpec

MAX_METADATA = 512


class JobQuery(PageQuery):
    status: JobState | None = None


@api.post("/fine_tuning/jobs")
@requires("write")
@api.input(JobRequest, arg_name="body")
@api.output(JobObject)
@api.doc(responses={429: "Too many requests, or the tenant has as many live jobs as it may."})
@idempotency.idempotent
def create_job(session: Session, body: JobRequest) -> idempotency.Answer:
    """Create a fine-tuning job

    With `grader` and `training_file` as OpenAI has it, or with `environment`. What a hyperparameter does not say has
    a default that works.
    """
    try:
        spec = requested_spec(session, body)
        job = jobs.submit(session, session.get_one(Tenant, caller().tenant_id), spec)
    except InvalidRequest as error:
        raise in_words_of_request(error, with_grader=body.method.reinforcement.grader is not None) from error
    return _document(session, job), 200


def requested_spec(session: Session, body: JobRequest) -> JobSpec:
    """The specification that a request describes, its bounds checked. Raises InvalidRequest in the words of either."""
    training = _data_file(session, body.training_file, "training_file")
    validation = _data_file(session, body.validation_file, "validation_file")
    return jobs.parse_spec(job_document(body, training, validation))


def _data_file(session: Session, text: str | None, param: str) -> DataFile | None:
    if not text:
        return None
    try:
        found = session.execute(of_tenant(caller().tenant_id).where(File.id == ids.parse_file(text))).one()
    except (NotFound, NoResultFound) as error:
        message = f"{param}: there is no file {text!r}; upload one with POST /v1/files"
        raise InvalidRequest(message, param=param) from error
    return DataFile(found.File.id, found.File.lines)


@api.get("/fine_tuning/jobs")
@requires("read")
@api.input(JobQuery, location="query", arg_name="query")
@api.output(JobList)
def list_jobs(query: JobQuery) -> dict[str, Any]:
    """List fine-tuning jobs

    Newest first. `metadata[key]=value`, once or more often, shows those that have it.
    """
    after = ids.parse_job(query.after, "after") if query.after is not None else None
    statement = of_caller()
    if metadata := _metadata_filter():
        statement = statement.where(Job.spec["metadata"].contains(metadata))
    if query.status is not None:
        statement = statement.where(Job.state == query.status)
    with tenant_transaction() as session:
        rows, more = select_page(session, statement, Job.created_at, Job.id, after, query.limit)
        data = job_objects(session, [job for (job,) in rows], caller().tenant_name, brief=True)
    return page(data, more)


def _metadata_filter() -> dict[str, str]:
    wanted = {}
    for name, value in request.args.items():
        if not (match := re.fullmatch(r"metadata\[(.*)\]", name, re.DOTALL)):
            continue
        if "\0" in name + value or len(name + value) > MAX_METADATA + 64:
            raise InvalidRequest(
                f"metadata is of keys and values of at most {MAX_METADATA} characters", param="metadata"
            )
        wanted[match[1]] = value
    return wanted


@api.get("/fine_tuning/jobs/<fine_tuning_job_id>")
@requires("read")
@api.output(JobObject)
def retrieve_job(fine_tuning_job_id: str) -> dict[str, Any]:
    """Retrieve a fine-tuning job"""
    with tenant_transaction() as session:
        return _document(session, find_job(session, fine_tuning_job_id))


@api.get("/fine_tuning/jobs/<fine_tuning_job_id>/events")
@requires("read")
@api.input(PageQuery, location="query", arg_name="query")
@api.output(EventList)
def list_events(fine_tuning_job_id: str, query: PageQuery) -> dict[str, Any]:
    """List a job's events, newest first"""
    before = ids.parse_event(query.after) if query.after is not None else None
    with tenant_transaction() as session:
        job = find_job(session, fine_tuning_job_id)
        rows, more = events.page(session, job, query.limit, before)
        spec = JobSpec.model_validate(job.spec)
    return page([event_object(event, spec) for event in rows], more)


def _steer(
    name: str, act: Callable[[Session, uuid.UUID], Job], conflict: str, words: str, possible: str
) -> Callable[[str], idempotency.Answer]:
    """The route that does `act`. It writes rounds and episodes, which the tenants' own role may not: only after that
    role has seen the job does the service do it, and stores the answer with it. `possible`: what a conflict adds."""

    @api.post(f"/fine_tuning/jobs/<fine_tuning_job_id>/{name}", endpoint=f"{name}_job")
    @requires("write")
    @api.output(JobObject)
    @api.doc(responses={409: conflict}, summary=words)
    def view(fine_tuning_job_id: str) -> idempotency.Answer:
        with tenant_transaction() as session:
            job_id = find_job(session, fine_tuning_job_id).id
        mark = idempotency.mark(b"")
        with transaction() as session:
            if known := idempotency.stored_answer(session, mark):
                return known
            try:
                job = act(session, job_id)
            except Conflict as error:
                message = error.message.replace(str(job_id), fine_tuning_job_id)
                if possible not in message:
                    message = f"{message}; {possible}"
                raise Conflict(message, param="fine_tuning_job_id", code=error.code) from error
            answer = _document(session, job)
            idempotency.store_answer(session, mark, answer, 200)
        return answer, 200

    annotate(view, idempotent=True)
    return view


cancel_job = _steer(
    "cancel",
    jobs.cancel,
    "The job is over already.",
    "Cancel a job; what it has committed stays",
    "only a live job can be cancelled",
)
pause_job = _steer(
    "pause",
    jobs.pause,
    "The job is over.",
    "Pause a job; what has started still finishes",
    "only a live job can be paused",
)
resume_job = _steer(
    "resume",
    jobs.resume,
    "The job is not paused.",
    "Go on with a paused job where it stopped",
    "only a paused job can be resumed",
)


def of_caller() -> Select[Any]:
    return select(Job).where(Job.tenant_id == caller().tenant_id, Job.kind == JobKind.TRAIN)


def find_job(session: Session, text: str, param: str = "fine_tuning_job_id") -> Job:
    """The caller's job of this id. Raises NotFound."""
    job: Job | None = session.scalars(of_caller().where(Job.id == ids.parse_job(text, param))).first()
    if job is None:
        raise ids.not_found("fine-tuning job", text, param)
    return job


def _document(session: Session, job: Job) -> dict[str, Any]:
    session.flush()
    (document,) = job_objects(session, [job], caller().tenant_name)
    return document
