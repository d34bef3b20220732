"""Parameters of the built-in environments, checked field by field where a job is made and again where it runs."""

from __future__ import annotations

import json
import uuid
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from app.errors import InvalidRequest
from app.specs.dataset import check_item
from app.specs.grader import GraderSpec
from app.specs.job import EnvironmentSpec, Spec
from app.specs.problems import problems, summary
from app.specs.reasoning_gym import TASKS

Params = TypeVar("Params", bound=BaseModel)
Seconds = Annotated[float, Field(ge=0, le=60)]


class ReasoningGymParams(Spec):
    task: str = Field(min_length=1, description="name of a reasoning-gym dataset")
    config: dict[str, Any] = Field(default_factory=dict, description="fields of that dataset's own config")
    shots: int = Field(0, ge=0, le=16, description="solved examples before the question")
    system: str | None = "Answer with the final answer only."
    reward: Literal["exact", "score"] = Field("exact", description="1 for a full score, or the library's own score")
    train_size: int | None = Field(None, ge=1, description="most different training items; null: no limit")


class CalculatorParams(Spec):
    operators: tuple[Literal["+", "-", "*"], ...] = Field(("+", "-", "*"), min_length=1)
    max_operand: int = Field(99, ge=9, le=10**6)
    terms: int = Field(2, ge=2, le=8)
    shots: int = Field(2, ge=0, le=8, description="tool dialogues shown before the question")
    latency_seconds: tuple[Seconds, Seconds] = Field((0.3, 2.0), description="the tool's latency, from and to")
    system: str | None = "Use the calculator for every question. Then answer with its result only."

    @model_validator(mode="after")
    def latency_is_a_range(self) -> CalculatorParams:
        if self.latency_seconds[0] > self.latency_seconds[1]:
            raise ValueError("latency_seconds must be [low, high]")
        return self


class DatasetParams(Spec):
    items: list[dict[str, Any]] = Field(min_length=1, description="JSONL lines: `messages` and further fields")
    eval_items: list[dict[str, Any]] | None = Field(None, description="held-out lines; null: a fifth of the items")
    grader: GraderSpec


class DatasetSource(Spec):
    """The dataset environment as a job names it: lines of its own, or an uploaded file's id in their place."""

    items: list[dict[str, Any]] | None = Field(None, min_length=1)
    file_id: uuid.UUID | None = None
    eval_items: list[dict[str, Any]] | None = Field(None, min_length=1)
    eval_file_id: uuid.UUID | None = None
    grader: GraderSpec

    @model_validator(mode="after")
    def lines_come_from_one_place(self) -> DatasetSource:
        if (self.items is None) == (self.file_id is None):
            raise ValueError("give either `file_id` (see `marlaas file upload`) or `items`")
        if self.eval_items is not None and self.eval_file_id is not None:
            raise ValueError("give `eval_file_id` or `eval_items`, not both")
        return self


BUILT_IN: dict[str, type[BaseModel]] = {
    "reasoning_gym": ReasoningGymParams,
    "calculator": CalculatorParams,
    "dataset": DatasetParams,
}

MIN_TURNS = {"calculator": 2}  # generations that a solved episode takes at least; of the others: 1

# Lines in a job's own document, which is read at every claim; more belong into a file.
MAX_PARAMS_BYTES = 256 << 10


def parse_params(model: type[Params], params: dict[str, Any]) -> Params:
    """Checks `params`. Raises InvalidRequest naming the first wrong field as `environment.params.<field>`."""
    try:
        return model.model_validate(params)
    except ValidationError as error:
        found = problems(error, model, "environment", "params")
        raise InvalidRequest(summary(found), param=found[0][0]) from error


def check_environment(spec: EnvironmentSpec, call_seconds: float, *, plugins: bool) -> DatasetSource | None:
    """Checks all of an environment's specification that can be known without running it; returns a dataset's source.

    `call_seconds`: the service's upper bound of one call. `plugins`: whether the operator has environments of their
    own, which alone know their parameters. Raises InvalidRequest naming the field.
    """
    size = len(json.dumps(spec.params))
    if size > MAX_PARAMS_BYTES:
        raise InvalidRequest(
            f"environment.params: {size} bytes are more than {MAX_PARAMS_BYTES}; upload the items with"
            " `marlaas file upload` and give environment.params.file_id",
            param="environment.params",
        )
    if spec.type not in BUILT_IN:
        if plugins:
            return None
        raise InvalidRequest(
            f"environment.type: unknown environment {spec.type!r}; known: {', '.join(sorted(BUILT_IN))}",
            param="environment.type",
        )
    turns = MIN_TURNS.get(spec.type, 1)
    if spec.max_turns < turns:
        raise InvalidRequest(
            f"environment.max_turns: {spec.type} takes at least {turns} turns, not {spec.max_turns}",
            param="environment.max_turns",
        )
    if spec.type == "dataset":
        return _check_source(parse_params(DatasetSource, spec.params))
    params = parse_params(BUILT_IN[spec.type], spec.params)
    if isinstance(params, ReasoningGymParams):
        _check_task(params.task)
    if isinstance(params, CalculatorParams):
        _check_latency(params, min(spec.call_timeout_seconds, call_seconds))
    return None


def _check_source(source: DatasetSource) -> DatasetSource:
    for field, items in (("items", source.items), ("eval_items", source.eval_items)):
        for number, item in enumerate(items or (), start=1):
            try:
                check_item(item, number)
            except InvalidRequest as error:
                field = f"environment.params.{field}"
                raise InvalidRequest(f"{field}: {error.message}", param=field) from error
    return source


def _check_task(task: str) -> None:
    if task not in TASKS:
        field = "environment.params.task"
        hint = ", ".join(get_close_matches(task, TASKS) or sorted(TASKS))
        raise InvalidRequest(f"{field}: reasoning_gym has no dataset {task!r}; it has {hint}", param=field)


def _check_latency(params: CalculatorParams, most: float) -> None:
    if params.latency_seconds[1] >= most:
        field = "environment.params.latency_seconds"
        raise InvalidRequest(
            f"{field}: up to {params.latency_seconds[1]:g} s, but a call ends after {most:g} s; lower it or raise"
            " environment.call_timeout_seconds",
            param=field,
        )
