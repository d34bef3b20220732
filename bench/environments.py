"""The environment of the round benchmarks: sums as prompts, and a reward in which the episodes of a group differ.

Loaded by workers through MARLAAS_ENVIRONMENT_MODULES=bench.environments.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from bench.sums import messages, reward
from workers.tools.environment import JSON, Action, Outcome, Prompt, Split
from workers.tools.registry import Registry


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
