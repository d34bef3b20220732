"""What the three embedded servers have in common: start until it answers, stop cleanly, continue with the data."""

from __future__ import annotations

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from app.embedded import processes
from app.embedded.credentials import Credentials
from app.embedded.ports import choose_ports, is_free
from app.embedded.processes import Identity, ServiceFailed, log_tail

START_SECONDS = 60.0  # a database that was killed replays its log first
STOP_SECONDS = 30.0
PORT_TRIES = 3


class Service(ABC):
    name: ClassVar[str]
    process_name: ClassVar[str]  # as the kernel shows it
    usual_ports: ClassVar[Sequence[int]]
    grpc: ClassVar[bool] = False
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    not_ready: ClassVar[tuple[type[Exception], ...]]  # what `check` raises while the server is still starting

    def __init__(self, home: Path, identity: Identity, credentials: Credentials) -> None:
        self.home = home
        self.identity = identity
        self.credentials = credentials
        self.data = home / self.name
        self.log = home / f"{self.name}.log"
        self.preferred_ports = self.usual_ports
        self.ports: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def prepare(self) -> None:
        """Makes the data folder and configuration, where they are missing."""

    @abstractmethod
    def command(self) -> list[str]: ...

    def environment(self) -> Mapping[str, str]:
        return {}

    @abstractmethod
    def check(self) -> None:
        """Uses the server once. Raises one of `not_ready` while it does not answer yet."""

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def died(self) -> bool:
        """Ended without having been asked to."""
        return self._process is not None and self._process.poll() is not None

    def launch(self) -> None:
        """Starts the process on the ports it had before, else on free ones. Returns before it answers."""
        processes.end_leftovers(self.data, self.process_name, self.stop_signal, STOP_SECONDS)
        if not self.ports:
            self.ports = choose_ports(self.preferred_ports, grpc=self.grpc)
        self.prepare()
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".log.1"))
        with open(self.log, "wb") as log:
            self._process = processes.spawn(
                self.command(),
                env={"PATH": os.defpath, "HOME": str(self.data), **self.environment()},
                cwd=self.data,
                output=log,
                identity=self.identity,
                death_signal=self.stop_signal,
            )

    def wait_ready(self) -> None:
        """Waits until the server answers. Raises ServiceFailed, with the end of its log, when it does not."""
        for _ in range(PORT_TRIES):
            try:
                processes.wait_until(self._answers_or_died, START_SECONDS, f"{self.name} to answer")
            except TimeoutError as error:
                raise ServiceFailed(f"{error}; its log ends:\n{log_tail(self.log)}") from error
            if self.running:
                return
            if all(map(is_free, self.ports)):
                break
            self.ports = []  # another process was faster at taking one of them
            self.launch()
        raise ServiceFailed(f"{self.name} did not start; its log ({self.log}) ends:\n{log_tail(self.log)}")

    def _answers_or_died(self) -> bool:
        if self.died:
            return True
        try:
            self.check()
        except self.not_ready:
            return False
        return self.running

    def ask_to_stop(self) -> None:
        if self._process is not None and self.running:
            self._process.send_signal(self.stop_signal)

    def stop(self) -> None:
        """Stops it cleanly, within a deadline. Nothing happens when it does not run."""
        if self._process is not None:
            processes.stop(self._process, self.stop_signal, STOP_SECONDS)
            self._process = None

    def kill(self) -> None:
        """Ends it as a crash would: SIGKILL, nothing is flushed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def own(self, path: Path) -> None:
        """Gives a file or folder that this process made to the server's user."""
        os.chown(path, self.identity.uid, self.identity.gid)
