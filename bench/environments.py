"""The environment of the round benchmarks: sums as prompts, and a reward in which the episodes of a group differ.

Loaded by workers through MARLAAS_ENVIRONMENT_MODULES=bench.environments; the peer takes prompts and reward from here.
"""

from __future__ import annotations

from random import Random
from typing import ClassVar, Literal

from workers.tools.environment import JSON, Action, Outcome, Prompt, Split
from workers.tools.registry import Registry


def messages(index: int, shots: int) -> list[dict[str, str]]:
    """A sum behind `shots` solved ones; equally long in tokens for every index."""
    random = Random(index)
    solved = [
        message
        for shot in range(shots)
        for message in (
            {"role": "user", "content": f"What is {412 + shot} + {305 + shot}?"},
            {"role": "assistant", "content": str(717 + 2 * shot)},
        )
    ]
    question = f"What is {random.randint(100, 999)} + {random.randint(100, 999)}?"
    return [
        {"role": "system", "content": "Answer with the final answer only."},
        *solved,
        {"role": "user", "content": question},
    ]


def reward(text: str) -> float:
    """The share of vowels: no two long texts have the same, so no group is without signal."""
    return sum(character in "aeiou" for character in text.lower()) / max(1, len(text))


class Sums:
    blocking: ClassVar[Literal["io", "cpu"]] = "io"
    min_turns: ClassVar[int] = 1

    def __init__(self, params: JSON, seed: int) -> None:
        self.shots = int(params["shots"])

    def reset(self, index: int, split: Split) -> Prompt:
        return Prompt(messages(index, self.shots), state={})

    def step(self, state: JSON, action: Action, turns_left: int) -> Outcome:
        return Outcome(state, reward=reward(action.text), passed=False)


def register(registry: Registry) -> None:
    registry.register("bench_sums", Sums)
