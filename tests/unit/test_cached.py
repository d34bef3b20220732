"""Figures that pages share are computed once for all who ask."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.console.cached import Cached


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


def test_many_who_ask_at_once_cost_one_computation() -> None:
    begun, go = threading.Event(), threading.Event()
    counter = Counter()

    def slow() -> int:
        begun.set()
        go.wait(10)
        return counter()

    cached = Cached(slow, seconds=60)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(cached.get) for _ in range(8)]
        begun.wait(10)
        go.set()
        assert [one.result() for one in asked] == [1] * 8


def test_a_value_is_computed_anew_after_its_time() -> None:
    cached = Cached(Counter(), seconds=0)
    assert (cached.get(), cached.get()) == (1, 2)


def test_a_value_is_computed_anew_after_a_change() -> None:
    cached = Cached(Counter(), seconds=60)
    before = cached.get()
    cached.forget()
    assert (before, cached.get(), cached.get()) == (1, 2, 2)


def test_a_failure_is_kept_as_long_as_a_value() -> None:
    """Else those who wait for a server that is away would each wait for it, one after another."""
    answers = iter([ValueError("away"), 7])

    def compute() -> int:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    cached = Cached(compute, seconds=60)
    for _ in range(2):
        with pytest.raises(ValueError, match="away"):
            cached.get()
    cached.forget()
    assert cached.get() == 7
