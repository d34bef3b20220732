"""Workers: what each can do, does, and holds; draining one before it is taken away."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from flask import flash, redirect, render_template, request, url_for
from sqlalchemy import select
from sqlalchemy.orm import Session
from werkzeug.wrappers import Response

from app.console.auth import audit, role
from app.console.blueprint import console
from app.console.cached import Cached
from app.db import transaction
from app.manager import workers as manager
from app.models import Job, Worker
from app.settings import get_settings


@dataclass(frozen=True)
class Resident:
    """An adapter in an engine's memory."""

    job_id: uuid.UUID | None  # None: an adapter that is served
    job: str
    version: str


@dataclass(frozen=True)
class Line:
    worker: Worker
    alive: bool
    resident: list[Resident]

    @property
    def state(self) -> str:
        if not self.alive:
            return "silent" if self.worker.slots or self.worker.kind == "manager" else "stopped"
        return "draining" if self.worker.draining else "alive"

    @property
    def running(self) -> int | None:
        load = self.worker.load
        if "calls" in load:
            return int(load["calls"])
        if "round" in load:
            return int(load["round"] is not None)
        return load.get("running")


@console.get("/workers")
@role("viewer")
def workers() -> str:
    return render_template("console/workers.html", lines=shared.get())


@console.get("/fragments/workers")
@role("viewer")
def workers_fragment() -> str:
    return render_template("console/_workers.html", lines=shared.get())


@console.post("/workers/drain")
@role("operator")
def drain_worker() -> Response:
    name, draining = request.form.get("name", ""), request.form.get("draining") == "yes"
    with transaction() as session:
        manager.set_draining(session, name, draining)
        audit(session, "worker.drain" if draining else "worker.undrain", "worker", name)
    shared.forget()
    if draining:
        flash(f"{name} finishes what it holds and is given no more.", "success")
    else:
        flash(f"{name} takes work again.", "success")
    return redirect(url_for("console.workers"), 303)


def _compute() -> list[Line]:
    with transaction() as session:
        rows = manager.list_workers(session)
        names = _job_names(session, rows)
    since = datetime.now(UTC) - timedelta(seconds=get_settings().worker_dead_seconds)
    lines = [Line(row, row.seen_at > since, _resident(row, names)) for row in rows]
    return sorted(lines, key=lambda line: (not line.alive, line.worker.kind, line.worker.name))


shared = Cached(_compute, seconds=1.0)


def _resident(worker: Worker, names: dict[uuid.UUID, str]) -> list[Resident]:
    found = []
    for key in sorted(worker.load.get("resident", ())):
        job_id, version = _policy(key)
        found.append(Resident(job_id, names.get(job_id, str(job_id)[:8]) if job_id else key, version))
    return found


def _job_names(session: Session, rows: list[Worker]) -> dict[uuid.UUID, str]:
    ids = {_policy(key)[0] for row in rows for key in row.load.get("resident", ())} - {None}
    return {row.id: row.name for row in session.execute(select(Job.id, Job.name).where(Job.id.in_(ids)))}


def _policy(key: str) -> tuple[uuid.UUID | None, str]:
    """Job and version of an engine's key, `<job>:<version>`; other keys are names of their own."""
    job, _, version = key.partition(":")
    try:
        return uuid.UUID(job), version
    except ValueError:
        return None, ""
