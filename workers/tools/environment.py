"""The environment protocol. State is JSON: any worker can go on with an episode. Randomness comes from the seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

JSON = dict[str, Any]
Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a group starts with."""

    messages: list[dict[str, str]]  # role: system | user | assistant | tool; content: text
    state: JSON  # handed to the first `step`
    tools: list[JSON] | None = None  # JSON-schema tool definitions, for chat templates that know tools


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy said in one turn."""

    text: str  # decoded without the stop token
    truncated: bool  # ended by max_tokens, not by a stop token


@dataclass(frozen=True, slots=True)
class Outcome:
    """The environment's answer: either messages and another turn, or done with a reward."""

    state: JSON
    observation: list[dict[str, str]] = field(default_factory=list)  # role `tool` or `user` messages, for the next turn
    reward: float | None = None  # finite; required when done
    done: bool = True
    passed: bool | None = None  # solved exactly: what pass rates count; default: reward >= 1
    flags: tuple[str, ...] = ()  # e.g. "malformed_call", "no_answer": shown to the tenant, counted a round


class Environment(Protocol):
    """One instance serves one job in one process; it holds no episode."""

    blocking: ClassVar[Literal["io", "cpu"]]  # cpu: calls run in a process that can be killed; io: in a thread
    min_turns: ClassVar[int]  # generations that a solved episode takes at least

    def __init__(self, params: JSON, seed: int) -> None:
        """Checks `params`; all randomness comes from `seed`, the job's. Raises InvalidRequest naming the field."""
        ...

    def reset(self, index: int, split: Split) -> Prompt:
        """The prompt at cursor `index` of the split; same index, same prompt. Raises EnvironmentFault."""
        ...

    def step(self, state: JSON, action: Action, turns_left: int) -> Outcome:
        """Answers one turn. `turns_left` is 0 at the last allowed generation: the outcome must then be done."""
        ...
