"""Calls environments under a deadline, apart from one another.

`cpu` ones run in processes that can be killed, `io` ones in threads. A call that hangs, raises or takes its
process down costs its own job and nobody else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock

from app.errors import EnvironmentFault, InvalidRequest
from app.specs.job import EnvironmentSpec
from workers.tools.calls import Method, check_outcome, check_prompt, invoke
from workers.tools.environment import JSON, Environment, Split
from workers.tools.processes import ProcessPool
from workers.tools.registry import build_registry
from workers.tools.threads import DeadlineThreads

OPEN_SECONDS = 60.0  # for making an environment, imports and all: not a part of a call's deadline
MAX_OPEN = 64  # io environments kept


class EnvironmentRunner:
    """One a process; thread-safe. `modules` are the operator's own environment modules."""

    def __init__(self, modules: Iterable[str] = (), processes: int = 2, open_seconds: float = OPEN_SECONDS) -> None:
        modules = tuple(modules)
        self._registry = build_registry(modules)
        self._pool = ProcessPool(modules, processes, open_seconds)
        self._open_seconds = open_seconds
        self._environments: OrderedDict[str, Environment] = OrderedDict()
        self._threads = DeadlineThreads()
        self._lock = Lock()

    def check(
        self, job_id: str, spec: EnvironmentSpec, seed: int, splits: Iterable[Split], deadline: float
    ) -> list[JSON]:
        """Makes the environment and the first prompt of each split, and returns those prompts.

        Raises InvalidRequest naming the field, or EnvironmentFault, or EnvironmentTimeout.
        """
        environment = self._registry.get(spec.type)
        if spec.max_turns < environment.min_turns:
            raise InvalidRequest(
                f"environment.max_turns: {spec.type} takes at least {environment.min_turns} turns",
                param="environment.max_turns",
            )
        return [
            check_prompt(self._call(job_id, spec, seed, "reset", {"index": 0, "split": split}, deadline))
            for split in splits
        ]

    def call(self, job_id: str, spec: EnvironmentSpec, seed: int, method: Method, args: JSON, deadline: float) -> JSON:
        """One `reset` {index, split} or `step` {state, text, truncated, turns_left} within `deadline` seconds.

        Returns the Prompt or Outcome as JSON, checked. The environment is kept by `job_id`: a job's specification
        never changes. Raises EnvironmentTimeout (and the call is ended), EnvironmentFault (the environment raised,
        answered wrongly or took its process down), InfrastructureFault (no free process in time).
        """
        try:
            answer = self._call(job_id, spec, seed, method, args, deadline)
        except InvalidRequest as error:  # too late to refuse the request: the job cannot go on
            raise EnvironmentFault(error.message, param=error.param) from error
        return check_prompt(answer) if method == "reset" else check_outcome(answer, args["turns_left"])

    def release(self, job_id: str) -> None:
        """Forgets a finished job's environment."""
        self._pool.release(job_id)
        with self._lock:
            self._environments.pop(job_id, None)

    def close(self) -> None:
        """Ends all child processes."""
        self._pool.close()

    def _call(self, job_id: str, spec: EnvironmentSpec, seed: int, method: Method, args: JSON, deadline: float) -> JSON:
        if self._registry.get(spec.type).blocking == "cpu":
            return self._pool.call(job_id, spec, seed, method, args, deadline)
        environment = self._kept(job_id) or self._open(job_id, spec, seed)
        return self._threads.call(job_id, lambda: invoke(environment, method, args), deadline)

    def _kept(self, job_id: str) -> Environment | None:
        with self._lock:
            if job_id in self._environments:
                self._environments.move_to_end(job_id)
            return self._environments.get(job_id)

    def _open(self, job_id: str, spec: EnvironmentSpec, seed: int) -> Environment:
        def create() -> Environment:
            return self._registry.create(spec.type, spec.params, seed)

        environment = self._threads.call(job_id, create, self._open_seconds)
        with self._lock:
            self._environments[job_id] = environment
            if len(self._environments) > MAX_OPEN:
                self._environments.popitem(last=False)
        return environment
