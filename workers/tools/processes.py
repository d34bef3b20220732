"""A small pool of child processes that hold environments; one that is late or dies is replaced."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Condition
from typing import Any

from app.errors import EnvironmentFault, EnvironmentTimeout, InfrastructureFault
from app.specs.job import EnvironmentSpec
from workers.tools.calls import Method, described
from workers.tools.environment import JSON

MAX_ENVIRONMENTS = 16  # kept by one child
MAX_ANSWER_BYTES = 4 << 20
WAIT_SECONDS = 120.0  # for a free child
EXIT_SECONDS = 5.0  # between a child's last word and its end
# All that a child sees of this process's variables: no credentials among them.
VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV")


class ChildDied(Exception):
    """The child process ended before it answered."""


class Child:
    """One process of `workers.tools.child`; serves one request at a time."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        variables |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workers.tools.child", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            start_new_session=True,  # a group of its own, to be killed as a whole
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.job_ids: OrderedDict[str, None] = OrderedDict()  # whose environments it holds, least recently used first
        self.usable = True  # False while a request is under way, and for ever after one without an answer

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def request(self, request: JSON, seconds: float) -> Any:
        """Sends a request and waits for its answer. Raises EnvironmentTimeout, ChildDied, or the described error."""
        end = time.monotonic() + seconds
        self.usable = False
        try:
            self._stdin.write(json.dumps(request | {"seconds": seconds}).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError as error:  # it ended while it was idle: no fault of this request
            raise InfrastructureFault("an idle environment process has ended") from error
        answer = json.loads(self._read_line(end, seconds))
        self.usable = True
        if "error" in answer:
            raise described(answer["error"])
        return answer["ok"]

    def kill(self) -> str:
        """Ends the process, and what it started, and says how it ended; one that had ended before keeps its own
        status."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        self._stdout.close()
        with suppress(BrokenPipeError):
            self._stdin.close()
        return f"signal {-status}" if status < 0 else f"status {status}"

    def _read_line(self, end: float, seconds: float) -> bytes:
        line = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise EnvironmentTimeout(f"the environment did not answer within {seconds:g} s")
                part = os.read(self._stdout.fileno(), 1 << 16)
                if not part:
                    with suppress(subprocess.TimeoutExpired):
                        self._process.wait(EXIT_SECONDS)  # its own exit status, not that of our kill
                    raise ChildDied
                line += part
                if len(line) > MAX_ANSWER_BYTES:
                    raise EnvironmentFault(f"the environment's answer is longer than {MAX_ANSWER_BYTES} bytes")
        return bytes(line)


class ProcessPool:
    """Up to `size` children, started when needed. One job has at most `size - 1` (or the one) of them at a time."""

    def __init__(self, modules: tuple[str, ...], size: int, open_seconds: float) -> None:
        self._modules = modules
        self._size = size
        self._per_job = max(1, size - 1)
        self._open_seconds = open_seconds
        self._idle: list[Child] = []
        self._busy: Counter[str] = Counter()  # children at work, by job
        self._changed = Condition()
        self._closed = False

    def call(self, job_id: str, spec: EnvironmentSpec, seed: int, method: Method, args: JSON, deadline: float) -> JSON:
        """Runs a call in a child, making the environment there first where it is not yet held."""
        with self._child(job_id) as child:
            try:
                self._open(child, job_id, spec, seed)
                return child.request({"do": "call", "key": job_id, "method": method, "args": args}, deadline)
            except ChildDied:
                raise EnvironmentFault(f"the environment's process ended with {child.kill()}") from None

    def request(self, owner: str, request: JSON, deadline: float, wait_seconds: float) -> Any:
        """A request of no environment. `owner` has its share of the children, as a job has, and waits
        `wait_seconds` at most for one."""
        with self._child(owner, wait_seconds) as child:
            try:
                return child.request(request, deadline)
            except ChildDied:
                raise EnvironmentFault(f"the process ended with {child.kill()}") from None

    def release(self, job_id: str) -> None:
        """Forgets a job; children drop its environment as others take its place."""
        with self._changed:
            for child in self._idle:
                if job_id in child.job_ids:
                    child.job_ids.move_to_end(job_id, last=False)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for child in idle:
            child.kill()

    def _open(self, child: Child, job_id: str, spec: EnvironmentSpec, seed: int) -> None:
        if job_id not in child.job_ids:
            if len(child.job_ids) >= MAX_ENVIRONMENTS:
                child.request({"do": "close", "key": child.job_ids.popitem(last=False)[0]}, self._open_seconds)
            opening = {"do": "open", "key": job_id, "type": spec.type, "params": spec.params, "seed": seed}
            child.request(opening, self._open_seconds)
        child.job_ids[job_id] = None
        child.job_ids.move_to_end(job_id)

    @contextmanager
    def _child(self, job_id: str, wait_seconds: float = WAIT_SECONDS) -> Iterator[Child]:
        child = self._take(job_id, wait_seconds)
        try:
            yield child
        finally:
            self._give_back(job_id, child)

    def _take(self, job_id: str, wait_seconds: float) -> Child:
        """An idle child, if possible one that holds the job's environment, or else a new one."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._has_room(job_id), timeout=wait_seconds):
                raise InfrastructureFault(f"no environment process became free within {wait_seconds:g} s")
            if self._closed:
                raise InfrastructureFault("the environment processes are closed")
            self._idle = [child for child in self._idle if child.alive]
            self._idle.sort(key=lambda child: job_id in child.job_ids)
            child = self._idle.pop() if self._idle else Child(self._modules)
            self._busy[job_id] += 1
            return child

    def _has_room(self, job_id: str) -> bool:
        return self._busy.total() < self._size and self._busy[job_id] < self._per_job

    def _give_back(self, job_id: str, child: Child) -> None:
        with self._changed:
            self._busy[job_id] -= 1
            self._busy += Counter()  # drops the zeros
            keep = child.usable and not self._closed
            if keep:
                self._idle.append(child)
            self._changed.notify_all()
        if not keep:
            child.kill()
