"""`/v1/fine_tuning/alpha/graders`: try a grader before a job is given it."""

from __future__ import annotations

from typing import Any

import pydantic

from app.api.auth import caller, requires
from app.api.blueprint import Body, api
from app.manager import grading
from app.specs.grader import GraderSpec, MultiGrader, PythonGrader, parts
from app.specs.job import Text

MAX_SAMPLE = 256 << 10  # characters


class ValidateRequest(Body):
    grader: GraderSpec


class RunRequest(Body):
    grader: GraderSpec
    model_sample: Text = pydantic.Field(
        max_length=MAX_SAMPLE,
        description="the answer to grade: sample.output_text, and sample.output_json if it is JSON",
    )
    item: dict[str, Any] = pydantic.Field(default_factory=dict, description="a line of the data, as item.*")


class ValidatedGrader(pydantic.BaseModel):
    grader: GraderSpec = pydantic.Field(description="as it is understood, defaults filled in")


class GraderErrors(pydantic.BaseModel):
    """What went wrong, one flag true; judges are not offered, so those of model graders never are."""

    formula_parse_error: bool = False
    sample_parse_error: bool = False
    truncated_observation_error: bool = False
    unresponsive_reward_error: bool = False
    invalid_variable_error: bool = False
    other_error: bool = False
    python_grader_server_error: bool = False
    python_grader_server_error_type: str | None = None
    python_grader_runtime_error: bool = False
    python_grader_runtime_error_details: str | None = None
    model_grader_server_error: bool = False
    model_grader_server_error_details: str | None = None
    model_grader_refusal_error: bool = False
    model_grader_parse_error: bool = False
    message: str | None = pydantic.Field(None, description="the error in words, whichever it is")


class GraderMetadata(pydantic.BaseModel):
    name: str
    type: str
    errors: GraderErrors
    execution_time: float = pydantic.Field(description="seconds")
    scores: dict[str, float] = pydantic.Field(description="of a multi grader's parts")
    token_usage: int | None = None
    sampled_model_name: str | None = None


class GraderRun(pydantic.BaseModel):
    reward: float
    sub_rewards: dict[str, float] = pydantic.Field(description="of a multi grader's parts")
    model_grader_token_usage_per_model: dict[str, Any]
    metadata: GraderMetadata


@api.post("/fine_tuning/alpha/graders/validate")
@requires("write")
@api.input(ValidateRequest, arg_name="body")
@api.output(ValidatedGrader)
def validate_grader(body: ValidateRequest) -> dict[str, Any]:
    """Validate a grader

    An error names the field. Python sources are loaded in the sandbox, by a tools worker.
    """
    if any(isinstance(part, PythonGrader) for _, part in parts(body.grader)):
        grading.check_grader(caller().tenant_id, body.grader)
    return {"grader": body.grader.model_dump(mode="json")}


@api.post("/fine_tuning/alpha/graders/run")
@requires("write")
@api.input(RunRequest, arg_name="body")
@api.output(GraderRun)
def run_grader(body: RunRequest) -> dict[str, Any]:
    """Run a grader on an answer

    Where the grader fails, the reward is the one that the answer would train with, and `metadata.errors` tells why.
    """
    grader = body.grader
    answer = grading.run_grader(caller().tenant_id, grader, body.item, body.model_sample)
    value = answer.get("value") or {"reward": _invalid_grade(grader), "scores": {}}
    metadata = GraderMetadata(
        name=grader.name,
        type=grader.type,
        errors=_errors(grader, answer),
        execution_time=answer["seconds"],
        scores=value["scores"],
    )
    return GraderRun(
        reward=value["reward"],
        sub_rewards=value["scores"],
        model_grader_token_usage_per_model={},
        metadata=metadata,
    ).model_dump(mode="json")


def _errors(grader: GraderSpec, answer: dict[str, Any]) -> GraderErrors:
    if failed := answer.get("failed"):
        if not any(isinstance(part, PythonGrader) for _, part in parts(grader)):
            return GraderErrors(other_error=True, message=failed["message"])
        return GraderErrors(
            python_grader_server_error=True, python_grader_server_error_type=failed["type"], message=failed["message"]
        )
    failure = answer["value"]["failure"]
    if failure is None:
        return GraderErrors()
    errors = GraderErrors.model_validate({failure["flag"]: True, "message": failure["message"]})
    if errors.python_grader_runtime_error:
        errors.python_grader_runtime_error_details = failure["message"]
    return errors


def _invalid_grade(grader: GraderSpec) -> float:
    return grader.invalid_grade if isinstance(grader, MultiGrader) else 0.0
