"""Places that requests hold while they last, counted in Redis over all web processes, so many a tenant and in all.

A place is renewed by who holds it; one whose holder died is free again after `HOLD_SECONDS`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from app.calls import client
from app.errors import InfrastructureFault, RateLimited
from app.settings import get_settings

HOLD_SECONDS = 15.0
RENEW_SECONDS = 3.0
ALL = "marlaas:places:all"

# Both sets hold (holder, until when), by the clock of Redis. 0: taken; 1: the tenant has all of its own; 2: none left.
_TAKE = """
local now = redis.call('TIME')
local seconds = now[1] + now[2] / 1000000
for i, key in ipairs(KEYS) do
    redis.call('ZREMRANGEBYSCORE', key, '-inf', seconds)
    if redis.call('ZCARD', key) >= tonumber(ARGV[2 + i]) then return i end
end
for _, key in ipairs(KEYS) do
    redis.call('ZADD', key, seconds + ARGV[2], ARGV[1])
    redis.call('EXPIRE', key, 3600)
end
return 0
"""
_RENEW = """
local now = redis.call('TIME')
for _, key in ipairs(KEYS) do
    redis.call('ZADD', key, 'XX', now[1] + now[2] / 1000000 + ARGV[2], ARGV[1])
    redis.call('EXPIRE', key, 3600)
end
"""


@dataclass
class Place:
    keys: tuple[str, str]
    holder: str = field(default_factory=lambda: uuid.uuid4().hex)
    renewed: float = field(default_factory=time.monotonic)

    def renew(self) -> None:
        """To be called again and again; does something every few seconds."""
        if time.monotonic() - self.renewed > RENEW_SECONDS:
            self.renewed = time.monotonic()
            with suppress(RedisError):  # the next one may do it
                client().eval(_RENEW, 2, *self.keys, self.holder, HOLD_SECONDS)


@contextmanager
def hold_place(tenant_id: uuid.UUID, most: int) -> Iterator[Place]:
    """One of a tenant's `most` places and of `settings.chat_waiting` in all. Raises RateLimited when all are taken."""
    place = Place((f"marlaas:places:{tenant_id.hex}", ALL))
    in_all = get_settings().chat_waiting
    try:
        refused: Any = client().eval(_TAKE, 2, *place.keys, place.holder, HOLD_SECONDS, most, in_all)
    except RedisError as error:
        raise InfrastructureFault(f"places cannot be counted: {error}") from error
    if refused == 1:
        raise RateLimited(
            f"This tenant may have {most} completions at once, and has as many. Wait until one has ended.", 1.0
        )
    if refused:
        raise RateLimited(f"The service has {in_all} completions at once, and takes no more. Try again soon.", 1.0)
    try:
        yield place
    finally:
        with suppress(RedisError):  # it expires
            for key in place.keys:
                client().zrem(key, place.holder)
