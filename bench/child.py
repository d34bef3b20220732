"""A process at the other end of a pipe: a question a line on its standard input, an answer a line back, both JSON.

What is measured runs in processes of its own: each side of a comparison has its own libraries, threads and memory, and
between two questions it waits on the pipe and computes nothing. Imports the standard library alone, as the peers' own
environments import it too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Answer = dict[str, Any]


class Child:
    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name, self._process, self._log = name, process, log

    def ask(self, **question: Any) -> Answer:
        """Raises RuntimeError, with the end of its log, when it has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended before; reading says so
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}:\n{tail}")
        answer: Answer = json.loads(line)
        return answer


@contextmanager
def running_child(
    name: str,
    command: Sequence[str],
    logs: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Starts it, waits until it says that it is ready, and kills it at the end. Its log is `logs`/`name`.log."""
    log = logs / f"{name}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        child = Child(name, process, log)
        child.ask()
        yield child
    finally:
        with suppress(ProcessLookupError):  # ended by itself
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        process.wait()


def answers() -> Any:
    """The child's way back; what libraries print on standard output goes to the log from here on."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return pipe


def serve(pipe: Any, answer: Callable[..., Answer]) -> None:
    """Answers questions until the pipe is closed; the first one asks only whether the child is ready."""
    for number, line in enumerate(sys.stdin):
        question = json.loads(line)
        print(json.dumps(answer(**question) if number else {}), file=pipe, flush=True)
