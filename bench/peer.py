"""The peer: TRL in a process of its own, at the other end of a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.service import ROOT


@dataclass(frozen=True)
class PeerSpec:
    """The same work as a round of ours."""

    model: str
    shots: int
    prompts: int
    group_size: int
    tokens: int
    rank: int
    threads: int


class Peer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def step(self) -> float:
        """Seconds of one optimizer step: generation, reward, loss, backward, AdamW."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with {self._process.wait()}")
        answer = json.loads(line)
        self.tokens, self.without_signal = answer["tokens"], answer["without_signal"]
        return float(answer["seconds"])


@contextmanager
def running_peer(spec: PeerSpec, log: Path) -> Iterator[Peer]:
    """TRL with its model loaded, waiting. Raises RuntimeError from `step` when it has ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(spec.threads)}
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.trl_peer", json.dumps(asdict(spec))],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield Peer(process)
    finally:
        process.kill()
        process.wait()
