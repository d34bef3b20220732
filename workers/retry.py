"""Trying again, within a budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import structlog

log = structlog.get_logger(__name__)

T = TypeVar("T")

PAUSES = (0.2, 0.5, 1.0, 2.0, 4.0)  # seconds


def retried(call: Callable[[], T], fault: type[Exception]) -> T:
    """Calls again after each `fault`, with growing pauses; the last one is raised. `call` must be safe to repeat."""
    for pause in PAUSES:
        try:
            return call()
        except fault as error:
            log.warning("retried", error=str(error).splitlines()[0])
            time.sleep(pause)
    return call()
