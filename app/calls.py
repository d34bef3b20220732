"""A request to a worker that a caller waits for: over a queue, answered over a Redis stream.

What has to last is a row in Postgres and a doorbell; this is for what is worth nothing once its caller has gone. The
message carries an id alone; the payload lies in Redis for as long as the call may last and is taken at most once.
The caller makes the stream and deletes it: a worker that cannot write to it any more knows that nobody listens.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import TracebackType
from typing import Any

import redis
from kombu.exceptions import OperationalError

from app.broker import celery
from app.errors import InfrastructureFault
from app.settings import get_settings

Message = dict[str, Any]

END = "end"  # the key that marks the last message
GRACE_SECONDS = 10.0  # Redis keeps what belongs to a call this much longer than its deadline
SILENT_SECONDS = 15.0  # a worker that has begun says something at least this often
BLOCK_SECONDS = 0.5  # how often a waiting caller looks whether its own client is still there


class CallTimeout(InfrastructureFault):
    """No worker answered in time, or the one that had begun fell silent."""

    code = "timeout"


@lru_cache
def connection(url: str) -> redis.Redis:
    return redis.Redis.from_url(
        url, socket_timeout=5, socket_connect_timeout=3, health_check_interval=15, decode_responses=True
    )


def client() -> redis.Redis:
    """This process's connections to Redis, for calls and counters."""
    return connection(get_settings().redis_url.get_secret_value())


def payload_key(call_id: str) -> str:
    return f"marlaas:call:{call_id}"


def stream_key(call_id: str) -> str:
    return f"marlaas:answer:{call_id}"


class Call:
    """`with Call(task, queue, payload, seconds) as answer: for message in answer: ...`; the last one has `end`."""

    def __init__(
        self, task: str, queue: str, payload: Message, seconds: float, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """`seconds`: until the whole answer must be there. `wanted`: asked while waiting; False ends the call."""
        self.id = uuid.uuid4().hex
        self._task, self._queue, self._payload = task, queue, payload
        self._wanted = wanted
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds

    def __enter__(self) -> Call:
        """Raises InfrastructureFault when Redis cannot be reached."""
        lasts = int(1000 * (self._seconds + GRACE_SECONDS))
        try:
            with client().pipeline() as pipe:
                pipe.set(payload_key(self.id), json.dumps(self._payload), px=lasts)
                pipe.xadd(stream_key(self.id), {"message": "{}"})
                pipe.pexpire(stream_key(self.id), lasts)
                pipe.execute()
            celery.send_task(self._task, kwargs={"call_id": self.id}, queue=self._queue, expires=self._seconds)
        except (redis.RedisError, OperationalError, OSError) as error:
            self.close()
            raise InfrastructureFault(f"the queue cannot be reached: {error}") from error
        return self

    def __iter__(self) -> Iterator[Message]:
        """Messages as they come, the worker's signs of life left out. Ends after the last one, or when the caller is
        not wanted any more. Raises CallTimeout, InfrastructureFault."""
        last, heard = "0", None
        while self._wanted():
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise CallTimeout(f"no answer within {self._seconds:.0f} s")
            if heard is not None and time.monotonic() - heard > SILENT_SECONDS:
                raise CallTimeout(f"the worker has been silent for {SILENT_SECONDS:.0f} s")
            try:
                block = max(1, int(1000 * min(left, BLOCK_SECONDS)))
                found: Any = client().xread({stream_key(self.id): last}, count=100, block=block)
            except redis.RedisError as error:
                raise InfrastructureFault(f"the answer cannot be read: {error}") from error
            for _, entries in found or ():
                for entry_id, fields in entries:
                    first, last = last == "0", entry_id
                    if first:
                        continue  # what made the stream
                    heard = time.monotonic()
                    message: Message = json.loads(fields["message"])
                    if message:
                        yield message
                    if message.get(END):
                        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Takes the call back: a worker that has not begun finds nothing, one that has sees that nobody listens."""
        try:
            client().delete(payload_key(self.id), stream_key(self.id))
        except redis.RedisError:
            return  # they expire
