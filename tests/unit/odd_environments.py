"""Environments that do what they are told by the policy's text: hang, raise, die, answer nonsense."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, ClassVar, Literal

from app.errors import InvalidRequest
from workers.tools.environment import JSON, Action, Outcome, Prompt, Split
from workers.tools.registry import Registry


class OddProcess:
    blocking: ClassVar[Literal["io", "cpu"]] = "cpu"
    min_turns: ClassVar[int] = 1

    def __init__(self, params: JSON, seed: int) -> None:
        if "wrong" in params:
            raise InvalidRequest("environment.params.wrong: unknown", param="environment.params.wrong")
        self._seed = seed

    def reset(self, index: int, split: Split) -> Prompt:
        return Prompt(
            [{"role": "user", "content": f"{split} {index} {self._seed} {os.getpid()}"}], state={"index": index}
        )

    def step(self, state: JSON, action: Action, turns_left: int) -> Outcome:
        return getattr(self, f"_{action.text}")(state)

    def _good(self, state: JSON) -> Outcome:
        return Outcome(state | {"pid": os.getpid()}, reward=0.5, flags=("fine",))

    def _print(self, state: JSON) -> Outcome:
        print('{"ok": "forged"}')
        sys.stdout.flush()
        return self._good(state)

    def _secrets(self, state: JSON) -> Outcome:
        return Outcome(state | {"variables": sorted(os.environ)}, reward=0.0)

    def _hang(self, state: JSON) -> Outcome:
        signal.pause()
        raise AssertionError

    def _raise(self, state: JSON) -> Outcome:
        raise KeyError("no such thing")

    def _exit(self, state: JSON) -> Outcome:
        sys.exit(3)

    def _die(self, state: JSON) -> Outcome:
        os._exit(7)

    def _crash(self, state: JSON) -> Outcome:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def _memory(self, state: JSON) -> Outcome:
        return Outcome({"x": len(bytearray(1 << 40))}, reward=1.0)

    def _nan(self, state: JSON) -> Outcome:
        return Outcome(state, reward=float("nan"))

    def _text_reward(self, state: JSON) -> Outcome:
        return _outcome(state, reward="1.0")

    def _true_reward(self, state: JSON) -> Outcome:
        return _outcome(state, reward=True)

    def _no_reward(self, state: JSON) -> Outcome:
        return Outcome(state)

    def _big_state(self, state: JSON) -> Outcome:
        return Outcome({"x": "y" * (65 << 10)}, reward=1.0)

    def _object_state(self, state: JSON) -> Outcome:
        return Outcome({"x": object()}, reward=1.0)

    def _list_state(self, state: JSON) -> Outcome:
        return _outcome([1], reward=1.0)

    def _nan_state(self, state: JSON) -> Outcome:
        return Outcome({"x": float("nan")}, reward=1.0)

    def _nul_state(self, state: JSON) -> Outcome:
        return Outcome({"x": "\x00"}, reward=1.0)

    def _more(self, state: JSON) -> Outcome:
        return Outcome(state, [{"role": "tool", "content": "go on"}], done=False)

    def _more_of_nothing(self, state: JSON) -> Outcome:
        return Outcome(state, done=False)

    def _assistant(self, state: JSON) -> Outcome:
        return Outcome(state, [{"role": "assistant", "content": "I say"}], done=False)

    def _broken_message(self, state: JSON) -> Outcome:
        return Outcome(state, [{"text": "go on"}], done=False)

    def _huge_answer(self, state: JSON) -> Outcome:
        return Outcome({"x": "y" * (5 << 20)}, reward=1.0)


class OddThread(OddProcess):
    blocking: ClassVar[Literal["io", "cpu"]] = "io"

    def _hang(self, state: JSON) -> Outcome:
        threading.Event().wait()
        raise AssertionError


class TwoTurns(OddProcess):
    min_turns: ClassVar[int] = 2


def register(registry: Registry) -> None:
    registry.register("odd_process", OddProcess)
    registry.register("odd_thread", OddThread)
    registry.register("two_turns", TwoTurns)


def _outcome(state: Any, **fields: Any) -> Outcome:
    return Outcome(state, **fields)
