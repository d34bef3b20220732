"""The token ids that every side of a comparison gets, and how decoding is timed. Standard library alone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

LOWEST_ID, HIGHEST_ID = 1000, 40_000  # plain text tokens of the model


def token_ids(random: Random, length: int) -> list[int]:
    return [random.randint(LOWEST_ID, HIGHEST_ID) for _ in range(length)]


def prompts(batch: int, length: int, seed: int) -> list[list[int]]:
    """A prompt a row, no two alike, so that no cache of prefixes has a part in it."""
    random = Random(seed)
    return [token_ids(random, length) for _ in range(batch)]


@dataclass(frozen=True)
class Episode:
    prompt: list[int]
    response: list[int]
    reward: float


def episodes(groups: int, size: int, prompt: int, tokens: int, seed: int) -> list[list[Episode]]:
    """Groups that share their prompt; every other episode of a group is rewarded."""
    random = Random(seed)
    found = []
    for shared in prompts(groups, prompt, seed + 1):
        found.append([Episode(shared, token_ids(random, tokens), float(number % 2)) for number in range(size)])
    return found


def adapter_of(row: int, adapters: int) -> int | None:
    """The rows take the adapters in turn; None: the base model."""
    return row % adapters if adapters else None


@dataclass
class Clock:
    """When each row got each of its tokens."""

    rows: int
    started: float = field(default_factory=time.perf_counter)
    times: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.times = [[] for _ in range(self.rows)]

    def token(self, row: int) -> None:
        self.times[row].append(time.perf_counter())

    def answer(self) -> dict[str, Any]:
        """Tokens and seconds of all of it, and tokens a second while all rows decode: from the moment that the last
        row has its first token until the first row has its last one."""
        from_, until = max(row[0] for row in self.times), min(row[-1] for row in self.times)
        if until <= from_:
            raise RuntimeError("at no time did all rows decode")
        inside = sum(from_ < at <= until for row in self.times for at in row)
        return {
            "seconds": max(row[-1] for row in self.times) - self.started,
            "tokens": sum(map(len, self.times)),
            "decoding": inside / (until - from_),
        }
