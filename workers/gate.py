"""Work that was lost with its process too often runs alone, so that what kills the process is known (rule 7)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Many may be inside together, or one alone. Whoever waits to be alone keeps newcomers out."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._alone = False
        self._waiting_alone = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._alone and not self._waiting_alone)
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._condition:
            self._waiting_alone += 1
            self._condition.wait_for(lambda: not self._alone and self._inside == 0)
            self._waiting_alone -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._condition:
                self._alone = False
                self._condition.notify_all()
