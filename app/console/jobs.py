"""The list of jobs: filter, search, sort, page through, follow live, steer several at once."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from flask import flash, redirect, render_template, request, url_for
from sqlalchemy.orm import Session
from werkzeug.wrappers import Response

from app.console.auth import audit, role
from app.console.blueprint import console
from app.db import transaction
from app.errors import InvalidRequest, MarlaasError
from app.manager import base_models, tenants
from app.manager import jobs as lifecycle
from app.manager.job_list import JobQuery, in_order, job_page, state_counts
from app.manager.progress import JobProgress, job_progress
from app.models import Job
from app.models.job import LIVE, JobState, Wanted

ACTIONS: dict[str, tuple[Callable[[Session, uuid.UUID], Job], str]] = {
    "cancel": (lifecycle.cancel, "cancelled"),
    "pause": (lifecycle.pause, "pausing"),
    "resume": (lifecycle.resume, "resumed"),
}
MOST_AT_ONCE = 100
MOST_SEARCH = 200

# The tabs over the list: what they are called and the states that they show.
TABS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("All", ()),
    ("Live", LIVE),
    ("Running", (JobState.RUNNING,)),
    ("Queued", (JobState.VALIDATING, JobState.QUEUED)),
    ("Paused", (JobState.PAUSED,)),
    ("Succeeded", (JobState.SUCCEEDED,)),
    ("Failed", (JobState.FAILED,)),
    ("Cancelled", (JobState.CANCELLED,)),
)


@console.get("/jobs", endpoint="jobs")
@role("viewer")
def list_jobs() -> str:
    with transaction() as session:
        return render_template(
            "console/jobs.html",
            **_list(session),
            tenants=tenants.list_tenants(session),
            base_models=base_models.list_base_models(session),
        )


@console.get("/fragments/jobs")
@role("viewer")
def jobs_fragment() -> str:
    with transaction() as session:
        return render_template("console/_jobs.html", **_list(session))


@console.post("/jobs/steer")
@role("operator")
def steer_jobs() -> Response:
    """Each of the chosen jobs by itself: one that cannot be steered does not keep the others from it."""
    action = asked_action(request.form.get("action", ""))
    done, refused = 0, []
    for job_id in _chosen():
        try:
            with transaction() as session:
                steer(session, job_id, action)
            done += 1
        except MarlaasError as error:
            refused.append(error.message)
    if done:
        flash(f"{done} {'job' if done == 1 else 'jobs'} {ACTIONS[action][1]}", "success")
    for message in refused[:3]:
        flash(message, "error")
    if not done and not refused:
        flash("No job was chosen: tick the boxes at the left of the list.", "error")
    return redirect(link(), 303)


def steer(session: Session, job_id: uuid.UUID, action: str) -> Job:
    job = ACTIONS[action][0](session, job_id)
    audit(session, f"job.{action}", "job", job.id, job.tenant_id, name=job.name, version=job.version)
    return job


def asked_action(action: str) -> str:
    if action not in ACTIONS:
        raise InvalidRequest(f"action is one of {', '.join(ACTIONS)}", param="action")
    return action


def _chosen() -> list[uuid.UUID]:
    try:
        found = sorted({uuid.UUID(text) for text in request.form.getlist("job")})
    except ValueError as error:
        raise InvalidRequest("job must be a job's id", param="job") from error
    if len(found) > MOST_AT_ONCE:
        raise InvalidRequest(f"at most {MOST_AT_ONCE} jobs at once", param="job")
    return found


def _list(session: Session) -> dict[str, Any]:
    query = _query()
    page = job_page(session, query)
    progress = in_order(page.ids, job_progress(session, page.ids))
    counts = state_counts(session, query)
    tabs = [
        (label, states, sum(counts.get(s, 0) for s in states or JobState), set(states) == set(query.states))
        for label, states in TABS
    ]
    return {
        "query": query,
        "tabs": tabs,
        "progress": progress,
        "created": {p.job_id: session.get_one(Job, p.job_id).created_at for p in progress},  # read already
        "next_cursor": page.next_cursor,
        "link": link,
        "phase_of": phase_of,
        "filtered": bool(query.states or query.tenant or query.base_model or query.search),
    }


def _query() -> JobQuery:
    """What the address asks for. Raises InvalidRequest where that makes no sense."""
    given = request.args
    try:
        tenant = uuid.UUID(given["tenant"]) if given.get("tenant") else None
        states = tuple(JobState(state).value for state in given.getlist("state") if state)
    except ValueError as error:
        raise InvalidRequest(f"this filter does not work: {error}") from error
    sort = given.get("sort", "created")
    usual = "desc" if sort in ("created", "version") else "asc"
    return JobQuery(
        states=states,
        tenant=tenant,
        base_model=given.get("base_model", "").replace("\0", ""),
        search=given.get("q", "")[:MOST_SEARCH],
        sort=sort,
        descending=given.get("order", usual) == "desc",
        cursor=given.get("cursor", ""),
    )


FILTERS = ("state", "tenant", "base_model", "q", "sort", "order")


def link(endpoint: str = "console.jobs", **changes: Any) -> str:
    """The address of this list with some of its filters changed (None: without). It begins at the first page, unless
    a cursor is among the changes."""
    now: dict[str, Any] = {name: request.args.getlist(name) for name in FILTERS}
    pairs = {name: value for name, value in (now | changes).items() if value not in (None, "", [], [""], ())}
    return url_for(endpoint) + (f"?{urlencode(pairs, doseq=True)}" if pairs else "")


def phase_of(p: JobProgress) -> str:
    """The phase, or what the user wants of it meanwhile."""
    return "pausing" if p.wanted == Wanted.PAUSE and p.state == JobState.RUNNING else p.phase
