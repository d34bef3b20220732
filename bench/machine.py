"""What this machine can do at best: rates of matrix products, memory bandwidth. `python -m bench.machine` prints JSON.

Best of several tries, as a limit should be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from bench.child import ROOT

SIZE = 2048  # of the square products
STREAM_BYTES = 512 << 20  # far more than the caches hold
TRY_SECONDS = 1.0


@dataclass(frozen=True)
class Machine:
    threads: int
    bfloat16: float  # operations a second of a product of two large matrices, both directions of a multiply-add counted
    float32: float
    read: float  # bytes a second: one stream read, as weights are
    copy: float  # bytes read and written
    triad: float  # two streams read, one written


_known: Machine | None = None


def machine(again: bool = False) -> Machine:
    """Measured at the first call; `again` measures once more, after the work, and keeps the better of each rate.

    A machine that others share has slow minutes: one in which only the limit is measured would make it too low.
    """
    global _known
    if _known is None:
        _known = measured()
    elif again:
        pairs = zip(asdict(_known).values(), asdict(measured()).values(), strict=True)
        _known = Machine(*(max(pair) for pair in pairs))
    return _known


def measured() -> Machine:
    """By a process of its own."""
    threads = len(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-m", "bench.machine"],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Machine(**json.loads(done.stdout))


def best(work: Callable[[], object]) -> float:
    """Seconds of the quickest run."""
    work()
    found, until = [], time.perf_counter() + TRY_SECONDS
    while time.perf_counter() < until:
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def measure() -> Machine:
    import torch

    threads = torch.get_num_threads()
    rates = {}
    with torch.inference_mode():
        for name in ("bfloat16", "float32"):
            a, b = (torch.randn(SIZE, SIZE).to(getattr(torch, name)) for _ in range(2))
            rates[name] = 2 * SIZE**3 / best(partial(torch.mm, a, b))
        x, y, z = (torch.ones(STREAM_BYTES // 4) for _ in range(3))
        return Machine(
            threads=threads,
            **rates,
            read=STREAM_BYTES / best(x.sum),
            copy=2 * STREAM_BYTES / best(lambda: y.copy_(x)),
            triad=3 * STREAM_BYTES / best(lambda: torch.add(x, y, alpha=2.0, out=z)),
        )


if __name__ == "__main__":
    print(json.dumps(asdict(measure())))
