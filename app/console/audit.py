"""The audit log, newest first."""

from __future__ import annotations

from flask import render_template, request, url_for

from app.console import forms
from app.console.auth import role
from app.console.blueprint import console
from app.db import transaction
from app.manager import audit as log
from app.manager import operators

ACTIONS = ("login", "logout", "job", "preflight", "tenant", "key", "worker", "operator")
FILTERS = ("actor", "action", "target", "since", "until")


@console.get("/audit")
@role("viewer")
def audit() -> str:
    wanted = log.Wanted(
        actor=forms.asked("actor"),
        action=forms.asked("action"),
        target=forms.asked("target"),
        since=forms.asked_day("since"),
        until=forms.asked_day("until"),
    )
    before = forms.asked_number("before")
    with transaction() as session:
        page = log.page(session, wanted, before=before)
        actors = [row.name for row in operators.list_operators(session)]
    given = {name: request.args[name] for name in FILTERS if request.args.get(name)}
    return render_template(
        "console/audit.html",
        page=page,
        wanted=wanted,
        filtered=bool(given),
        actors=actors,
        actions=ACTIONS,
        newer=url_for("console.audit", **given) if before is not None else None,  # type: ignore[arg-type]
        older=url_for("console.audit", before=page.older, **given) if page.older else None,  # type: ignore[arg-type]
    )
