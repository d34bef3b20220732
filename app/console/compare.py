"""Several jobs' curves on one chart a metric."""

from __future__ import annotations

from collections import Counter

from flask import render_template, request

from app.console.auth import role
from app.console.blueprint import console
from app.console.data import asked_jobs
from app.db import transaction
from app.manager.job_list import JobQuery, in_order, job_page
from app.manager.progress import job_progress
from app.manager.series import METRICS, MOST_JOBS

OFFERED = 30


@console.get("/compare")
@role("viewer")
def compare() -> str:
    """The jobs named by `job`, and others to choose from: the newest, or those that `q` finds."""
    chosen = asked_jobs()
    search = request.args.get("q", "")[:200]
    with transaction() as session:
        page = job_page(session, JobQuery(search=search), OFFERED)
        wanted = [*chosen, *(i for i in page.ids if i not in chosen)]
        rows = in_order(wanted, job_progress(session, wanted))
    names = Counter(row.name for row in rows)
    return render_template(
        "console/compare.html",
        chosen=[row for row in rows if row.job_id in chosen],
        offered=rows,
        chosen_ids=set(chosen),
        repeated={name for name, count in names.items() if count > 1},
        search=search,
        most=MOST_JOBS,
        metrics=METRICS,
    )
