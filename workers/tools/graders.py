"""Graders at work: a sample's text against an item, by the grader's specification, to a reward."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from difflib import SequenceMatcher
from typing import Any

from app.errors import EnvironmentFault, InvalidRequest
from app.specs.grader import GraderSpec, MathVerifyGrader, MultiGrader, StringCheckGrader, TextSimilarityGrader
from workers.tools.arithmetic import evaluate

JSON = dict[str, Any]

MATH_SECONDS = 2  # for each of parsing and comparing; past it the answer is wrong (signals: main thread only)

_PLACE = re.compile(r"\{\{\s*(item|sample)((?:\.\w+|\[\d+\])+)\s*\}\}")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")

_STRING_CHECKS: dict[str, Callable[[str, str], bool]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.casefold() in text.casefold(),
}


def grade(grader: GraderSpec, item: JSON, output_text: str) -> float:
    """The reward of `output_text` for `item`. Raises EnvironmentFault when the grader cannot say."""
    if isinstance(grader, MultiGrader):
        names = {name: grade(part, item, output_text) for name, part in grader.graders.items()}
        try:
            return float(evaluate(grader.calculate_output, names))
        except ValueError as error:
            raise EnvironmentFault(f"grader {grader.name}: calculate_output: {error}") from error
    sample = {"output_text": output_text}
    text = render(grader.input, item=item, sample=sample)
    reference = render(grader.reference, item=item, sample=sample)
    match grader:
        case StringCheckGrader():
            return float(_STRING_CHECKS[grader.operation](text, reference))
        case TextSimilarityGrader():
            return SequenceMatcher(None, text, reference, autojunk=False).ratio()
        case MathVerifyGrader():
            return float(_same_mathematics(text, reference))


def check_grader(grader: GraderSpec, items: list[JSON]) -> None:
    """Raises InvalidRequest where a template is broken, or names a field that an item (by its line) lacks."""
    if isinstance(grader, MultiGrader):
        for part in grader.graders.values():
            check_grader(part, items)
        try:
            evaluate(grader.calculate_output, dict.fromkeys(grader.graders, 1.0))
        except ValueError as error:
            field = "environment.params.grader.calculate_output"
            raise InvalidRequest(f"{field}: {error}", param=field) from error
        return
    for name in ("input", "reference"):
        field = f"environment.params.grader.{name}"
        template = getattr(grader, name)
        if re.search(r"\{\{|\}\}", _PLACE.sub("", template)):
            raise InvalidRequest(
                f"{field}: only {{{{ item.* }}}} and {{{{ sample.output_text }}}} are known", param=field
            )
        for number, item in enumerate(items, start=1):
            try:
                render(template, item=item, sample={"output_text": ""})
            except EnvironmentFault as error:
                raise InvalidRequest(f"{field}: line {number}: {error.message}", param=field) from error


def render(template: str, *, item: JSON, sample: JSON) -> str:
    """Fills in the places of a template, once: what is filled in is never read as a template.

    Texts go in as they are, other values as JSON. Raises EnvironmentFault naming a field that is not there.
    """
    roots = {"item": item, "sample": sample}
    return _PLACE.sub(lambda place: _text(_look_up(roots[place[1]], place[1], place[2])), template)


def _look_up(value: Any, root: str, path: str) -> Any:
    for name, position in _STEP.findall(path):
        try:
            value = value[name] if name else value[int(position)]
        except (KeyError, IndexError, TypeError) as error:
            raise EnvironmentFault(f"there is no {root}{path}") from error
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _same_mathematics(text: str, reference: str) -> bool:
    # Imported here: it brings sympy.
    from math_verify import parse, verify

    gold = parse(reference, parsing_timeout=MATH_SECONDS)
    if not gold:
        raise EnvironmentFault(f"math_verify cannot read the reference {reference[:200]!r}")
    return bool(verify(gold, parse(text, parsing_timeout=MATH_SECONDS), timeout_seconds=MATH_SECONDS))
