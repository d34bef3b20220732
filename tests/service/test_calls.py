"""Calls over the real broker: at most once, ended by either side, and silent workers given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pydantic import SecretStr

from app import calls
from app.broker import celery
from app.calls import Call, CallTimeout
from app.errors import InfrastructureFault
from app.settings import get_settings
from workers.calls import Reply, take

QUEUE = "calls-test"


@pytest.fixture(autouse=True)
def queue(clean: str) -> Iterator[None]:
    calls.connection.cache_clear()
    yield
    calls.client().delete(QUEUE)


@contextmanager
def answering(call: Call, *messages: dict[str, object]) -> Iterator[None]:
    """A worker in a thread that answers with the messages."""

    def work() -> None:
        reply = Reply(call.id)
        for message in messages:
            reply.send(message)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


def test_messages_come_in_order_and_end_with_the_last() -> None:
    with Call("test.echo", QUEUE, {}, 5) as call, answering(call, {"n": 1}, {}, {"n": 2}, {"end": True}, {"n": 3}):
        assert list(call) == [{"n": 1}, {"n": 2}, {"end": True}]


def test_the_message_names_the_call_alone() -> None:
    with Call("test.echo", QUEUE, {"secret": "prompt"}, 5) as call, celery.connection_for_read() as connection:
        message = connection.SimpleQueue(QUEUE).get(timeout=5)
        assert message.payload[1] == {"call_id": call.id}
        assert "prompt" not in str(message.payload)


def test_a_payload_is_taken_once() -> None:
    with Call("test.echo", QUEUE, {"x": 1}, 5) as call:
        taken = take(call.id)
        assert taken is not None and taken["x"] == 1
        assert 0 < taken["until"] - time.time() <= 5.1
        assert take(call.id) is None


def test_a_forged_call_finds_nothing() -> None:
    assert take("0" * 32) is None


def test_a_call_that_was_left_is_wanted_no_more() -> None:
    with Call("test.echo", QUEUE, {}, 5) as call:
        reply = Reply(call.id)
        assert reply.wanted() and reply.alive()
    assert not reply.wanted()
    assert not reply.send({"n": 1}) and not reply.end()
    assert take(call.id) is None


def test_nothing_of_a_call_stays() -> None:
    with Call("test.echo", QUEUE, {}, 5) as call, answering(call, {"end": True}):
        list(call)
    assert not calls.client().exists(calls.payload_key(call.id), calls.stream_key(call.id))


def test_what_a_dead_caller_leaves_expires() -> None:
    call = Call("test.echo", QUEUE, {}, 5)
    call.__enter__()
    assert 0 < calls.client().ttl(calls.payload_key(call.id)) <= 15
    assert 0 < calls.client().ttl(calls.stream_key(call.id)) <= 15


def test_no_answer_ends_at_the_deadline() -> None:
    with Call("test.echo", QUEUE, {}, 0.2) as call, pytest.raises(CallTimeout, match="no answer"):
        list(call)


def test_a_worker_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SILENT_SECONDS", 0.2)
    with (
        Call("test.echo", QUEUE, {}, 30) as call,
        answering(call, {"n": 1}),
        pytest.raises(CallTimeout, match="silent"),
    ):
        list(call)


def test_a_caller_whose_client_has_gone_stops_waiting() -> None:
    with Call("test.echo", QUEUE, {}, 30, wanted=lambda: False) as call:
        assert list(call) == []


def test_an_unreachable_redis_is_an_infrastructure_fault() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_settings(), "redis_url", SecretStr("redis://127.0.0.1:1/0"))
        with pytest.raises(InfrastructureFault, match="cannot be reached"), Call("test.echo", QUEUE, {}, 1):
            pass
