"""Calls in threads under a deadline. A thread cannot be killed: one that hangs is left behind, up to a bound a job."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from threading import Lock, Thread
from typing import TypeVar

from app.errors import EnvironmentFault, EnvironmentTimeout
from workers.tools.calls import describe_error, described

Result = TypeVar("Result")

MAX_HANGING = 8  # left-behind threads of one job that still run


class DeadlineThreads:
    def __init__(self, max_hanging: int = MAX_HANGING) -> None:
        self._max_hanging = max_hanging
        self._hanging: dict[str, list[Thread]] = {}
        self._lock = Lock()

    def call(self, job_id: str, function: Callable[[], Result], deadline: float) -> Result:
        """Runs `function` in a thread of its own. Raises EnvironmentTimeout, or the error that it raised, described."""
        self._refuse_if_hanging(job_id)
        future: Future[Result] = Future()
        thread = Thread(target=_run, args=(function, future), name=f"environment-{job_id}", daemon=True)
        thread.start()
        try:
            error = future.exception(timeout=deadline)
        except FutureTimeout:
            with self._lock:
                self._hanging.setdefault(job_id, []).append(thread)
            raise EnvironmentTimeout(f"the environment did not answer within {deadline:g} s") from None
        if error is not None:
            raise described(describe_error(error)) from error
        return future.result()

    def _refuse_if_hanging(self, job_id: str) -> None:
        with self._lock:
            alive = {job: [t for t in threads if t.is_alive()] for job, threads in self._hanging.items()}
            self._hanging = {job: threads for job, threads in alive.items() if threads}
            hanging = len(self._hanging.get(job_id, ()))
        if hanging >= self._max_hanging:
            raise EnvironmentFault(f"{hanging} earlier calls of this job's environment still hang")


def _run(function: Callable[[], Result], future: Future[Result]) -> None:
    try:
        result = function()
    except BaseException as error:  # SystemExit too: the caller must hear of it
        future.set_exception(error)
    else:
        future.set_result(result)
