"""Who is at the console and what they may do. A page without `@role` or `@public` is refused to everybody."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from flask import Blueprint, abort, current_app, g, jsonify, redirect, request, session, url_for
from sqlalchemy.orm import Session
from werkzeug.wrappers import Response

from app.console.security import SESSION_LIFETIME, csrf_token
from app.db import transaction
from app.manager import audit as audit_log
from app.manager import operators
from app.models import Operator
from app.models.operator import OperatorRole

RoleName = Literal["viewer", "operator", "admin"]
View = TypeVar("View", bound=Callable[..., Any])

RANKS = {role.value: rank for rank, role in enumerate(OperatorRole)}


def role(least: RoleName) -> Callable[[View], View]:
    """The page is for operators of this role and above. Goes below `@console.get(...)`."""

    def mark(view: View) -> View:
        view.least_role = least  # type: ignore[attr-defined]
        return view

    return mark


def public(view: View) -> View:
    """The page is for everybody."""
    view.least_role = None  # type: ignore[attr-defined]
    return view


def install(console: Blueprint) -> None:
    console.before_request(_guard)
    console.app_template_global("may")(may)
    console.app_context_processor(lambda: {"operator": g.get("operator")})


def operator() -> Operator:
    """Who makes this request. Only for pages with a role."""
    who: Operator = g.operator
    return who


def may(least: RoleName) -> bool:
    """Whether this operator has at least that role."""
    who: Operator | None = g.get("operator")
    return who is not None and RANKS[who.role] >= RANKS[least]


def begin_session(who: Operator) -> None:
    """Logs in. Nothing of the session before stays, so that nobody can have planted it."""
    session.clear()
    session.permanent = True
    session["operator"] = str(who.id)
    session["epoch"] = who.session_epoch
    session["since"] = int(time.time())
    csrf_token()


def end_session() -> None:
    session.clear()


def audit(
    database: Session,
    action: str,
    target_kind: str | None = None,
    target_id: object = None,
    tenant_id: uuid.UUID | None = None,
    **data: Any,
) -> None:
    """Writes down what this operator does, in the transaction in which it is done. `data` never holds secrets."""
    who = operator()
    audit_log.record(
        database,
        actor=who.name,
        operator_id=who.id,
        address=request.remote_addr,
        action=action,
        target_kind=target_kind,
        target_id=None if target_id is None else str(target_id),
        tenant_id=tenant_id,
        data=data or None,
    )


def _guard() -> Response | None:
    g.operator = None
    if request.endpoint == "console.static":
        return None
    g.operator = _current()
    view: Any = current_app.view_functions[request.endpoint or ""]
    least: RoleName | None = view.least_role
    if least is None:
        return None
    if g.operator is None:
        return _to_login()
    if not may(least):
        abort(403, f"This needs the role {least}; {g.operator.name} is {g.operator.role}. An admin can change that.")
    return None


def _current() -> Operator | None:
    """The session's operator, as long as it lasts: 12 hours, or until a new password or role, or being disabled."""
    if "operator" not in session or time.time() - session["since"] > SESSION_LIFETIME.total_seconds():
        return None
    with transaction() as database:
        return operators.of_session(database, uuid.UUID(session["operator"]), session["epoch"])


def _to_login() -> Response:
    """To the login page and back here afterwards; scripts are told to go there."""
    here = request.full_path.rstrip("?") if request.method == "GET" else None
    if "HX-Request" in request.headers:
        answer = Response(status=401)
        answer.headers["HX-Redirect"] = url_for("console.login")
        return answer
    if request.endpoint is not None and request.path.startswith(url_for("console.overview") + "data/"):
        refused = jsonify(error="log in again")
        refused.status_code = 401
        return refused
    return redirect(url_for("console.login", next=here))
