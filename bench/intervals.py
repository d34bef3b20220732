"""Arithmetic of time intervals (start, end)."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts of the intervals that lie in the window."""
    low, high = window
    return [(max(start, low), min(end, high)) for start, end in intervals if start < high and end > low]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals, in order, that cover the same time."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    """Sum of the lengths; overlaps count each time."""
    return sum(end - start for start, end in intervals)


def covered(intervals: Iterable[Interval]) -> float:
    """Time in which there is at least one of them."""
    return total(merge(intervals))


def overlap(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    """Time in which there is one of `a` and one of `b`."""
    others = merge(b)
    return sum(total(clip(others, interval)) for interval in merge(a))


def without(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Time in which there is one of `a` and none of `b`, as disjoint intervals."""
    rest = merge(a)
    for low, high in b:
        rest = [
            part
            for start, end in rest
            for part in ((start, min(end, low)), (max(start, high), end))
            if part[0] < part[1]
        ]
    return rest
