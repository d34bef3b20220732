"""Figures that many open pages share: computed by one of them, kept for a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Cached(Generic[Value]):
    """Calls `compute` at most once in `seconds`; whoever asks meanwhile waits for that one, and gets its value."""

    def __init__(self, compute: Callable[[], Value], seconds: float) -> None:
        self._compute, self._seconds = compute, seconds
        self._lock = threading.Lock()
        self._value: Value
        self._error: Exception | None = None
        self._until = 0.0

    def get(self) -> Value:
        """Raises what `compute` raised, for as long as its value would have been kept."""
        with self._lock:
            if time.monotonic() >= self._until:
                try:
                    self._value, self._error = self._compute(), None
                except Exception as error:
                    self._error = error  # else those who wait would try one after another
                self._until = time.monotonic() + self._seconds
            if self._error is not None:
                raise self._error
            return self._value

    def forget(self) -> None:
        """The next one computes anew: something was changed."""
        with self._lock:
            self._until = 0.0
