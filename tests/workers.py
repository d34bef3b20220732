"""Real Celery workers and the web server as processes, for service, end-to-end and browser tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from app.embedded import processes

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("manager", "tools", "rollout", "training")


class WorkerProcesses:
    """Starts, kills and stops workers by stage (or `web`, `beat`); their output goes to files under `logs`."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self.logs = logs
        self.environment = dict(environment)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *stages: str) -> None:
        for stage in stages:
            command = [sys.executable, "-m", "celery", "-A", "workers", "--quiet"]
            if stage == "web":
                command = [sys.executable, "-m", "gunicorn", "app.web:create_app()"]
                command += ["--config", "python:app.gunicorn_config"]
            elif stage == "beat":
                command += ["beat", "--schedule", str(self.logs / "beat-schedule")]
            else:
                command += ["worker", "-Q", stage, "-n", f"{stage}@test", "--without-gossip", "--without-mingle"]
            with (self.logs / f"{stage}.log").open("ab") as log:
                self.processes[stage] = processes.spawn(
                    command, cwd=ROOT, env=os.environ | self.environment, output=log
                )

    def kill(self, stage: str) -> None:
        """SIGKILL: nothing is cleaned up."""
        process = self.processes.pop(stage)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """Ends all at once, and web's own children; how they end when asked to takes seconds, and has its own tests."""
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
        self.processes.clear()

    def output(self) -> str:
        """The ends of all logs, for a failing test's message."""
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.logs.glob("*.log")))


def wait_for(
    condition: Callable[[], object], seconds: float, what: str, workers: WorkerProcesses | None = None
) -> None:
    """Polls until the condition holds. Raises AssertionError at the deadline, with the workers' output."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}\n{workers.output() if workers else ''}")
        time.sleep(0.05)
