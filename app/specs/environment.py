"""Parameters of the built-in environments, checked field by field where a job is made and again where it runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from app.errors import InvalidRequest
from app.specs.grader import GraderSpec
from app.specs.job import Spec

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


BUILT_IN: dict[str, type[BaseModel]] = {
    "reasoning_gym": ReasoningGymParams,
    "calculator": CalculatorParams,
    "dataset": DatasetParams,
}


def parse_params(model: type[Params], params: dict[str, Any]) -> Params:
    """Checks `params`. Raises InvalidRequest naming the first wrong field as `environment.params.<field>`."""
    try:
        return model.model_validate(params)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, ("environment", "params", *first["loc"])))
        known = f"; known fields: {', '.join(model.model_fields)}" if first["type"] == "extra_forbidden" else ""
        raise InvalidRequest(f"{field}: {first['msg']}{known}", param=field) from error
