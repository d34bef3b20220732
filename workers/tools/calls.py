"""One environment call with JSON on both sides, the same in a thread and in a child process."""

from __future__ import annotations

import json
import math
import traceback
from dataclasses import asdict
from typing import Any, Literal

from app.errors import EnvironmentFault, EnvironmentTimeout, InvalidRequest, MarlaasError
from workers.tools.environment import JSON, Action, Environment

Method = Literal["reset", "step"]

ROLES = ("system", "user", "assistant", "tool")
MAX_STATE_BYTES = 64 << 10
MAX_MESSAGES_BYTES = 1 << 20
MAX_ERROR_CHARACTERS = 2000

KINDS: dict[str, type[MarlaasError]] = {
    "invalid_request": InvalidRequest,
    "environment": EnvironmentFault,
    "timeout": EnvironmentTimeout,
}


def invoke(environment: Environment, method: Method, args: JSON) -> JSON:
    """`reset` takes {index, split}, `step` takes {state, text, truncated, turns_left}; the answer as JSON."""
    if method == "reset":
        return _as_json(environment.reset(args["index"], args["split"]))
    action = Action(args["text"], args["truncated"])
    return _as_json(environment.step(args["state"], action, args["turns_left"]))


def describe_error(error: BaseException) -> JSON:
    """What the caller may be told of an error; its traceback goes to the log."""
    if isinstance(error, InvalidRequest):
        return {"kind": "invalid_request", "message": error.message, "param": error.param}
    if isinstance(error, EnvironmentFault):
        return {"kind": "environment", "message": error.message, "param": error.param}
    if isinstance(error, EnvironmentTimeout):
        return {"kind": "timeout", "message": error.message, "param": error.param}
    traceback.print_exception(error)
    message = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
    return {"kind": "environment", "message": message, "param": None}


def described(error: JSON) -> MarlaasError:
    """The error to raise for what `describe_error` gave."""
    return KINDS[error["kind"]](error["message"], param=error["param"])


def check_prompt(prompt: JSON) -> JSON:
    """Returns what `reset` gave if it is well-formed. Raises EnvironmentFault saying what is not."""
    _check_messages(prompt["messages"], "messages")
    if not prompt["messages"]:
        raise EnvironmentFault("reset gave no messages")
    _check_state(prompt["state"])
    return prompt


def check_outcome(outcome: JSON, turns_left: int) -> JSON:
    """Returns what `step` gave if it is well-formed. Raises EnvironmentFault saying what is not."""
    _check_state(outcome["state"])
    reward, done = outcome["reward"], outcome["done"]
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise EnvironmentFault(f"the reward is not a number: {reward!r:.100}")
    if reward is not None and not math.isfinite(reward):
        raise EnvironmentFault(f"the reward is not finite: {reward}")
    if done and reward is None:
        raise EnvironmentFault("the episode is done without a reward")
    if not done and turns_left == 0:
        raise EnvironmentFault("the environment asks for another turn after the last one")
    _check_messages(outcome["observation"], "observation")
    if not done and not outcome["observation"]:
        raise EnvironmentFault("the environment asks for another turn without an observation")
    if any(message["role"] not in ("user", "tool") for message in outcome["observation"]):
        raise EnvironmentFault("observation: role must be user or tool")
    if not all(isinstance(flag, str) and len(flag) <= 64 for flag in outcome["flags"]):
        raise EnvironmentFault("flags must be short texts")
    return outcome


def _as_json(value: Any) -> JSON:
    try:
        return json.loads(json.dumps(asdict(value)))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFault(f"the environment's answer is not JSON: {error}") from error


def _check_state(state: Any) -> None:
    if not isinstance(state, dict):
        raise EnvironmentFault("the state is not a JSON object")
    _check_text(state, "state", MAX_STATE_BYTES)


def _check_messages(messages: Any, field: str) -> None:
    if not isinstance(messages, list):
        raise EnvironmentFault(f"{field} is not a list")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"} or message["role"] not in ROLES:
            raise EnvironmentFault(f"{field}[{i}] is not a message with role ({', '.join(ROLES)}) and content")
        if not isinstance(message["content"], str):
            raise EnvironmentFault(f"{field}[{i}].content is not a text")
    _check_text(messages, field, MAX_MESSAGES_BYTES)


def _check_text(value: Any, field: str, limit: int) -> None:
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise EnvironmentFault(f"{field} holds NaN or infinity") from error
    if len(text) > limit:
        raise EnvironmentFault(f"{field} takes {len(text)} bytes, more than {limit}")
    if "\\u0000" in text:  # PostgreSQL's JSON cannot hold it
        raise EnvironmentFault(f"{field} holds a NUL character")
