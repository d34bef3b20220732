"""Toy environments with verifiable rewards that a tiny random model can learn, and ones that go wrong on purpose.

Loaded by workers through MARLAAS_ENVIRONMENT_MODULES=tests.toy.
"""

from __future__ import annotations

import random
import signal
import time
from typing import ClassVar, Literal

from tests.alphabet import CHARACTERS
from workers.tools.environment import JSON, Action, Outcome, Prompt, Split
from workers.tools.registry import Registry

WANTED = set("0123456789")


def share_of_digits(text: str, length: int = 8) -> float:
    """Verifiable: how much of the wanted length is digits."""
    return sum(c in WANTED for c in text[:length]) / length


class Digits:
    """One turn: the reward is the share of digits in the first eight characters."""

    blocking: ClassVar[Literal["io", "cpu"]] = "io"
    min_turns: ClassVar[int] = 1

    def __init__(self, params: JSON, seed: int) -> None:
        self.params, self.seed = params, seed

    def reset(self, index: int, split: Split) -> Prompt:
        letters = random.Random(f"{self.seed}:{split}:{index}").choices(CHARACTERS[:26], k=4)
        return Prompt([{"role": "user", "content": "".join(letters)}], state={"index": index})

    def step(self, state: JSON, action: Action, turns_left: int) -> Outcome:
        return Outcome(state, reward=share_of_digits(action.text))


class Dialogue(Digits):
    """Several turns: the environment answers each, with latency, and rewards the digits of them all."""

    def step(self, state: JSON, action: Action, turns_left: int) -> Outcome:
        time.sleep(self.params.get("latency", 0.0))
        total = state.get("total", 0.0) + share_of_digits(action.text)
        turns = state.get("turns", 0) + 1
        if turns_left == 0:
            return Outcome(state, reward=total / turns)
        observation = [{"role": "tool", "content": f"more <|im_end|> {turns}"}]
        return Outcome({"total": total, "turns": turns}, observation=observation, done=False)


class Constant(Digits):
    """No signal: everything is worth the same."""

    def step(self, state: JSON, action: Action, turns_left: int) -> Outcome:
        return Outcome(state, reward=0.5)


class Raising(Digits):
    def step(self, state: JSON, action: Action, turns_left: int) -> Outcome:
        raise RuntimeError("the grader is broken")


class Hanging(Digits):
    """Burns CPU for ever, in a process that can be killed."""

    blocking: ClassVar[Literal["io", "cpu"]] = "cpu"

    def step(self, state: JSON, action: Action, turns_left: int) -> Outcome:
        while True:
            signal.pause()


class SometimesHanging(Digits):
    """Hangs on what the policy says now and then: a scorer that some text drives mad."""

    blocking: ClassVar[Literal["io", "cpu"]] = "cpu"

    def step(self, state: JSON, action: Action, turns_left: int) -> Outcome:
        while action.text[:1] in set("abcd"):
            signal.pause()
        return super().step(state, action, turns_left)


def register(registry: Registry) -> None:
    registry.register("toy_digits", Digits)
    registry.register("toy_dialogue", Dialogue)
    registry.register("toy_constant", Constant)
    registry.register("toy_raising", Raising)
    registry.register("toy_hanging", Hanging)
    registry.register("toy_sometimes_hanging", SometimesHanging)
