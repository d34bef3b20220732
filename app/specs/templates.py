"""Templates of graders: `{{ item.field }}`, `{{ item.solutions[0].text }}`, `{{ sample.output_text }}`,
`{{ sample.output_json.field }}`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

OUTPUT_TEXT = "output_text"  # what the policy said
OUTPUT_JSON = "output_json"  # the same read as JSON

_PLACE = re.compile(r"\{\{\s*(item|sample)((?:\.[\w-]+|\[\d+\])+)\s*\}\}")
_STEP = re.compile(r"\.([\w-]+)|\[(\d+)\]")
_BRACES = re.compile(r"\{\{|\}\}")


class NoSuchPlace(ValueError):
    """A template names what is not there."""


class TooLong(ValueError):
    """A template that is filled in with more text than a grader should compare."""


MOST_TEXT = 1 << 20  # characters of a template that is filled in


def check_template(template: str) -> str:
    """Returns the template if every place in it can be filled in from some item and sample. Raises ValueError."""
    if _BRACES.search(_PLACE.sub("", template)):
        raise ValueError(
            "only {{ item.* }}, {{ sample.output_text }} and {{ sample.output_json.* }} are known, without filters"
        )
    for root, steps in places(template):
        if root == "sample" and steps[0] not in (OUTPUT_TEXT, OUTPUT_JSON):
            raise ValueError(f"there is no sample.{steps[0]}: use sample.{OUTPUT_TEXT} or sample.{OUTPUT_JSON}")
        if root == "sample" and steps[0] == OUTPUT_TEXT and len(steps) > 1:
            raise ValueError(f"sample.{OUTPUT_TEXT} is a text, without fields: sample.{OUTPUT_JSON} has them")
    return template


def places(template: str) -> Iterator[tuple[str, list[str | int]]]:
    """(root, path under it) of each place."""
    for place in _PLACE.finditer(template):
        yield place[1], _steps(place[2])


def render(template: str, find: Callable[[str, list[str | int]], Any]) -> str:
    """Fills in each place with what `find(root, path)` gives, once: what is filled in is never read as a template.

    Texts go in as they are, other values as JSON. Raises TooLong.
    """
    room = MOST_TEXT - len(template)

    def filled(place: re.Match[str]) -> str:
        nonlocal room
        text = _text(find(place[1], _steps(place[2])))
        room -= len(text)
        if room < 0:
            raise TooLong(f"the text is longer than {MOST_TEXT} characters once it is filled in")
        return text

    return _PLACE.sub(filled, template)


def look_up(value: Any, root: str, path: list[str | int]) -> Any:
    """What lies at `path` in `value`. Raises NoSuchPlace."""
    found = value
    for step in path:
        try:
            found = found[step]
        except (KeyError, IndexError, TypeError) as error:
            raise NoSuchPlace(f"there is no {spelled(root, path)}") from error
    return found


def spelled(root: str, path: list[str | int]) -> str:
    return root + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def _steps(path: str) -> list[str | int]:
    return [name or int(position) for name, position in _STEP.findall(path)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
