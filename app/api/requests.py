"""What every request of the web process goes through: strict JSON, a request id, bound in its log lines."""

from __future__ import annotations

import time
import uuid
from typing import Any, NoReturn

import flask
import structlog
from flask import Flask, Response, g, request
from flask.json.provider import DefaultJSONProvider
from werkzeug.exceptions import BadRequest, UnsupportedMediaType

from app.api import limits
from app.api.blueprint import PREFIX
from app.specs import plain_json

log = structlog.get_logger(__name__)

JSON_BYTES = 1 << 20  # of a body, unless the view allows more
FORM_FIELD_BYTES = 256 << 10  # well above the 64 KiB in which werkzeug reads, and holds back what may be a boundary
REQUEST_ID = "x-request-id"


class StrictJSON(DefaultJSONProvider):
    sort_keys = False

    def loads(self, s: str | bytes, **kwargs: Any) -> Any:
        return plain_json.parse(s)


class Request(flask.Request):
    def get_json(self, force: bool = False, silent: bool = False, cache: bool = True) -> Any:
        """Never forced: a body that does not say that it is JSON is none."""
        return super().get_json(silent=silent, cache=cache)

    def on_json_loading_failed(self, e: ValueError | None) -> NoReturn:
        if e is None:
            raise UnsupportedMediaType
        raise BadRequest(f"The body {e}.")


def install(app: Flask) -> None:
    app.request_class = Request
    app.json = StrictJSON(app)
    app.config.update(MAX_CONTENT_LENGTH=JSON_BYTES, MAX_FORM_MEMORY_SIZE=FORM_FIELD_BYTES)
    app.before_request(_begin)
    app.after_request(_end)


def _begin() -> None:
    g.request_id = f"req-{uuid.uuid4().hex}"
    g.began = time.perf_counter()
    structlog.contextvars.clear_contextvars()  # threads are used again
    structlog.contextvars.bind_contextvars(request=g.request_id)


def _end(response: Response) -> Response:
    response.headers[REQUEST_ID] = g.request_id
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    if not request.path.startswith(f"{PREFIX}/"):
        return response
    if g.get("replayed"):
        response.headers["Idempotent-Replayed"] = "true"
    log.info(
        "api_request",
        method=request.method,
        route=request.url_rule.rule if request.url_rule else None,
        status=response.status_code,
        seconds=round(time.perf_counter() - g.began, 4),
    )
    return limits.show(response)
