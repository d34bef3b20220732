"""What is wrong with a document, in a sentence that names the field and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

BOUNDS = {
    "greater_than_equal": ("ge", "must be at least"),
    "greater_than": ("gt", "must be above"),
    "less_than_equal": ("le", "must be at most"),
    "less_than": ("lt", "must be below"),
}


def problems(error: ValidationError, model: type[BaseModel], *above: str) -> list[tuple[str, str]]:
    """(field, what is wrong with it) for each problem of a `model` that lies at the path `above`."""
    return [(".".join(map(str, (*above, *e["loc"]))), _sentence(e, model)) for e in error.errors(include_url=False)]


def summary(found: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{field}: {what}" if field else what for field, what in found)


def _sentence(error: ErrorDetails, model: type[BaseModel]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in BOUNDS:
        bound, words = BOUNDS[kind]
        return f"{words} {context[bound]}, not {error['input']!r}"
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return _unknown_field(str(error["loc"][-1]), _model_at(model, error["loc"][:-1]))
    return error["msg"].removeprefix("Value error, ")


def _unknown_field(name: str, model: type[BaseModel] | None) -> str:
    if model is None:
        return "unknown field"
    if close := get_close_matches(name, model.model_fields, n=1):
        return f"unknown field; did you mean {close[0]!r}?"
    return f"unknown field; known fields: {', '.join(model.model_fields)}"


def _model_at(model: type[BaseModel], path: Sequence[int | str]) -> type[BaseModel] | None:
    """The model of a nested field, or None where the path goes through anything but models."""
    here: Any = model
    for part in path:
        field = here.model_fields.get(part)
        here = field.annotation if field else None
        if not (isinstance(here, type) and issubclass(here, BaseModel)):
            return None
    return here
