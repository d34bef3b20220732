"""The processes of the service, each with a log file of its own; rollout and training each on their own core."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from honcho.environ import parse_procfile

from app.db import transaction
from app.embedded import processes
from app.errors import InfrastructureFault
from app.manager.workers import live_workers
from app.models.worker import WorkerKind
from app.supervisor import split_command, with_scripts_on_path
from app.up import PROCFILE

NAMES = ("web", "beat", *WorkerKind)  # as in the Procfile
READY_SECONDS = 180.0
STOP_SECONDS = 20.0


class WorkerEnded(InfrastructureFault):
    """A process of the service ended by itself; the message ends with the tail of its log."""

    code = "worker_ended"


class Fleet:
    """`with Fleet(logs, environment):` runs the web server, beat and one worker a stage, and stops them at the end."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self._logs = logs
        self._environment = with_scripts_on_path({**os.environ, "OMP_NUM_THREADS": "1", **environment})
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Fleet:
        self._logs.mkdir(parents=True, exist_ok=True)
        commands = parse_procfile(PROCFILE.read_text()).processes
        try:
            for name in NAMES:
                environment = self._environment | affinity(name)
                with self._log(name).open("wb") as log:
                    command = split_command(commands[name], environment)
                    self._processes[name] = processes.spawn(command, env=environment, output=log)
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def check(self) -> None:
        """Raises WorkerEnded when a process is no more."""
        for name, process in self._processes.items():
            if (status := process.poll()) is not None:
                raise WorkerEnded(f"{name} ended with status {status}:\n{processes.log_tail(self._log(name))}")

    def stop(self) -> None:
        """Asks all to end together; the workers store their last spans of time then."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes.values():
            processes.stop(process, signal.SIGTERM, max(0.1, deadline - time.monotonic()))
        self._processes.clear()

    def _wait_ready(self) -> None:
        def ready() -> bool:
            self.check()
            with transaction() as session:
                return {worker.kind for worker in live_workers(session)} >= set(WorkerKind)

        processes.wait_until(ready, READY_SECONDS, f"the workers to be ready; logs are in {self._logs}", poll=0.2)

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


def affinity(name: str) -> dict[str, str]:
    """The first core for rollout, the last one for training, as two accelerators would be; the others run anywhere."""
    cores = sorted(os.sched_getaffinity(0))
    own = {WorkerKind.ROLLOUT: cores[0], WorkerKind.TRAINING: cores[-1]}
    return {"MARLAAS_CPU_AFFINITY": str(own[WorkerKind(name)])} if name in own else {}
