"""`python -m app.health PART`: exit status 0 while that part of this machine really works, for health checks.

Prints what is wrong otherwise. A part is web, beat, flower, or a stage: rollout, tools, training, manager.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import redis

from app import broker
from app.settings import get_settings

TIMEOUT = 5.0
MISSED_SWEEPS = 10  # that beat may not have sent before it counts as stuck


class Unhealthy(Exception):
    """The part does not work; the message says what of it."""


def check_web() -> None:
    """All that the web process needs answers, through the web process."""
    _fetch(f"http://127.0.0.1:{get_settings().web_port}/readyz")


def check_flower() -> None:
    _fetch(f"http://127.0.0.1:{os.environ.get('FLOWER_PORT', '5555')}/healthcheck")


def check_beat() -> None:
    """Sweeps are sent."""
    url = get_settings().redis_url.get_secret_value()
    with redis.Redis.from_url(url, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT) as client:
        sent_at = client.get(broker.SWEEP_SENT_AT)
    late = time.time() - float(sent_at or 0.0)
    if late > MISSED_SWEEPS * get_settings().sweep_seconds:
        raise Unhealthy(f"no sweep was sent for {late:.0f} s" if sent_at else "no sweep was sent yet")


def check_worker(stage: str) -> None:
    """The worker `<stage>@<hostname>` of this machine announces itself: its heartbeat reaches the database."""
    from sqlalchemy import select

    from app.db import transaction
    from app.manager.workers import live_workers
    from app.models import Worker

    name = f"{stage}@{socket.gethostname()}"
    with transaction() as session:
        if name not in {worker.name for worker in live_workers(session)}:
            seen = session.scalar(select(Worker.seen_at).where(Worker.name == name))
            raise Unhealthy(f"{name} was last heard of at {seen}" if seen else f"{name} was never heard of")


def _fetch(url: str) -> None:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT):
            pass
    except urllib.error.HTTPError as error:
        raise Unhealthy(f"{url}: {error.code} {error.read(1000).decode(errors='replace')}") from error


CHECKS: dict[str, Callable[[], None]] = {"web": check_web, "beat": check_beat, "flower": check_flower}
STAGES = ("rollout", "tools", "training", "manager")


def main(arguments: list[str]) -> str | None:
    """Returns what is wrong, None when all is well."""
    if len(arguments) != 1 or arguments[0] not in (*CHECKS, *STAGES):
        return f"usage: python -m app.health {'|'.join((*CHECKS, *STAGES))}"
    (part,) = arguments
    try:
        CHECKS[part]() if part in CHECKS else check_worker(part)
    except Exception as error:  # whatever it is: the part is not healthy, and this line says why
        return f"{part}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
