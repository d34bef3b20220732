"""Every error of the API in OpenAI's envelope, with a status that clients retry rightly."""

from __future__ import annotations

import math
from typing import Any

import pydantic
import structlog
from flask import Response, jsonify, request
from psycopg.errors import LockNotAvailable
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge
from werkzeug.routing import RequestRedirect

from app.errors import (
    Conflict,
    EngineUnavailable,
    Forbidden,
    InfrastructureFault,
    InvalidRequest,
    MarlaasError,
    NotFound,
    QuotaExceeded,
    RateLimited,
    Unauthorized,
)

log = structlog.get_logger(__name__)

DRAINED_BYTES = 128 << 20
MOST_WORDS = 2000  # characters of a message: it may quote what was sent


class IdempotencyMismatch(InvalidRequest):
    """An Idempotency-Key that was used for another request before."""

    code = "idempotency_key_reused"


STATUSES: list[tuple[type[MarlaasError], int]] = [
    (IdempotencyMismatch, 422),
    (InvalidRequest, 400),
    (Unauthorized, 401),
    (Forbidden, 403),
    (NotFound, 404),
    (Conflict, 409),
    (QuotaExceeded, 429),
    (RateLimited, 429),
    (EngineUnavailable, 503),
    (InfrastructureFault, 503),
]
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES = {
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
}
MESSAGES = {
    404: "There is no {method} {path}. /v1/openapi.json lists what there is.",
    405: "{path} cannot be asked with {method}. The Allow header lists the methods that it knows.",
    415: "Send the body as application/json, with that Content-Type.",
}


class ErrorDetail(pydantic.BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(pydantic.BaseModel):
    """What every error looks like."""

    error: ErrorDetail


def status_of(error: MarlaasError) -> int:
    return next((status for kind, status in STATUSES if isinstance(error, kind)), 500)


def body(message: str, status: int, code: str | None, param: str | None = None) -> dict[str, Any]:
    """The envelope alone, as an event of a stream has it too."""
    message = message if len(message) <= MOST_WORDS else f"{message[:MOST_WORDS]}…"
    type_ = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def envelope(message: str, status: int, code: str | None, param: str | None = None) -> Response:
    response = jsonify(body(message, status, code, param))
    response.status_code = status
    return response


def on_marlaas_error(error: MarlaasError) -> Response:
    status = status_of(error)
    if status >= 500:
        log.warning("api_fault", code=error.code, error=error.message)
    message = error.message
    if isinstance(error, InfrastructureFault):  # its words name hosts and keys of ours
        message = f"The service could not do this now ({error.code}). Try again in a moment."
    elif status == 500:
        message = "Something went wrong on our side."
    response = envelope(message, status, error.code, error.param if status < 500 else None)
    if isinstance(error, RateLimited):
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, InfrastructureFault):
        response.headers["Retry-After"] = "1"
    elif status in (409, 429):
        response.headers["x-should-retry"] = "false"  # OpenAI's client would try again and wait for nothing
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def on_http_error(error: HTTPException) -> Response | HTTPException:
    """Errors of Flask and Werkzeug: no such route or method, a body that is too large or not JSON, a crash."""
    if isinstance(error, RequestRedirect) or error.code is None:
        return error
    if isinstance(error, RequestEntityTooLarge):
        _drain()
        message = f"The body is larger than the limit of {request.max_content_length} bytes."
    elif error.code >= 500:
        message = "Something went wrong on our side. The x-request-id header names this request in our logs."
    else:
        usual = MESSAGES.get(error.code)
        message = usual.format(method=request.method, path=request.path) if usual else error.description or error.name
    code = CODES.get(error.code, "internal_error" if error.code >= 500 else InvalidRequest.code)
    response = envelope(message, error.code, code)
    for name, value in error.get_headers():
        if name.lower() in ("allow", "retry-after"):
            response.headers[name] = value
    return response


def on_database_error(error: OperationalError | PoolTimeout) -> Response:
    """A lock that somebody holds for long, or a database that cannot be reached."""
    if isinstance(error, OperationalError) and isinstance(error.orig, LockNotAvailable):
        return envelope("Another request for the same thing is under way. Try again in a moment.", 409, Conflict.code)
    return on_marlaas_error(InfrastructureFault(f"database: {error}"))


def _drain() -> None:
    """Reads a body of which nothing was read, within a bound: else the client sees a reset instead of the answer."""
    size = request.content_length or 0
    if size <= (request.max_content_length or 0):
        return
    stream, left = request.environ["wsgi.input"], min(size, DRAINED_BYTES)
    while left > 0 and (chunk := stream.read(min(left, 1 << 16))):
        left -= len(chunk)
