"""What the report is reckoned from, as pure functions: stretches of time and a small plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Stretch = tuple[float, float]  # start and end, in seconds

BARS = "▁▂▃▄▅▆▇█"


def union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The same time without overlaps, in order."""
    merged: list[Stretch] = []
    for start, end in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(stretches: Iterable[Stretch]) -> float:
    """Seconds that the stretches cover together."""
    return sum(end - start for start, end in union(stretches))


def common(some: Iterable[Stretch], others: Iterable[Stretch]) -> float:
    """Seconds that both cover."""
    some, others = list(some), list(others)
    return length(some) + length(others) - length(some + others)


def overlap_share(training: Mapping[str, Sequence[Stretch]], rollout: Mapping[str, Sequence[Stretch]]) -> float:
    """Share of all jobs' training time in which another job than the one that trained was generating.

    Both map a job to its stretches. 0 where nothing was trained.
    """
    total = sum(length(stretches) for stretches in training.values())
    overlapped = sum(
        common(stretches, [s for other, own in rollout.items() if other != job for s in own])
        for job, stretches in training.items()
    )
    return overlapped / total if total else 0.0


def plot(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> str:
    """One bar a value, from `low` to `high`; values outside are drawn at the edge."""
    top = len(BARS) - 1
    return "".join(BARS[round(min(max((value - low) / (high - low), 0.0), 1.0) * top)] for value in values)
