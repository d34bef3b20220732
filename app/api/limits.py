"""The rate limit of a key: requests in any 60 seconds, counted in Redis so that all web processes share it."""

from __future__ import annotations

import math
import time
import uuid
from functools import lru_cache

import structlog
from flask import Response, g
from limits import RateLimitItemPerMinute
from limits.storage import RedisStorage
from limits.strategies import SlidingWindowCounterRateLimiter
from redis.exceptions import RedisError

from app.errors import RateLimited
from app.settings import get_settings

log = structlog.get_logger(__name__)

REDIS_SECONDS = 0.5
PREFIX = "marlaas:limit"


@lru_cache
def _limiter(url: str) -> SlidingWindowCounterRateLimiter:
    storage = RedisStorage(url, key_prefix=PREFIX, socket_timeout=REDIS_SECONDS, socket_connect_timeout=REDIS_SECONDS)
    return SlidingWindowCounterRateLimiter(storage)


def count_request(key_id: uuid.UUID, per_minute: int) -> None:
    """Raises RateLimited where the key has used up its requests. Without Redis nobody counts: serving matters more."""
    limiter, item = _limiter(get_settings().redis_url.get_secret_value()), RateLimitItemPerMinute(per_minute)
    try:
        allowed = limiter.hit(item, key_id.hex)
        stats = limiter.get_window_stats(item, key_id.hex)
    except RedisError as error:
        log.warning("rate_limit_off", error=str(error))
        return
    seconds = max(0.0, stats.reset_time - time.time())
    g.rate_limit = {
        "x-ratelimit-limit-requests": str(per_minute),
        "x-ratelimit-remaining-requests": str(stats.remaining),
        "x-ratelimit-reset-requests": f"{math.ceil(seconds)}s",
    }
    if not allowed:
        raise RateLimited(
            f"This key may send {per_minute} requests a minute. Wait {max(1, math.ceil(seconds))} s and try again.",
            retry_after=seconds,
        )


def show(response: Response) -> Response:
    """Puts the state of the limit on the answer."""
    response.headers.extend(g.get("rate_limit", {}))
    return response
