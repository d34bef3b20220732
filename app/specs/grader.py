"""Graders, in the words of OpenAI's reinforcement fine-tuning, and two of our own: math_verify and reasoning_gym.

Templates read the item, `{{ item.* }}`, and the policy's answer, `{{ sample.output_text }}` or, where it is JSON,
`{{ sample.output_json.* }}`. What can be known of a grader without running it is checked here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from app.errors import InvalidRequest
from app.specs.arithmetic import OPERATORS, Function, NoValue, Number, evaluate
from app.specs.job import Spec, Text
from app.specs.problems import problems, summary
from app.specs.reasoning_gym import TASKS
from app.specs.templates import check_template

OUTPUT = "{{ sample.output_text }}"
MAX_REWARD = 1e6  # in magnitude: beyond it a round's advantages leave float32's comfort
MAX_SOURCE = 128 << 10
MAX_FORMULA = 500

# OpenAI's list.
FUNCTIONS: dict[str, Function] = {
    "min": min, "max": max, "abs": abs, "floor": math.floor, "ceil": math.ceil,
    "exp": math.exp, "sqrt": math.sqrt, "log": math.log,
}  # fmt: skip

Name = Annotated[Text, Field(min_length=1, max_length=128)]
Template = Annotated[Text, Field(max_length=16_384), AfterValidator(check_template)]
Metric = Literal["fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"]

_JUDGES = "needs a model as judge, which this service does not run: use python, text_similarity or math_verify"
NOT_OFFERED = {
    "score_model": _JUDGES,
    "label_model": _JUDGES,
    "endpoint": "would leave the service: use python",
    "cosine": "needs an embedding model, which this service does not run: use fuzzy_match or rouge_l",
    "meteor": "needs a dictionary of synonyms, which this service does not have: use gleu or rouge_l",
}


def _offered(value: Any) -> Any:
    name = value.get("type") if isinstance(value, dict) else value
    if isinstance(name, str) and name in NOT_OFFERED:
        raise ValueError(f"{name} is not offered: it {NOT_OFFERED[name]}")
    return value


class StringCheckGrader(Spec):
    """1 if the operation holds, else 0. `like` is containment, `ilike` the same without regard to case."""

    type: Literal["string_check"]
    name: Name = "string_check"
    input: Template = OUTPUT
    reference: Template
    operation: Literal["eq", "ne", "like", "ilike"] = "eq"


class TextSimilarityGrader(Spec):
    """How near a text comes to the reference, 0 to 1; see `workers.tools.similarity` for each metric."""

    type: Literal["text_similarity"]
    name: Name = "text_similarity"
    input: Template = OUTPUT
    reference: Template
    evaluation_metric: Annotated[Metric, BeforeValidator(_offered)] = "fuzzy_match"


class PythonGrader(Spec):
    """The number that the source's `grade(sample, item)` returns, run in a sandbox.

    `sample` is {"output_text": text, "output_json": the same read as JSON, or None}, `item` a line of the data.
    """

    type: Literal["python"]
    name: Name = "python"
    source: Text = Field(min_length=1, max_length=MAX_SOURCE)
    image_tag: Annotated[Text, Field(max_length=64)] | None = Field(
        None, description="taken as OpenAI's clients send it; there is one sandbox, whatever it says"
    )


class MathVerifyGrader(Spec):
    """1 if both are the same mathematical object (math-verify), else 0."""

    type: Literal["math_verify"]
    name: Name = "math_verify"
    input: Template = OUTPUT
    reference: Template


class ReasoningGymGrader(Spec):
    """The scorer of a reasoning-gym dataset, on lines that are that dataset's entries: `answer` and `metadata`."""

    type: Literal["reasoning_gym"]
    name: Name = "reasoning_gym"
    task: str = Field(description="name of a reasoning-gym dataset")
    input: Template = OUTPUT
    reward: Literal["exact", "score"] = Field("exact", description="1 for a full score, or the library's own score")

    @field_validator("task")
    @classmethod
    def task_is_known(cls, task: str) -> str:
        if task not in TASKS:
            hint = ", ".join(get_close_matches(task, TASKS) or sorted(TASKS))
            raise ValueError(f"reasoning_gym has no dataset {task!r}; it has {hint}")
        return task


SimpleGrader = Annotated[
    StringCheckGrader | TextSimilarityGrader | PythonGrader | MathVerifyGrader | ReasoningGymGrader,
    Field(discriminator="type"),
    BeforeValidator(_offered),
]


class MultiGrader(Spec):
    """A formula over the results of other graders, e.g. `0.8 * exact + 0.2 * max(close, 0.5)`."""

    type: Literal["multi"]
    name: Name = "multi"
    graders: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,63}$")], SimpleGrader] = Field(
        min_length=1, max_length=16
    )
    calculate_output: str = Field(
        max_length=MAX_FORMULA, description=f"{OPERATORS} ( ) and {', '.join(FUNCTIONS)} over the graders' names"
    )
    invalid_grade: float = Field(
        0.0, ge=-MAX_REWARD, le=MAX_REWARD, description="reward of an answer on which a part or the formula fails"
    )

    @field_validator("calculate_output")
    @classmethod
    def formula_can_be_calculated(cls, formula: str, info: ValidationInfo) -> str:
        for name in info.data.get("graders", ()):
            if name in FUNCTIONS:
                raise ValueError(f"{name} is a function here: give the grader another name")
        if "graders" in info.data:
            for score in (0.25, 0.75):  # a part of the formula may have no value with one of them
                with suppress(NoValue):
                    calculate(formula, dict.fromkeys(info.data["graders"], score))
        return formula


GraderSpec = Annotated[
    StringCheckGrader | TextSimilarityGrader | PythonGrader | MathVerifyGrader | ReasoningGymGrader | MultiGrader,
    Field(discriminator="type"),
    BeforeValidator(_offered),
]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(GraderSpec)


def parse_grader(document: Any, where: str = "grader") -> GraderSpec:
    """The grader that a document describes. Raises InvalidRequest naming the first wrong field, under `where`."""
    try:
        return _ADAPTER.validate_python(document)
    except ValidationError as error:
        found = problems(error, GraderSpec, where)
        raise InvalidRequest(summary(found), param=found[0][0]) from error


def calculate(formula: str, scores: dict[str, float]) -> Number:
    """A multi grader's formula. Raises ValueError where it is none, NoValue where these scores give none."""
    return evaluate(formula, scores, FUNCTIONS, MAX_FORMULA)


def parts(grader: GraderSpec, where: str = "grader") -> Iterator[tuple[str, Any]]:
    """(its field, grader) of each grader that is no formula over others."""
    if isinstance(grader, MultiGrader):
        for name, part in grader.graders.items():
            yield f"{where}.graders.{name}", part
    else:
        yield where, grader
