"""JSON for the charts and the timeline, and the CSV of curves."""

from __future__ import annotations

import uuid
from functools import lru_cache
from typing import Any

from flask import Response, abort, jsonify, request

from app.console.auth import role
from app.console.blueprint import console
from app.console.cached import Cached
from app.db import transaction
from app.errors import InvalidRequest
from app.manager.series import MOST_JOBS, csv_lines, series
from app.manager.timeline import timeline
from app.models import Job

MINUTES = (1, 2, 5, 10, 15, 30, 60)


def asked_jobs() -> list[uuid.UUID]:
    """The jobs named by `?job=…&job=…`. Raises InvalidRequest where one is no id, or there are too many."""
    try:
        found = list(dict.fromkeys(uuid.UUID(text) for text in request.args.getlist("job")))
    except ValueError as error:
        raise InvalidRequest("job must be a job's id", param="job") from error
    if len(found) > MOST_JOBS:
        raise InvalidRequest(f"at most {MOST_JOBS} jobs at once, not {len(found)}", param="job")
    return found


@console.get("/data/series")
@role("viewer")
def series_data() -> Response:
    """Curves of `job=…`, of the versions after `after`."""
    after = request.args.get("after", 0, type=int)
    with transaction() as session:
        found = series(session, asked_jobs(), min(max(after, 0), 2**31 - 1))
    return jsonify(jobs=[one.document() for one in found])


@console.get("/data/series.csv")
@role("viewer")
def series_csv() -> Response:
    with transaction() as session:
        lines = list(csv_lines(series(session, asked_jobs())))
    headers = {"Content-Disposition": 'attachment; filename="marlaas-series.csv"'}
    return Response(lines, mimetype="text/csv", headers=headers)


@console.get("/data/timeline")
@role("viewer")
def timeline_data() -> Response:
    """The lanes of the last `minutes`: of all jobs, or of `job`, whose time ends with it."""
    minutes = request.args.get("minutes", 10, type=int)
    if minutes not in MINUTES:
        raise InvalidRequest(f"minutes is one of {', '.join(map(str, MINUTES))}", param="minutes")
    jobs = asked_jobs()
    if not jobs:
        return jsonify(_shared(minutes).get())
    with transaction() as session:
        job = session.get(Job, jobs[0])
        if job is None:
            abort(404, "There is no such job.")
        return jsonify(timeline(session, minutes, jobs, until=job.finished_at).document())


@lru_cache(maxsize=len(MINUTES))
def _shared(minutes: int) -> Cached[dict[str, Any]]:
    """One for all open consoles."""

    def compute() -> dict[str, Any]:
        with transaction() as session:
            return timeline(session, minutes).document()

    return Cached(compute, seconds=1.0)
