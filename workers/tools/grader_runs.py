"""Graders that the API asks to run once, in processes apart from those of the jobs' environments."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import structlog

from app.errors import EnvironmentFault, EnvironmentTimeout, InfrastructureFault, InvalidRequest
from workers.calls import Reply, take
from workers.tools.processes import ProcessPool

log = structlog.get_logger(__name__)

JSON = dict[str, Any]

PROCESSES = 2  # so that one tenant has one of them at most
AT_ONCE = 8  # runs that this worker takes on, waiting ones included; a run holds one of its threads
AT_ONCE_A_TENANT = 3
SECONDS = 20.0  # of one run
MARGIN_SECONDS = 1.0  # before the caller's deadline

BUSY = {"busy": True}


class GraderRuns:
    """One a tools worker; thread-safe."""

    def __init__(self, processes: int = PROCESSES, seconds: float = SECONDS) -> None:
        self._pool = ProcessPool((), processes, seconds)
        self._seconds = seconds
        self._running: Counter[str] = Counter()  # by tenant
        self._lock = Lock()

    def answer(self, call_id: str) -> None:
        """Runs what a call asks for and answers it; a call that is late, taken back or a duplicate is left alone."""
        payload = take(call_id)
        if payload is not None and (left := payload["until"] - time.time() - MARGIN_SECONDS) > 0:
            Reply(call_id).end(self.run(payload["tenant"], payload["request"], left))

    def run(self, tenant: str, request: JSON, seconds: float) -> JSON:
        """`request` is one of the child's, `grade` or `check`.

        Gives {"value": its answer}, {"failed": {"type": "timeout" | "crash", "message"}}, both with the "seconds" that
        it took, {"invalid": {"message", "param"}} or {"busy": true}.
        """
        started = time.monotonic()
        with self._place(tenant) as place:
            if not place:
                return BUSY
            try:
                value = self._pool.request(tenant, request, min(self._seconds, seconds), seconds)
            except InvalidRequest as error:
                return {"invalid": {"message": error.message, "param": error.param}}
            except (EnvironmentTimeout, EnvironmentFault) as error:
                kind = "timeout" if isinstance(error, EnvironmentTimeout) else "crash"
                log.warning("grader_run_failed", tenant=tenant, type=kind, error=error.message)
                return {"failed": {"type": kind, "message": error.message}, "seconds": time.monotonic() - started}
            except InfrastructureFault as error:
                log.warning("grader_run_refused", tenant=tenant, error=error.message)
                return BUSY
        return {"value": value, "seconds": time.monotonic() - started}

    def close(self) -> None:
        self._pool.close()

    @contextmanager
    def _place(self, tenant: str) -> Iterator[bool]:
        with self._lock:
            free = self._running.total() < AT_ONCE and self._running[tenant] < AT_ONCE_A_TENANT
            if free:
                self._running[tenant] += 1
        try:
            yield free
        finally:
            if free:
                with self._lock:
                    self._running[tenant] -= 1
                    self._running += Counter()  # drops the zeros
