"""Which items are held out, and where a cursor points: pure functions of the job's seed and of the item itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from app.errors import InvalidRequest
from workers.tools.environment import Split

HELD_OUT_OF = 5  # one question in five
MAX_ATTEMPTS = 500

Item = TypeVar("Item")


def held_out(question: str) -> bool:
    """Whether a question belongs to the eval split. A property of the text alone: no job ever trains on it."""
    return _digest(question) % HELD_OUT_OF == 0


def derive(*parts: object) -> int:
    """A 53-bit number from the parts, the same on every machine (and exact in every JSON reader)."""
    return _digest(":".join(map(str, parts))) >> 11


def find_item(
    seed: int, split: Split | str, index: int, make: Callable[[int], Item], wanted: Callable[[Item], bool]
) -> Item:
    """The first wanted item among `make(number)` for the cursor's own sequence of numbers.

    Raises InvalidRequest when the first MAX_ATTEMPTS items hold none: the task has too few different questions.
    """
    for attempt in range(MAX_ATTEMPTS):
        item = make(derive(seed, split, index, attempt))
        if wanted(item):
            return item
    raise InvalidRequest(
        f"too few different questions: none of {MAX_ATTEMPTS} fits the {split} split; widen the task's parameters",
        param="environment.params",
    )


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
