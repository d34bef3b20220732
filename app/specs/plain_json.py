"""JSON from outside, as Postgres can store it and Python can walk it: UTF-8, finite numbers, not too deep."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_DEPTH = 64
TOO_DEEP = f"is nested deeper than {MAX_DEPTH} levels"


def parse(text: str | bytes) -> Any:
    """Raises ValueError, whose words go on a sentence about the text, also where `json.loads` accepts more than can be
    stored and sent again."""
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"is not UTF-8 (byte {error.start})") from error
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    _check(value, MAX_DEPTH)
    return value


def _check(value: Any, depth: int) -> None:
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, (dict, list)):
        if depth == 0:
            raise ValueError(TOO_DEEP)
        if isinstance(value, dict):
            for key in value:
                _check_text(key)
        for inner in value.values() if isinstance(value, dict) else value:
            _check(inner, depth - 1)


def _check_text(text: str) -> None:
    if "\0" in text:
        raise ValueError("holds a NUL character")
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError("holds half of a surrogate pair")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:32]} is too large a number")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
