"""Runs the processes of a Procfile: prefixed output, restart with back-off, an end without orphans."""

from __future__ import annotations

import os
import shlex
import signal
import string
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType

from honcho.colour import get_colours
from honcho.environ import parse_procfile
from honcho.printer import Message, Printer

from app.embedded import processes
from app.errors import InfrastructureFault

STOP_SECONDS = 30.0  # for what has started to come to its end; a lease brings back what did not
STEADY_SECONDS = 30.0  # a process that ran this long starts anew with the shortest back-off
FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 15.0
RESTARTS, RESTART_WINDOW = 10, 300.0  # this many restarts within this many seconds are too many


class KeepsCrashing(InfrastructureFault):
    """A process ended more often than the restart budget allows."""

    code = "keeps_crashing"


@dataclass
class Restarts:
    """The restart budget and back-off of one process."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=RESTARTS))
    backoff: float = FIRST_BACKOFF

    def next_start(self, now: float, lived: float) -> float | None:
        """When to start again a process that ended at `now` after `lived` seconds; None when the budget is spent."""
        if len(self.times) == RESTARTS and now - self.times[0] < RESTART_WINDOW:
            return None
        self.backoff = FIRST_BACKOFF if lived >= STEADY_SECONDS else min(self.backoff * 2, LONGEST_BACKOFF)
        self.times.append(now)
        return now + self.backoff


@dataclass
class Supervised:
    name: str
    command: list[str]
    colour: str
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    start_at: float | None = None  # waiting to be started again
    restarts: Restarts = field(default_factory=Restarts)


class Supervisor:
    """`with Supervisor(procfile, environment) as supervisor:` runs the processes; call `tick` a few times a second.

    At the end they are asked to stop and have `STOP_SECONDS` for it, or until the event `hurry` is set.
    """

    def __init__(self, procfile: str, environment: Mapping[str, str], hurry: threading.Event | None = None) -> None:
        self.environment = with_scripts_on_path({**os.environ, **environment})
        self.hurry = hurry or threading.Event()
        colours = get_colours()
        self.processes = [
            Supervised(name, split_command(command, self.environment), next(colours))
            for name, command in parse_procfile(procfile).processes.items()
        ]
        width = max(len(child.name) for child in self.processes)
        # Without a terminal the lines stay as they are, for a machine to read: each names its process itself.
        self._printer = Printer(sys.stdout, width=width, prefix=sys.stdout.isatty())
        self._printing = threading.Lock()

    def __enter__(self) -> Supervisor:
        for child in self.processes:
            self._start(child)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def tick(self) -> None:
        """Starts again what ended, once its back-off is over. Raises KeepsCrashing when a budget is spent."""
        now = time.monotonic()
        for child in self.processes:
            if child.start_at is not None:
                if now >= child.start_at:
                    self._start(child)
            elif child.process is not None and (status := child.process.poll()) is not None:
                child.start_at = child.restarts.next_start(now, now - child.started)
                if child.start_at is None:
                    raise KeepsCrashing(
                        f"{child.name} ended {RESTARTS + 1} times in {RESTART_WINDOW:.0f} s, at last with {status}"
                    )
                self.print(
                    "supervisor", f"{child.name} ended with {status}; starts again in {child.restarts.backoff} s"
                )

    def stop(self) -> None:
        """Ends all processes: asked together, killed after the deadline."""
        alive = [child.process for child in self.processes if child.process is not None]
        for process in alive:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        while any(p.poll() is None for p in alive) and time.monotonic() < deadline and not self.hurry.is_set():
            time.sleep(0.05)
        for process in alive:
            processes.stop(process, signal.SIGKILL, timeout=10)
        for child in self.processes:
            child.process, child.start_at = None, None

    def print(self, name: str, text: str | bytes, colour: str | None = None) -> None:
        with self._printing:
            self._printer.write(Message("line", text, datetime.now(), name, colour))

    def _start(self, child: Supervised) -> None:
        child.process = processes.spawn(child.command, env=self.environment, output=subprocess.PIPE)
        child.started, child.start_at = time.monotonic(), None
        threading.Thread(target=self._copy_output, args=(child, child.process), daemon=True).start()

    def _copy_output(self, child: Supervised, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.print(child.name, line, child.colour)


def split_command(command: str, environment: Mapping[str, str]) -> list[str]:
    """A Procfile's command line as arguments; `$NAME` is filled in (unset: empty). No shell has a part in it."""
    names = string.Template(command).get_identifiers()
    filled = string.Template(command).substitute({name: environment.get(name, "") for name in names})
    return shlex.split(filled)


def with_scripts_on_path(environment: dict[str, str]) -> dict[str, str]:
    """The commands that are installed beside this Python come first, also when no virtual environment is active."""
    scripts = str(Path(sys.executable).parent)
    return {**environment, "PATH": os.pathsep.join([scripts, environment.get("PATH", os.defpath)])}
