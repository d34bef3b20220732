"""Error pages. Errors of the service's own types carry a message that says what to do, so it is shown."""

from __future__ import annotations

import json
import uuid

import structlog
from flask import Blueprint, flash, make_response, redirect, render_template, request
from sqlalchemy.exc import OperationalError
from werkzeug.exceptions import HTTPException, InternalServerError, NotFound
from werkzeug.wrappers import Response

from app import errors
from app.console.auth import public

log = structlog.get_logger(__name__)

TITLES = {
    400: "That request does not work",
    403: "Not allowed",
    404: "Nothing here",
    405: "That does not work here",
    413: "Too large",
    500: "Something went wrong",
    503: "A service does not answer",
}
STATUS = {errors.NotFound: 404, errors.InfrastructureFault: 503}
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def install(console: Blueprint) -> None:
    console.register_error_handler(HTTPException, of_http)
    console.register_error_handler(errors.MarlaasError, of_marlaas)
    console.register_error_handler(OperationalError, of_database)
    console.register_error_handler(Exception, of_bug)
    console.add_url_rule("/<path:anything>", "unknown", unknown, methods=METHODS)


@public
def unknown(anything: str) -> Response:
    raise NotFound("There is no page at this address. It may have moved, or the link is wrong.")


def of_http(error: HTTPException) -> Response:
    if error.code is None or error.code < 400:
        return error.get_response()  # a redirect
    return answer(error.code, error.description or "")


def of_marlaas(error: errors.MarlaasError) -> Response:
    """What cannot be done: a page; after a form, the form's page again with the message."""
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 400)
    asked_by_form = request.method == "POST" and request.referrer and "HX-Request" not in request.headers
    if status == 400 and asked_by_form and request.referrer.startswith(request.host_url):
        flash(error.message, "error")
        return redirect(request.referrer, 303)
    return answer(status, error.message)


def of_database(error: OperationalError) -> Response:
    log.warning("database_unreachable", path=request.path, error=str(error.orig))
    return answer(503, "The database does not answer. The page works again once it does; the log has more.")


def of_bug(error: Exception) -> Response:
    """Tells nothing of the inside; the reference finds the log line."""
    reference = uuid.uuid4().hex[:8]
    log.error("console_error", reference=reference, path=request.path, exc_info=error)
    return answer(500, f"The error is in the log of the web process under the reference {reference}.")


def answer(status: int, message: str) -> Response:
    """An error as a page, or as a message over the page to a script that asked."""
    if "HX-Request" in request.headers:
        response = make_response("", status)
        response.headers["HX-Reswap"] = "none"
        if request.method != "GET":  # a fragment that cannot be refreshed just now keeps what it shows
            response.headers["HX-Trigger"] = json.dumps({"marlaas:toast": {"text": message, "kind": "error"}})
        return response
    title = TITLES.get(status, InternalServerError.description if status >= 500 else TITLES[400])
    return make_response(render_template("console/error.html", status=status, title=title, message=message), status)
