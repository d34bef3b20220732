"""Graders at work: a sample's text against an item, by the grader's specification, to a reward."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from app.errors import InvalidRequest
from app.specs.grader import (
    MAX_REWARD,
    GraderSpec,
    MathVerifyGrader,
    MultiGrader,
    PythonGrader,
    ReasoningGymGrader,
    StringCheckGrader,
    TextSimilarityGrader,
    calculate,
    parts,
)
from app.specs.templates import OUTPUT_JSON, OUTPUT_TEXT, NoSuchPlace, TooLong, look_up, places, render, spelled
from workers.tools.grades import SAMPLE_PARSE_ERROR, Failure, Grade, Ungraded
from workers.tools.python_grader import check_python, run_python
from workers.tools.similarity import METRICS

JSON = dict[str, Any]

MATH_SECONDS = 2  # for each of parsing and comparing; past it the answer is wrong (signals: main thread only)

_STRING_CHECKS: dict[str, Callable[[str, str], bool]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.casefold() in text.casefold(),
}


def grade(grader: GraderSpec, item: JSON, output_text: str) -> Grade:
    """The grade of `output_text` for `item`; where the grader fails, its reward for that and the failure.

    Raises EnvironmentTimeout past a python grader's time, EnvironmentFault where its interpreter went down.
    """
    sample = {OUTPUT_TEXT: output_text, OUTPUT_JSON: _as_json(output_text)}
    scores: dict[str, float] = {}
    try:
        if not isinstance(grader, MultiGrader):
            return Grade(_score(grader, item, sample))
        for name, part in grader.graders.items():
            scores[name] = _score(part, item, sample)
        return Grade(_calculated(grader, scores), scores)
    except Ungraded as error:
        return Grade(grader.invalid_grade if isinstance(grader, MultiGrader) else 0.0, scores, error.failure)


def check_grader(grader: GraderSpec, items: list[JSON], where: str = "environment.params.grader") -> None:
    """Checks what can be known before there is an answer: sources, and that each item has what the grader reads.

    Raises InvalidRequest naming the grader's field under `where`, and the item by its line.
    """
    for field, part in parts(grader, where):
        if isinstance(part, PythonGrader):
            check_python(part.source, f"{field}.source")
        for name in ("input", "reference"):
            _check_places(getattr(part, name, ""), items, f"{field}.{name}")
        if isinstance(part, ReasoningGymGrader):
            for number, item in enumerate(items, start=1):
                if "answer" not in item or not isinstance(item.get("metadata"), dict):
                    raise InvalidRequest(
                        f"{field}: line {number} is no entry of a reasoning-gym dataset: it needs `answer`, and"
                        " `metadata`, an object",
                        param=field,
                    )


def _check_places(template: str, items: list[JSON], field: str) -> None:
    paths = [path for root, path in places(template) if root == "item"]
    for number, item in enumerate(items, start=1):
        for path in paths:
            try:
                look_up(item, "item", path)
            except NoSuchPlace as error:
                raise InvalidRequest(f"{field}: line {number}: {error}", param=field) from error


def _score(grader: GraderSpec, item: JSON, sample: JSON) -> float:
    match grader:
        case PythonGrader():
            return run_python(grader.source, sample, item)
        case ReasoningGymGrader():
            return _reasoning_gym(grader, _filled(grader.input, item, sample), item)
        case StringCheckGrader():
            return float(_STRING_CHECKS[grader.operation](*_both(grader, item, sample)))
        case TextSimilarityGrader():
            return METRICS[grader.evaluation_metric](*_both(grader, item, sample))
        case MathVerifyGrader():
            return float(_same_mathematics(*_both(grader, item, sample)))
    raise TypeError(f"no grader: {grader!r}")


def _calculated(grader: MultiGrader, scores: dict[str, float]) -> float:
    try:
        reward = float(calculate(grader.calculate_output, scores))
    except ValueError as error:
        raise Ungraded(Failure("formula_parse_error", f"calculate_output: {error}")) from error
    if abs(reward) > MAX_REWARD:
        raise Ungraded(Failure("formula_parse_error", f"calculate_output: the reward is beyond {MAX_REWARD:g}"))
    return reward


def _both(grader: Any, item: JSON, sample: JSON) -> tuple[str, str]:
    return _filled(grader.input, item, sample), _filled(grader.reference, item, sample)


def _filled(template: str, item: JSON, sample: JSON) -> str:
    def find(root: str, path: list[str | int]) -> Any:
        if root == "sample" and path[0] == OUTPUT_JSON and sample[OUTPUT_JSON] is None:
            raise Ungraded(Failure(SAMPLE_PARSE_ERROR, f"{spelled(root, path)}: the answer is not JSON"))
        try:
            return look_up(sample if root == "sample" else item, root, path)
        except NoSuchPlace as error:
            flag = SAMPLE_PARSE_ERROR if root == "sample" else "invalid_variable_error"
            raise Ungraded(Failure(flag, str(error), by_sample=root == "sample")) from error

    try:
        return render(template, find)
    except TooLong as error:
        raise Ungraded(Failure("other_error", str(error))) from error


def _as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _same_mathematics(text: str, reference: str) -> bool:
    # Imported here: it brings sympy.
    from math_verify import parse, verify

    gold = parse(reference, parsing_timeout=MATH_SECONDS)
    if not gold:
        message = f"math_verify cannot read the reference {reference[:200]!r}"
        raise Ungraded(Failure("other_error", message, by_sample=False))
    return bool(verify(gold, parse(text, parsing_timeout=MATH_SECONDS), timeout_seconds=MATH_SECONDS))


def _reasoning_gym(grader: ReasoningGymGrader, text: str, item: JSON) -> float:
    try:
        score = float(_scorer(grader.task)(text.strip(), item))
    except Exception as error:  # some scorers raise on answers that do not parse
        message = f"reasoning_gym cannot score this answer: {type(error).__name__}: {error}"
        raise Ungraded(Failure(SAMPLE_PARSE_ERROR, message[:2000])) from error
    return score if grader.reward == "score" or score >= 1 else 0.0


@lru_cache(maxsize=32)
def _scorer(task: str) -> Callable[[str, JSON], float]:
    # Imported here: it takes seconds.
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)
