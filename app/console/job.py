"""The pages of one job: how it does, its curves, its checkpoints, its events, its document."""

from __future__ import annotations

import uuid
from typing import Any

import yaml
from flask import flash, redirect, render_template, request, url_for
from sqlalchemy.orm import Session
from werkzeug.exceptions import NotFound
from werkzeug.wrappers import Response

from app.console.auth import audit, role
from app.console.blueprint import console
from app.console.jobs import ACTIONS, asked_action, phase_of, steer
from app.db import transaction
from app.manager import adapters, downloads, events
from app.manager.adapters import AdapterVersion
from app.manager.health import health
from app.manager.progress import job_progress
from app.manager.series import METRICS
from app.models import Job, PolicyVersion, StoredObject, Tenant
from app.models.job import LIVE, JobKind, JobState, Wanted
from app.models.object import ObjectState
from app.specs.job import JobSpec

LATEST_EVENTS = 200
CHECKPOINTS = 50
TIMELINE_MINUTES = (1, 2, 5, 10, 30, 60)


@console.get("/jobs/<uuid:job_id>")
@role("viewer")
def job(job_id: uuid.UUID) -> str:
    with transaction() as session:
        found = find(session, job_id)
        status = _status(session, found)
        shown = 5 if status["live"] else _minutes_of(status["progress"].elapsed_seconds)
        return render_template("console/job.html", metrics=METRICS, minutes=TIMELINE_MINUTES, shown=shown, **status)


@console.get("/fragments/jobs/<uuid:job_id>")
@role("viewer")
def job_fragment(job_id: uuid.UUID) -> str:
    with transaction() as session:
        return render_template("console/_job_status.html", **_status(session, find(session, job_id)))


@console.get("/jobs/<uuid:job_id>/events")
@role("viewer")
def job_events(job_id: uuid.UUID) -> str:
    return _events_page("console/job_events.html", job_id)


@console.get("/fragments/jobs/<uuid:job_id>/events")
@role("viewer")
def job_events_fragment(job_id: uuid.UUID) -> str:
    return _events_page("console/_job_events.html", job_id)


@console.get("/jobs/<uuid:job_id>/checkpoints")
@role("viewer")
def job_checkpoints(job_id: uuid.UUID) -> str:
    """The versions, newest first, from below `before`."""
    before = request.args.get("before", type=int)
    with transaction() as session:
        found = find(session, job_id)
        versions, more = adapters.checkpoints(session, found, CHECKPOINTS, before)
        if not more and (before is None or before > 0):
            versions += _fresh(session, found)
        shown = versions[:CHECKPOINTS]
        return render_template(
            "console/job_checkpoints.html",
            versions=shown,
            older=shown[-1].version if more or len(versions) > len(shown) else None,
            newest=before is None or before > found.version,
            **head(session, found),
        )


@console.get("/jobs/<uuid:job_id>/checkpoints/<int:version>/adapter")
@role("operator")
def job_adapter(job_id: uuid.UUID, version: int) -> Response:
    """To a short-lived address of the version's zip in storage. It is made if there is none yet."""
    with transaction() as session:
        found = find(session, job_id)
    made = downloads.download(transaction, found.id, version)
    with transaction() as session:
        audit(session, "adapter.download", "job", found.id, found.tenant_id, name=found.name, version=version)
    return redirect(made.archive.url)


@console.get("/jobs/<uuid:job_id>/document")
@role("viewer")
def job_document(job_id: uuid.UUID) -> str:
    with transaction() as session:
        found = find(session, job_id)
        document = JobSpec.model_validate(found.spec).model_dump(mode="json")  # in the order of its definition
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
        return render_template("console/job_document.html", document=text, **head(session, found))


@console.post("/jobs/<uuid:job_id>/<action>")
@role("operator")
def steer_job(job_id: uuid.UUID, action: str) -> Response:
    with transaction() as session:
        find(session, job_id)
        found = steer(session, job_id, asked_action(action))
    flash(f"{found.name} is {ACTIONS[action][1]}", "success")
    return redirect(url_for("console.job", job_id=job_id), 303)


def find(session: Session, job_id: uuid.UUID) -> Job:
    found = session.get(Job, job_id)
    if found is None or found.kind != JobKind.TRAIN:
        raise NotFound("There is no such job. It may be of another installation, or the address is cut short.")
    return found


def head(session: Session, found: Job) -> dict[str, Any]:
    """What the top of each of a job's pages shows."""
    return {"job": found, "tenant": session.get_one(Tenant, found.tenant_id), "live": found.state in LIVE}


def _fresh(session: Session, found: Job) -> list[AdapterVersion]:
    """Version 0, which no step made, once it is there."""
    row = session.get(PolicyVersion, (found.id, 0))
    if row is None:
        return []
    stored = session.get_one(StoredObject, row.adapter_object_id)
    available = stored.state == ObjectState.LIVE
    return [AdapterVersion(0, row.created_at, stored.size, available, row.signal, None, row.weights_digest)]


def _status(session: Session, found: Job) -> dict[str, Any]:
    (progress,) = job_progress(session, [found.id])
    return {
        "progress": progress,
        "health": health(session, found, progress),
        "phase": phase_of(progress),
        "can": {
            "cancel": found.state in LIVE,
            "pause": found.state in LIVE and found.wanted == Wanted.RUN and found.state != JobState.PAUSED,
            "resume": found.state in LIVE and found.wanted == Wanted.PAUSE,
        },
        "spec": JobSpec.model_validate(found.spec),
        **head(session, found),
    }


def _minutes_of(seconds: float) -> int:
    """The shortest timeline that has room for so long."""
    return next((m for m in TIMELINE_MINUTES if m * 60 >= seconds), TIMELINE_MINUTES[-1])


def _events_page(template: str, job_id: uuid.UUID) -> str:
    with transaction() as session:
        found = find(session, job_id)
        latest = events.latest(session, found, LATEST_EVENTS)[::-1]
        return render_template(template, events=latest, most=LATEST_EVENTS, **head(session, found))
