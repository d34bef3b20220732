"""Celery tasks of the manager queue: admission, sweep, retention, submission. Beat drives them, doorbells hurry."""

from __future__ import annotations

import uuid
from typing import Any

import structlog

from app import broker
from app.broker import celery
from app.db import transaction
from app.errors import MarlaasError
from app.manager import admission, jobs, recovery, retention, tenants

log = structlog.get_logger(__name__)


@celery.task(name=broker.ADMIT)
def admit() -> None:
    with transaction() as session:
        admission.admit(session)


@celery.task(name=broker.SWEEP)
def sweep() -> None:
    if done := recovery.sweep():
        log.info("swept", **done)
    admit()


@celery.task(name=broker.RETAIN)
def retain() -> None:
    if done := retention.retain():
        log.info("retained", **done)


@celery.task(name=broker.SUBMIT)
def submit(tenant: str, spec: dict[str, Any], submit_key: str | None = None) -> None:
    """Creates a job from a message: `celery -A workers call jobs.submit --kwargs '{"tenant": "acme", "spec": {…}}'`.

    A message that comes twice makes one job: without a `submit_key` the task's own id is the key.
    """
    key = submit_key or celery.current_task.request.id or str(uuid.uuid4())
    try:
        with transaction() as session:
            job = jobs.submit(session, tenants.find_tenant(session, tenant), jobs.parse_spec(spec), submit_key=key)
    except MarlaasError as error:
        log.error("submit_refused", tenant=tenant, code=error.code, param=error.param, error=error.message)
        return
    log.info("submitted", tenant=tenant, job=str(job.id), name=job.name)
