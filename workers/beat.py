"""Beat leaves a sign of life in Redis at each sweep that it sends: without beat nothing lost is ever found again."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import redis
from celery.signals import after_task_publish

from app import broker
from app.settings import get_settings

REMEMBERED_SECONDS = 3600
TIMEOUT = 3.0


@lru_cache
def _client() -> redis.Redis:
    url = get_settings().redis_url.get_secret_value()
    return redis.Redis.from_url(url, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT)


@after_task_publish.connect(sender=broker.SWEEP, weak=False)
def on_sweep_sent(**_: Any) -> None:
    """Celery logs what is raised here, and beat goes on."""
    _client().set(broker.SWEEP_SENT_AT, time.time(), ex=REMEMBERED_SECONDS)
