"""Logging in and out."""

from __future__ import annotations

from flask import g, make_response, redirect, render_template, request, url_for
from werkzeug.wrappers import Response

from app.console.auth import audit, begin_session, end_session, public, role
from app.console.blueprint import console
from app.db import transaction
from app.manager import operators
from app.manager.operators import LoginRefused, LoginThrottled


@console.get("/login")
@public
def login() -> Response:
    if g.operator is not None:
        return redirect(url_for("console.overview"))
    return _page(200, next_page=request.args.get("next", ""))


@console.post("/login")
@public
def log_in() -> Response:
    name, wanted = request.form.get("name", "").strip(), request.form.get("next", "")
    try:
        who = operators.log_in(name, request.form.get("password", ""), request.remote_addr)
    except LoginRefused as error:
        return _page(401, name=name, next_page=wanted, message=error.message)
    except LoginThrottled as error:
        return _page(429, name=name, next_page=wanted, message=error.message)
    begin_session(who)
    return redirect(wanted if _ours(wanted) else url_for("console.overview"), 303)


@console.post("/logout")
@role("viewer")
def logout() -> Response:
    with transaction() as session:
        audit(session, "logout")
    end_session()
    return redirect(url_for("console.login"), 303)


def _ours(address: str) -> bool:
    """A page of the console: not an address that leads elsewhere."""
    return address.startswith(url_for("console.overview")) and "\\" not in address and address.isprintable()


def _page(status: int, *, next_page: str, name: str = "", message: str | None = None) -> Response:
    return make_response(render_template("console/login.html", next=next_page, name=name, message=message), status)
