"""`/v1/chat/completions` and `/v1/completions`: served by the rollout workers with the tenant's own adapters.

A request holds one place of its tenant's, goes over the rollout queue, and ends when its client goes away.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import structlog
from flask import Response, request

from app import broker
from app.api import ids
from app.api.auth import caller, requires, tenant_transaction
from app.api.blueprint import api
from app.api.completion_bodies import ChatBody, TextBody
from app.api.completion_documents import Answer, ChatCompletion, ChatShape, TextCompletion, TextShape
from app.api.errors import body as error_body
from app.api.errors import status_of
from app.calls import END, Call, Message
from app.db import transaction
from app.errors import Conflict, EngineUnavailable, InfrastructureFault, InvalidRequest, MarlaasError, NotFound
from app.manager.serving import chat_queue, find_served_job, model_not_found
from app.models import BaseModel, Tenant
from app.places import Place, hold_place
from app.settings import get_settings
from app.specs.completion import ChoiceDelta, CompletionCall

log = structlog.get_logger(__name__)

Shape = ChatShape | TextShape

LOOK_SECONDS = 3.0  # how often a request that nobody has begun looks whether there is still a worker for it
CLIENT_CLOSED_REQUEST = 499  # as nginx logs it; nobody reads the answer

ERRORS: dict[str, type[MarlaasError]] = {
    "invalid_request": InvalidRequest,
    "not_found": NotFound,
    "conflict": Conflict,
    "unavailable": EngineUnavailable,
    "infrastructure": InfrastructureFault,
}
RESPONSES: dict[int, Any] = {
    200: {
        "description": "The completion; with `stream: true` server-sent events of chunks, ended by `data: [DONE]`.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    404: "No such model.",
    409: "The adapter cannot be served.",
    503: "No engine serves the model now.",
}


@api.post("/chat/completions")
@requires("write")
@api.input(ChatBody, arg_name="body")
@api.output(ChatCompletion)
@api.doc(responses=RESPONSES)
def create_chat_completion(body: ChatBody) -> Any:
    """Create a chat completion

    With a base model or an adapter of the tenant: `ft:…` is the job's latest version, `ft:…:ckpt-step-N` version N.
    """
    return _respond(body, ChatShape)


@api.post("/completions")
@requires("write")
@api.input(TextBody, arg_name="body")
@api.output(TextCompletion)
@api.doc(responses=RESPONSES)
def create_completion(body: TextBody) -> Any:
    """Create a completion of bare text

    The text is not put into the model's chat template. Use chat completions for models that were trained on chats.
    """
    return _respond(body, TextShape)


def _respond(body: ChatBody | TextBody, shape_of: type[ChatShape] | type[TextShape]) -> Response | dict[str, Any]:
    call, most = _resolve(body)
    with ExitStack() as stack:
        with transaction() as session:  # which workers there are is no tenant's
            queue = chat_queue(session, call.base_model)
        place = stack.enter_context(hold_place(call.tenant_id, most))
        watch = Watch(_socket(), place, call.base_model)
        seconds = get_settings().chat_deadline_seconds
        waiting = stack.enter_context(Call(broker.CHAT, queue, call.model_dump(mode="json"), seconds, watch))
        messages = iter(waiting)
        begun = next(messages, None)
        if begun is None:
            return Response(status=CLIENT_CLOSED_REQUEST)
        _raise_told(begun)
        watch.begun = True
        choices = len(call.prompts or [None]) * call.n
        answer = Answer(waiting.id, body.model, choices, call.logprobs, **begun["begun"])
        shape = shape_of(answer)
        if not call.stream:
            return _whole(messages, shape)
        response = Response(_events(messages, shape, body.include_usage), mimetype="text/event-stream")
        response.headers.update({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        response.call_on_close(stack.pop_all().close)
        return response


def _resolve(body: ChatBody | TextBody) -> tuple[CompletionCall, int]:
    """The call that a worker gets, and how many the tenant may have at once. Raises NotFound."""
    who, wanted = caller(), ids.parse_adapter(body.model)
    job_id = version = None
    with tenant_transaction() as session:
        most = session.get_one(Tenant, who.tenant_id).max_chat_requests
        if wanted is None:
            model = session.get(BaseModel, body.model)
            if model is None:
                raise model_not_found(body.model)
            base_model = model.name
        else:
            job, version = find_served_job(session, who.tenant_id, wanted.job, wanted.version, body.model)
            if ids.model_id(job, who.tenant_name, wanted.version) != body.model:
                raise model_not_found(body.model)
            base_model, job_id = job.base_model, job.id
    call = CompletionCall(
        tenant_id=who.tenant_id, base_model=base_model, job_id=job_id, version=version, **body.asked()
    )
    return call, most


class Watch:
    """Asked every half second while a request waits: keeps its place, and notices a client that has gone."""

    def __init__(self, client: socket.socket | None, place: Place, base_model: str) -> None:
        self._client, self._place, self._base_model = client, place, base_model
        self._look_at = time.monotonic() + LOOK_SECONDS
        self.begun = False

    def __call__(self) -> bool:
        """Raises EngineUnavailable where the last worker that could begin it has gone."""
        if self._client is not None and has_gone(self._client):
            log.info("client_gone")
            return False
        self._place.renew()
        if not self.begun and time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            with transaction() as session:
                chat_queue(session, self._base_model)
        return True


def _socket() -> socket.socket | None:
    """This request's connection, where the server shows it."""
    return request.environ.get("gunicorn.socket") or request.environ.get("werkzeug.socket")


def has_gone(client: socket.socket) -> bool:
    """Whether the other side has closed its connection; reads nothing of what it may have sent."""
    try:
        return client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _raise_told(message: Message) -> None:
    """Raises the error that the worker told of."""
    if told := message.get("error"):
        raise ERRORS[told["kind"]](told["message"], param=told["param"], code=told["code"])


def _deltas(message: Message) -> list[ChoiceDelta]:
    return [ChoiceDelta.model_validate(delta) for delta in message.get("choices", ())]


def _whole(messages: Iterator[Message], shape: Shape) -> Response | dict[str, Any]:
    done: dict[int, ChoiceDelta] = {}
    for message in messages:
        _raise_told(message)
        done |= {delta.index: delta for delta in _deltas(message)}
        if message.get(END):
            return shape.whole([done[index] for index in sorted(done)], message["usage"])
    return Response(status=CLIENT_CLOSED_REQUEST)


def _events(messages: Iterator[Message], shape: Shape, include_usage: bool) -> Iterator[str]:
    """Server-sent events. An error after the start is an event of its own and the last one."""
    unsaid: dict[str, Any] = {"usage": None} if include_usage else {}
    try:
        for message in messages:
            _raise_told(message)
            for delta in _deltas(message):
                for chunk in shape.chunks(delta):
                    yield _event(chunk | unsaid)
            if message.get(END):
                if include_usage:
                    yield _event(shape.last(message["usage"]))
                yield "data: [DONE]\n\n"
    except MarlaasError as error:
        log.warning("stream_fault", code=error.code, error=error.message)
        said = error.message
        if isinstance(error, InfrastructureFault):  # its words name hosts and keys of ours
            said = f"The service could not finish this ({error.code}). Try again in a moment."
        yield _event(error_body(said, status_of(error), error.code, error.param))


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"
