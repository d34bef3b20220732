"""The first page: everything at a glance, live."""

from __future__ import annotations

from flask import render_template

from app.console.auth import role
from app.console.blueprint import console
from app.console.cached import Cached
from app.db import transaction
from app.manager import overview as figures
from app.manager.overview import Overview

# Phases as the bar and the legend show them: (label, phases of `progress`, colour).
LANES = (
    ("Rollout", ("rollout", "evaluating"), "rollout"),
    ("Environment", ("environment",), "environment"),
    ("Training", ("training",), "training"),
    ("Waiting", ("waiting", "buffered", "starting"), "waiting"),
    ("Queued", ("queued", "validating"), "queued"),
    ("Paused", ("paused",), "paused"),
)


def _compute() -> Overview:
    with transaction() as session:
        names = figures.queue_names(session)
    messages = figures.count_messages(names)
    with transaction() as session:
        return figures.overview(session, messages)


shared = Cached(_compute, seconds=1.0)


@console.get("/")
@role("viewer")
def overview() -> str:
    return render_template("console/overview.html", **_context())


@console.get("/fragments/overview/figures")
@role("viewer")
def overview_figures() -> str:
    return render_template("console/_overview.html", **_context())


@console.get("/fragments/overview/queues")
@role("viewer")
def overview_queues() -> str:
    return render_template("console/_overview_queues.html", **_context())


def _context() -> dict[str, object]:
    now = shared.get()
    lanes, start = [], 0.0
    for label, phases, colour in LANES:
        jobs = sum(now.phases.get(phase, 0) for phase in phases)
        width = 100 * jobs / max(now.live_jobs, 1)
        lanes.append({"label": label, "jobs": jobs, "colour": colour, "x": start, "width": width})
        start += width
    return {"now": now, "lanes": lanes}
