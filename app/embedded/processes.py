"""Child processes that never outlive their parent, and the unprivileged user that servers run as."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from app.errors import InfrastructureFault

EXEC_CHILD = Path(__file__).with_name("exec_child.py")

# The kernel sends a death signal when the *thread* that forked ends: one thread, which lasts as long as the process.
_spawner = ThreadPoolExecutor(1, thread_name_prefix="spawner")


@dataclass(frozen=True, slots=True)
class Identity:
    uid: int
    gid: int

    @classmethod
    def current(cls) -> Identity:
        return cls(os.geteuid(), os.getegid())

    @classmethod
    def of_services(cls) -> Identity:
        """Whom servers run as: never root (Postgres refuses it), else whoever runs this."""
        if os.geteuid() != 0:
            return cls.current()
        nobody = pwd.getpwnam("nobody")
        return cls(nobody.pw_uid, nobody.pw_gid)


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    output: IO[bytes] | int,
    identity: Identity | None = None,
    death_signal: signal.Signals = signal.SIGKILL,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts `command` in a session of its own; it gets `death_signal` when this process ends, however it ends."""
    identity = identity or Identity.current()
    parent, uid, gid = os.getpid(), identity.uid, identity.gid
    wrapper = [sys.executable, "-I", "-S", str(EXEC_CHILD), str(int(death_signal)), str(parent), str(uid), str(gid)]
    started = _spawner.submit(
        subprocess.Popen,
        [*wrapper, *command],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=pass_fds,
    )
    return started.result()


def stop(process: subprocess.Popen[bytes], stop_signal: signal.Signals, timeout: float) -> None:
    """Asks the process to end, and kills what is left of its session after `timeout` seconds."""
    if process.poll() is None:
        process.send_signal(stop_signal)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its children, if it left any


def processes_in(folder: Path, command: str) -> Iterator[int]:
    """Ids of live processes named `command` that work in `folder`: what a parent that was killed may have left."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # Zombies have no cwd. A process of another user cannot be read, and is none of ours.
            if (entry / "comm").read_text().strip() == command and (entry / "cwd").resolve(strict=True) == folder:
                yield int(entry.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue


def end_leftovers(folder: Path, command: str, stop_signal: signal.Signals, timeout: float) -> None:
    """Stops the processes named `command` that work in `folder`; kills them after `timeout` seconds."""
    folder = folder.resolve()
    for pid in processes_in(folder, command):
        _signal(pid, stop_signal)
    try:
        wait_until(lambda: not any(processes_in(folder, command)), timeout, f"{command} of an earlier run to end")
    except TimeoutError:
        for pid in processes_in(folder, command):
            _signal(pid, signal.SIGKILL)
        wait_until(lambda: not any(processes_in(folder, command)), timeout, f"{command} of an earlier run to end")


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it ended by itself
        os.kill(pid, number)


def wait_until(condition: Callable[[], bool], timeout: float, what: str, poll: float = 0.05) -> None:
    """Returns once `condition()` holds. Raises TimeoutError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:.0f} s for {what}")
        time.sleep(poll)


def log_tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log, for an error message."""
    if not path.exists():
        return f"(no log at {path})"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


class ServiceFailed(InfrastructureFault):
    """A server of the embedded stack did not start; the message ends with the tail of its log."""

    code = "embedded_service_failed"
