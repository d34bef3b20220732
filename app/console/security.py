"""Sessions, forged requests, and headers that tell the browser what a page may do."""

from __future__ import annotations

import hmac
import secrets
from datetime import timedelta

import structlog
from flask import Blueprint, Flask, abort, request, session
from werkzeug.wrappers import Response

from app.settings import get_settings

log = structlog.get_logger(__name__)

SESSION_LIFETIME = timedelta(hours=12)
CSRF_FIELD, CSRF_HEADER = "csrf_token", "X-CSRF-Token"
SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
YEAR_SECONDS = 365 * 86400

CONTENT_POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data:",  # Pico draws its small icons so
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


def configure(app: Flask) -> None:
    """Signed session cookies: for this site and these pages alone, out of reach of scripts."""
    settings = get_settings()
    if settings.secret_key is None:
        log.warning("no_secret_key", hint="MARLAAS_SECRET_KEY is not set: logins end with this process")
        app.secret_key = secrets.token_hex(32)
    else:
        app.secret_key = settings.secret_key.get_secret_value()
    app.config.update(
        SESSION_COOKIE_NAME="marlaas_console",
        SESSION_COOKIE_PATH="/console",
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Lax",
        SESSION_COOKIE_SECURE=_https(),
        SESSION_REFRESH_EACH_REQUEST=False,
        PERMANENT_SESSION_LIFETIME=SESSION_LIFETIME,
    )


def install(console: Blueprint) -> None:
    console.before_request(_refuse_forged)
    console.before_request(_refuse_nul)
    console.after_request(_add_headers)
    console.app_template_global("csrf_token")(csrf_token)


def csrf_token() -> str:
    """The token that every request which changes something must bring; it lives as long as the session."""
    if "csrf" not in session:
        session["csrf"] = secrets.token_urlsafe(32)
    token: str = session["csrf"]
    return token


def _refuse_nul() -> None:
    """No text with a NUL can be stored or found. Forms with files are for their views to read, within their limits."""
    given = list(request.args.items(multi=True))
    if request.mimetype != "multipart/form-data":
        given += request.form.items(multi=True)
    if any("\0" in name or "\0" in value for name, value in given):
        abort(400, "A field holds a NUL character. Take it out and try again.")


def _refuse_forged() -> None:
    if request.method in SAFE_METHODS:
        return
    given = request.headers.get(CSRF_HEADER) or request.form.get(CSRF_FIELD, "")
    if not hmac.compare_digest(given.encode(), csrf_token().encode()):
        abort(403, "This form is out of date or comes from elsewhere. Go back, reload the page and try again.")


def _add_headers(response: Response) -> Response:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    if _https():
        response.headers["Strict-Transport-Security"] = f"max-age={YEAR_SECONDS}"
    if request.endpoint != "console.static":
        response.headers["Cache-Control"] = "no-store"
    elif "v" in request.args and response.status_code == 200:
        response.headers["Cache-Control"] = f"public, max-age={YEAR_SECONDS}, immutable"
    return response


def _https() -> bool:
    return (get_settings().public_url or "").startswith("https:")
