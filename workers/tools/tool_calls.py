"""Hermes-style tool calls in generated text: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one a turn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALL_CHARACTERS = 16_384


class MalformedToolCall(ValueError):
    """The text tries to call a tool and fails; the message says how."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


def parse_tool_call(text: str) -> ToolCall | None:
    """The call that ends `text`, or None where there is no call. Text may go before it, nothing after it.

    Raises MalformedToolCall: no closing tag, more than one call, text after it, not strict JSON, other keys.
    """
    before, opened, rest = text.partition(OPEN)
    if not opened:
        if CLOSE in before:
            raise MalformedToolCall(f"{CLOSE} without {OPEN}")
        return None
    body, closed, after = rest.partition(CLOSE)
    if not closed:
        raise MalformedToolCall(f"no {CLOSE}")
    if after.strip():
        raise MalformedToolCall(f"text after {CLOSE}")
    if OPEN in body or CLOSE in before:
        raise MalformedToolCall("tags do not pair")
    return _parse(body)


def format_tool_call(name: str, arguments: dict[str, Any]) -> str:
    """The text of a call, as it is shown to the policy in examples."""
    return f"{OPEN}{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}{CLOSE}"


def _parse(body: str) -> ToolCall:
    if len(body) > MAX_CALL_CHARACTERS:
        raise MalformedToolCall(f"call is longer than {MAX_CALL_CHARACTERS} characters")
    try:
        call = json.loads(body, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedToolCall(f"not JSON: {error}") from error
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        raise MalformedToolCall("a call is an object with exactly `name` and `arguments`")
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
        raise MalformedToolCall("`name` must be a text and `arguments` an object")
    return ToolCall(call["name"], call["arguments"])


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError("a key is given twice")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
