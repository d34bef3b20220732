"""Serving of committed adapters: whose they are, who serves them, what it cost."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app.errors import EngineUnavailable, NotFound
from app.manager.adapters import AdapterExpired
from app.manager.objects import version_objects
from app.manager.usage import NO_JOB
from app.manager.workers import live_workers
from app.models import BaseModel, Job, PolicyVersion, UsageEntry
from app.models.job import JobKind
from app.models.object import ObjectState
from app.models.worker import WorkerKind

NO_ROUND = 0


@dataclass(frozen=True)
class ServedPolicy:
    """A committed version that its own tenant asks for."""

    job_id: uuid.UUID
    policy_version: int
    weights_digest: str


def find_served_job(
    session: Session, tenant_id: uuid.UUID, job_id: uuid.UUID, version: int | None, model: str
) -> tuple[Job, int]:
    """A job of this tenant and which of its versions to serve, by default the latest one. `model`: as it was asked for.

    Raises NotFound (no such job or version, or none yet) and AdapterExpired.
    """
    job = session.scalars(
        select(Job).where(Job.id == job_id, Job.tenant_id == tenant_id, Job.kind == JobKind.TRAIN)
    ).first()
    if job is None:
        raise model_not_found(model)
    wanted = job.version if version is None else version
    found = version_objects(session, job.id, wanted)
    if found is None:
        raise NotFound(
            f"Job {job.name} has no version {wanted} to serve; it is {job.state}. Its checkpoints are listed under"
            f" /v1/fine_tuning/jobs/ftjob-{job.id.hex}/checkpoints.",
            param="model",
            code="model_not_found",
        )
    if found.adapter.state != ObjectState.LIVE or found.config.state != ObjectState.LIVE:
        raise AdapterExpired(f"Version {wanted} of job {job.name} was removed by retention.", param="model")
    return job, wanted


def model_not_found(model: str) -> NotFound:
    shown = model if len(model) <= 200 else model[:197] + "…"
    return NotFound(
        f"There is no model {shown!r} for this key. /v1/models lists those that there are.",
        param="model",
        code="model_not_found",
    )


def served_policy(
    session: Session, tenant_id: uuid.UUID, base_model: str, job_id: uuid.UUID, version: int
) -> ServedPolicy:
    """The version, if it is this tenant's and stands on this base model. Raises NotFound."""
    digest = session.scalars(
        select(PolicyVersion.weights_digest)
        .join(Job, Job.id == PolicyVersion.job_id)
        .where(
            PolicyVersion.job_id == job_id,
            PolicyVersion.version == version,
            Job.tenant_id == tenant_id,
            Job.base_model == base_model,
        )
    ).first()
    if digest is None:
        raise model_not_found(f"job {job_id.hex}, version {version}")
    return ServedPolicy(job_id, version, digest)


def chat_queue(session: Session, base_model: str) -> str:
    """The queue of the workers that serve this base model. Raises EngineUnavailable where none is alive and takes
    requests, NotFound where there is no such base model."""
    model = session.get(BaseModel, base_model)
    if model is None:
        raise model_not_found(base_model)
    serving = (
        worker
        for worker in live_workers(session, WorkerKind.ROLLOUT)
        if worker.base_model == base_model and worker.slots and not worker.draining and worker.load.get("chat_slots")
    )
    if next(serving, None) is None:
        raise EngineUnavailable(f"No engine serves {base_model} right now. Try again in a moment.")
    return f"{WorkerKind.ROLLOUT}{model.queue_suffix}"


def record_usage(
    session: Session,
    tenant_id: uuid.UUID,
    job_id: uuid.UUID | None,
    request: int,
    *,
    prompt_tokens: int,
    generated_tokens: int,
    seconds: float,
) -> None:
    """One row a request, however often it is recorded. `request`: a positive 63-bit number that nobody else has."""
    session.execute(
        insert(UsageEntry)
        .values(
            tenant_id=tenant_id,
            job_id=job_id or NO_JOB,
            round_id=NO_ROUND,
            episode_id=request,
            turn=0,
            attempt=0,
            prompt_tokens=prompt_tokens,
            generated_tokens=generated_tokens,
            busy_seconds=seconds,
        )
        .on_conflict_do_nothing()
    )
