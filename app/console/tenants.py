"""Tenants: quotas and what is taken of them, keys, usage, suspension."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from flask import flash, make_response, redirect, render_template, request, url_for
from sqlalchemy.orm import Session
from werkzeug.wrappers import Response

from app.console import forms
from app.console.auth import audit, role
from app.console.blueprint import console
from app.db import transaction
from app.errors import MarlaasError
from app.manager import tenant_report
from app.manager import tenants as manager
from app.manager import usage as ledger
from app.models import ApiKey, Tenant

USAGE_DAYS = 30
GIB = 1 << 30


@dataclass(frozen=True)
class Quota:
    """A field of the form: column, label, help."""

    column: str
    label: str
    help: str


QUOTAS = (
    Quota("max_running_jobs", "Running jobs", "at once; further ones queue"),
    Quota("max_live_jobs", "Live jobs", "queued, running and paused"),
    Quota("max_inflight_episodes", "Episodes in flight", "over all of its jobs"),
    Quota("max_chat_requests", "Completions", "at once"),
    Quota("requests_per_minute", "Requests a minute", "of one key"),
)


@console.get("/tenants")
@role("viewer")
def tenants() -> str:
    search = forms.asked("q") or ""
    with transaction() as session:
        loads = tenant_report.list_loads(session, search)
        total = tenant_report.count(session)
    return render_template("console/tenants.html", loads=loads, search=search, total=total)


@console.get("/tenants/new")
@role("admin")
def new_tenant() -> str:
    return render_template("console/new_tenant.html", given=_defaults(), quotas=QUOTAS)


@console.post("/tenants")
@role("admin")
def create_tenant() -> Response:
    name = request.form.get("name", "").strip()
    try:
        changes = _changes()
        with transaction() as session:
            tenant = manager.create_tenant(session, name, **changes)
            session.flush()
            audit(session, "tenant.create", "tenant", tenant.id, tenant.id, name=name, **changes)
    except MarlaasError as error:
        page = render_template(
            "console/new_tenant.html", given=request.form, quotas=QUOTAS, message=error.message, param=error.param
        )
        return make_response(page, 400)
    flash(f"Tenant {name} is there. Next: a key for it.", "success")
    return redirect(url_for("console.tenant", tenant_id=tenant.id), 303)


@console.get("/tenants/<uuid:tenant_id>")
@role("viewer")
def tenant(tenant_id: uuid.UUID) -> str:
    with transaction() as session:
        return _page(session, tenant_id)


@console.post("/tenants/<uuid:tenant_id>")
@role("admin")
def change_tenant(tenant_id: uuid.UUID) -> Response:
    changes = _changes()
    with transaction() as session:
        tenant = _tenant(session, tenant_id)
        new = {field: value for field, value in changes.items() if value != getattr(tenant, field)}
        manager.change_tenant(session, tenant, **new)
        if new:
            audit(session, "tenant.quotas", "tenant", tenant_id, tenant_id, **new)
    flash("Saved; it holds from now on." if new else "Nothing was different.", "success")
    return redirect(url_for("console.tenant", tenant_id=tenant_id), 303)


@console.post("/tenants/<uuid:tenant_id>/suspend")
@role("operator")
def suspend_tenant(tenant_id: uuid.UUID) -> Response:
    suspended = request.form.get("suspended") == "yes"
    with transaction() as session:
        tenant = _tenant(session, tenant_id)
        manager.change_tenant(session, tenant, suspended=suspended)
        audit(session, "tenant.suspend" if suspended else "tenant.resume", "tenant", tenant_id, tenant_id)
    flash(f"{tenant.name} is suspended." if suspended else f"{tenant.name} goes on.", "success")
    return redirect(url_for("console.tenant", tenant_id=tenant_id), 303)


@console.post("/tenants/<uuid:tenant_id>/keys")
@role("admin")
def create_key(tenant_id: uuid.UUID) -> str:
    """Answers with the secret, in this response and never again: no redirect, nothing in the session."""
    name = request.form.get("name", "").strip()
    days = forms.decimal("days", "The days until it expires") if request.form.get("days") else None
    expires_at = None if days is None else datetime.now(UTC) + timedelta(days=min(max(days, 0.0), 36500.0))
    with transaction() as session:
        tenant = _tenant(session, tenant_id)
        key, secret = manager.create_key(session, tenant, name, request.form.getlist("scope"), expires_at)
        audit(session, "key.create", "key", key.id, tenant_id, name=name, prefix=key.prefix, scopes=key.scopes)
    with transaction() as session:
        if "HX-Request" in request.headers:
            return render_template("console/_keys.html", secret=secret, **_keys(session, tenant_id))
        return _page(session, tenant_id, secret=secret)


@console.post("/tenants/<uuid:tenant_id>/keys/<uuid:key_id>/revoke")
@role("admin")
def revoke_key(tenant_id: uuid.UUID, key_id: uuid.UUID) -> Response:
    with transaction() as session:
        manager.revoke_key(session, _tenant(session, tenant_id), key_id)
        audit(session, "key.revoke", "key", key_id, tenant_id)
    flash("The key is revoked: requests with it are refused from now on.", "success")
    return redirect(url_for("console.tenant", tenant_id=tenant_id), 303)


def _tenant(session: Session, tenant_id: uuid.UUID) -> Tenant:
    return tenant_report.load(session, tenant_id).tenant


def _changes() -> dict[str, Any]:
    """Weight and quotas of the form."""
    fields: dict[str, Any] = {"weight": forms.decimal("weight", "The weight")}
    for quota in QUOTAS:
        fields[quota.column] = forms.integer(quota.column, quota.label)
    fields["max_file_bytes"] = round(forms.decimal("max_file_gib", "The room for files") * GIB)
    return fields


def _defaults() -> dict[str, Any]:
    """The form's values for a new tenant."""
    defaults: dict[str, Any] = {name: Tenant.__table__.c[name].default.arg for name in ("weight", *manager.QUOTAS)}
    return defaults | {"name": "", "weight": 1, "max_file_gib": defaults["max_file_bytes"] // GIB}


def _page(session: Session, tenant_id: uuid.UUID, secret: str | None = None) -> str:
    load = tenant_report.load(session, tenant_id)
    today = datetime.now(UTC).date()
    first = today - timedelta(days=USAGE_DAYS - 1)
    used = ledger.usage(session, tenant_id, first, today, group_by=ledger.GroupBy.DAY)
    return render_template(
        "console/tenant.html",
        load=load,
        files=tenant_report.files(session, tenant_id),
        quotas=QUOTAS,
        chart=Chart.of(used, first),
        secret=secret,
        **_keys(session, tenant_id),
    )


def _keys(session: Session, tenant_id: uuid.UUID) -> dict[str, Any]:
    tenant = _tenant(session, tenant_id)
    return {
        "tenant": tenant,
        "keys": [(key, _key_state(key)) for key in manager.list_keys(session, tenant)[::-1]],
        "scopes": manager.SCOPES,
    }


def _key_state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "active" if key.expires_at is None or key.expires_at > datetime.now(UTC) else "expired"


@dataclass(frozen=True)
class Bar:
    """A day of the usage chart, in a box of 100 by 100 whose y goes downwards."""

    day: date
    generated: int
    trained: int
    x: float
    width: float
    generated_height: float
    trained_height: float


@dataclass(frozen=True)
class Chart:
    bars: list[Bar]
    generated: int
    trained: int
    busy_seconds: float

    @classmethod
    def of(cls, used: list[ledger.Usage], first: date) -> Chart:
        by_day = {row.day: row for row in used}
        days = [first + timedelta(days=n) for n in range(USAGE_DAYS)]
        most = max((max(row.generated_tokens, row.trained_tokens) for row in used), default=0) or 1
        step = 100 / USAGE_DAYS
        bars = []
        for number, day in enumerate(days):
            row = by_day.get(day)
            generated, trained = (row.generated_tokens, row.trained_tokens) if row else (0, 0)
            bars.append(Bar(day, generated, trained, number * step, step, 96 * generated / most, 96 * trained / most))
        return cls(
            bars,
            sum(row.generated_tokens for row in used),
            sum(row.trained_tokens for row in used),
            sum(row.busy_seconds for row in used),
        )
