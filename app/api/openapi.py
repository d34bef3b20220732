"""The OpenAPI 3.1 document at `/v1/openapi.json`: what APIFlask finds out, and what our decorators add to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from apiflask import APIFlask

from app.api.blueprint import PREFIX
from app.api.errors import ErrorEnvelope
from app.api.idempotency import HEADER, MAX_KEY
from app.settings import get_settings

PATH = f"{PREFIX}/openapi.json"
SECURITY = "api_key"
REFERENCE = "#/components/schemas/{model}"

WORDS = {
    400: "Malformed; the message names the field and the fix.",
    401: "No API key, or one that is unknown, revoked or expired.",
    403: "The key lacks the scope, or the tenant is suspended.",
    404: "There is no such thing, or it is another tenant's.",
    409: "Not possible in this state, or an equal request is under way.",
    413: "The body is too large.",
    415: "The body is of another media type.",
    422: "The Idempotency-Key was used for another request.",
    429: "Too many requests, or a quota is used up.",
    503: "Something that the service needs does not answer; try again.",
}
IDEMPOTENCY_KEY = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "description": "Makes a repeated request answer as the first one did, and do nothing.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY},
}


def configure(app: APIFlask) -> None:
    app.config.update(
        OPENAPI_VERSION="3.1.0",
        SECURITY_SCHEMES={SECURITY: {"type": "http", "scheme": "bearer", "description": "A key `mk-…` of a tenant."}},
        AUTO_200_RESPONSE=False,
        AUTO_404_RESPONSE=False,
        AUTO_AUTH_ERROR_RESPONSE=False,
        AUTO_VALIDATION_ERROR_RESPONSE=False,
        AUTO_SERVERS=False,
    )
    app.servers = [{"url": get_settings().public_url or "/"}]
    app.description = (
        "Reinforcement learning of LoRA adapters as a service, in the shape of OpenAI's API: its clients work with"
        f" `base_url` set to `…{PREFIX}`."
    )
    app.spec_processor(_finish(app))  # type: ignore[arg-type]


def release() -> str:
    return version("marlaas")


def _finish(app: APIFlask) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def finish(document: dict[str, Any]) -> dict[str, Any]:
        schema = ErrorEnvelope.model_json_schema(ref_template=REFERENCE)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas |= schema.pop("$defs") | {ErrorEnvelope.__name__: schema}
        for rule in app.url_map.iter_rules():
            path = re.sub(r"<([^<:>]+:)?", "{", rule.rule).replace(">", "}")
            view = app.view_functions[rule.endpoint]
            marks = getattr(view, "_spec", None)
            for method, operation in document["paths"].get(path, {}).items():
                if marks is not None and method.upper() in (rule.methods or ()):
                    operation["operationId"] = rule.endpoint.rpartition(".")[2]
                    operation["tags"] = [view.__module__.rpartition(".")[2]]
                    _complete(operation, marks)
        document.pop("tags", None)
        schemas.pop("HTTPError", None)  # APIFlask's own envelope
        return document

    return finish


def _complete(operation: dict[str, Any], marks: dict[str, Any]) -> None:
    """Adds to an operation what follows from its decorators: security, the key of a POST, and every error."""
    statuses = set()
    if scope := marks.get("scope"):
        operation["security"] = [{SECURITY: [scope]}]
        statuses |= {401, 403, 429, 503}
    if marks.get("idempotent"):
        operation["parameters"] = [*operation.get("parameters", []), IDEMPOTENCY_KEY]
        statuses |= {400, 409, 413, 422}
    if any(p["in"] == "path" for p in operation.get("parameters", [])):
        statuses.add(404)
    if any(p["in"] == "query" for p in operation.get("parameters", [])):
        statuses |= {400, 404} if any(p["name"] == "after" for p in operation["parameters"]) else {400}
    if "requestBody" in operation:
        statuses |= {400, 413, 415}
    responses = operation["responses"]
    for status in statuses:
        responses.setdefault(str(status), {"description": WORDS[status]})
    for status, response in responses.items():
        if int(status) >= 400:
            response.setdefault("description", WORDS.get(int(status), ""))
            response["content"] = {
                "application/json": {"schema": {"$ref": REFERENCE.format(model=ErrorEnvelope.__name__)}}
            }
    operation["responses"] = dict(sorted(responses.items()))
