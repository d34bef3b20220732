"""What is wrong with a document, in a sentence that names the field and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

BOUNDS = {
    "greater_than_equal": ("ge", "must be at least"),
    "greater_than": ("gt", "must be above"),
    "less_than_equal": ("le", "must be at most"),
    "less_than": ("lt", "must be below"),
}


MOST_TOLD = 20  # a document may be wrong in a hundred thousand places


def problems(error: ValidationError, model: Any, *above: str) -> list[tuple[str, str]]:
    """(field, what is wrong with it) for each of the first problems of a model, or a union of them, that lies at the
    path `above`."""
    found = []
    for e in error.errors(include_url=False)[:MOST_TOLD]:
        path, _ = _follow(model, e["loc"])
        found.append((".".join(map(str, (*above, *path))), _sentence(e, model)))
    return found


def summary(found: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{field}: {what}" if field else what for field, what in found)


def _sentence(error: ErrorDetails, model: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in BOUNDS:
        bound, words = BOUNDS[kind]
        return f"{words} {context[bound]}, not {error['input']!r}"
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return _unknown_field(str(error["loc"][-1]), _follow(model, error["loc"][:-1])[1])
    return error["msg"].removeprefix("Value error, ")


def _unknown_field(name: str, model: type[BaseModel] | None) -> str:
    if model is None:
        return "unknown field"
    if close := get_close_matches(name[:64], model.model_fields, n=1):
        return f"unknown field; did you mean {close[0]!r}?"
    return f"unknown field; known fields: {', '.join(model.model_fields)}"


def _follow(model: Any, location: Sequence[int | str]) -> tuple[list[int | str], type[BaseModel] | None]:
    """(the path that a reader of the document sees, the model at its end, if it is one) of an error's location, in
    which pydantic also tells which member of a union it tried."""
    path: list[int | str] = []
    here: Any = model
    for part in location:
        members = _members(here)
        if len(members) > 1:
            here = next((m for m in members if _tag(m) == part), None)
            continue
        here = members[0]
        path.append(part)
        if isinstance(here, type) and issubclass(here, BaseModel):
            field = here.model_fields.get(str(part))
            here = field.annotation if field else None
        else:
            inner = get_args(here)
            here = inner[-1] if get_origin(here) is dict else inner[0] if inner else None
    members = _members(here)
    end = members[0] if len(members) == 1 else None
    return path, end if isinstance(end, type) and issubclass(end, BaseModel) else None


def _members(annotation: Any) -> list[Any]:
    """The types that a value may have, but for null."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [m for part in get_args(annotation) if part is not type(None) for m in _members(part)]
    return [annotation]


def _tag(member: Any) -> str:
    """How pydantic names a member of a union in an error's location."""
    if isinstance(member, type) and issubclass(member, BaseModel) and "type" in member.model_fields:
        return str(get_args(member.model_fields["type"].annotation)[0])
    return str(getattr(member, "__name__", member))
