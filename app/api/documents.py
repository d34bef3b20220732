"""What a client asks for when it creates a job, in OpenAI's words, and the job's own specification made of it.

OpenAI's fine-tuning job of method `reinforcement`, with what they have no word for beside it: `environment` in the
place of grader and training file, `sampling`, `lora`, `weight`, and GRPO's hyperparameters.
"""

from __future__ import annotations

import math
import re
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from app.api import ids
from app.api.blueprint import Body, invalid
from app.errors import InvalidRequest
from app.specs.grader import GraderSpec
from app.specs.job import (
    LEAST_TEMPERATURE,
    EnvironmentSpec,
    EvalSpec,
    HyperparametersSpec,
    JobSpec,
    LoraSpec,
    SamplingSpec,
    Text,
)

DEFAULTS = HyperparametersSpec()
DEFAULT_NAME = "job"
DEFAULT_EVALUATIONS = 10  # over a job with a validation file whose eval_interval is "auto"
H = "method.reinforcement.hyperparameters"
HOW = '{"type": "reinforcement", "reinforcement": {"grader": {…}, "hyperparameters": {…}}}'


def _each_or_auto(schema: dict[str, Any]) -> None:
    """Says in a model's schema that each of its fields may be "auto"."""
    for field in schema["properties"].values():
        own = {k: field.pop(k) for k in list(field) if k not in ("title", "description", "default")}
        field["anyOf"] = [*own.get("anyOf", [own]), {"const": "auto"}]


def unsaid(description: str, **bounds: Any) -> Any:
    """A hyperparameter in OpenAI's words: null is its default too."""
    return Field(None, description=description, **bounds)


class Hyperparameters(HyperparametersSpec):
    """OpenAI's names and GRPO's beside them; `"auto"` is each one's default. Where two names mean one thing they must
    not disagree."""

    model_config = ConfigDict(json_schema_extra=_each_or_auto)

    n_epochs: int | None = unsaid("passes over the training file, in place of n_steps", ge=1, le=1000)
    batch_size: int | None = unsaid("prompts_per_round by OpenAI's name", ge=1, le=4096)
    compute_multiplier: float | None = unsaid(f"times the default group size, {DEFAULTS.group_size}", gt=0, le=32)
    learning_rate_multiplier: float | None = unsaid(f"times the default, {DEFAULTS.learning_rate:g}", gt=0, le=10_000)
    eval_interval: int | None = unsaid("an evaluation every N steps; 0: never; auto: ten in all", ge=0, le=100_000)
    eval_samples: int | None = unsaid("answers to each prompt of an evaluation; auto: 1", ge=1, le=64)
    eval_prompts: int | None = unsaid("prompts of an evaluation; auto: all of them, at most 64", ge=1, le=4096)
    reasoning_effort: Literal["default"] | None = Field(None, description="for OpenAI's client; there is no other")
    max_tokens: int | None = Field(None, ge=1, le=32_768, description="as in sampling")
    temperature: float | None = Field(None, ge=LEAST_TEMPERATURE, le=2.0, description="as in sampling")

    @model_validator(mode="before")
    @classmethod
    def auto_is_the_default(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        return {k: v for k, v in fields.items() if v != "auto" or k not in cls.model_fields}

    @field_validator("minibatches")
    @classmethod
    def minibatches_have_groups(cls, minibatches: int, info: ValidationInfo) -> int:
        return minibatches  # batch_size may say how many groups: checked once both are known


OPENAI_NAMES = Hyperparameters.model_fields.keys() - HyperparametersSpec.model_fields.keys()


class Reinforcement(Body):
    grader: GraderSpec | None = Field(None, description="scores the answers to the training file's items")
    environment: EnvironmentSpec | None = Field(None, description="in place of grader and training file")
    hyperparameters: Hyperparameters = Hyperparameters()
    sampling: SamplingSpec | None = None
    lora: LoraSpec = LoraSpec()
    weight: float = Field(1.0, gt=0, le=100, description="share against the tenant's other jobs")

    @model_validator(mode="after")
    def task_comes_from_one_place(self) -> Reinforcement:
        if (self.grader is None) == (self.environment is None):
            raise ValueError("give either `grader` (and training_file) or `environment`")
        return self


def _only_reinforcement(value: Any) -> Any:
    if value in ("supervised", "dpo"):
        raise ValueError(f"{value!r} is not done here, reinforcement learning is: give method {HOW}")
    return value


class Method(Body):
    type: Annotated[Literal["reinforcement"], BeforeValidator(_only_reinforcement)]
    reinforcement: Reinforcement


class JobRequest(Body):
    model: Text = Field(min_length=1, max_length=128, description="a base model, as GET /v1/models lists them")
    training_file: str | None = Field(None, max_length=64, description="with `grader`; null or empty: none")
    validation_file: str | None = Field(None, max_length=64, description="held-out items for evaluations")
    suffix: str | None = Field(
        None, min_length=1, max_length=64, pattern=JobSpec.model_fields["name"].metadata[-1].pattern
    )
    seed: int | None = Field(None, ge=0, lt=2**31, description="null: one is drawn")
    metadata: dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]] | None = Field(
        None, max_length=16
    )
    method: Method

    @model_validator(mode="before")
    @classmethod
    def without_what_others_offer(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        if fields.get("method") is None:
            raise ValueError(f"method is required: {HOW}")
        if fields.get("hyperparameters"):
            raise ValueError(f"hyperparameters belong into {H}")
        if fields.get("integrations"):
            raise ValueError("integrations: there are none; leave it out")
        return {k: v for k, v in fields.items() if k not in ("hyperparameters", "integrations")}


@dataclass(frozen=True)
class DataFile:
    id: uuid.UUID
    lines: int


def parse_request(document: Any) -> JobRequest:
    """Raises InvalidRequest that names the first wrong field and tells the others."""
    try:
        return JobRequest.model_validate(document)
    except ValidationError as error:
        raise invalid(error, JobRequest) from error


def job_document(request: JobRequest, training: DataFile | None, validation: DataFile | None) -> dict[str, Any]:
    """The fields of a JobSpec, whose bounds are still to be checked. The files are those that the request names.

    Raises InvalidRequest naming the fields that contradict each other, or the one that is missing.
    """
    r, h = request.method.reinforcement, request.method.reinforcement.hyperparameters
    prompts = _either(h, "prompts_per_round", "batch_size", h.batch_size)
    steps = _steps(h, prompts, training)
    group_size = None if h.compute_multiplier is None else max(2, round(DEFAULTS.group_size * h.compute_multiplier))
    rate = None if h.learning_rate_multiplier is None else DEFAULTS.learning_rate * h.learning_rate_multiplier
    hyperparameters = h.model_dump(exclude=set(OPENAI_NAMES)) | {
        "n_steps": steps,
        "prompts_per_round": prompts,
        "group_size": _either(h, "group_size", "compute_multiplier", group_size),
        "learning_rate": _either(h, "learning_rate", "learning_rate_multiplier", rate),
    }
    return {
        "name": request.suffix or DEFAULT_NAME,
        "base_model": request.model,
        "environment": _environment(r, training, validation),
        "sampling": _sampling(r),
        "lora": r.lora.model_dump(),
        "hyperparameters": hyperparameters,
        "evaluation": _evaluation(h, steps, validation),
        "seed": secrets.randbelow(2**31) if request.seed is None else request.seed,
        "weight": r.weight,
        "metadata": request.metadata or {},
    }


def _either(h: Hyperparameters, name: str, other: str, meant: Any) -> Any:
    """The value of `name`, for which OpenAI's `other` may stand and means `meant`."""
    value = getattr(h, name)
    if meant is None:
        return value
    if name in h.model_fields_set and not math.isclose(value, meant):
        raise InvalidRequest(f"{H}.{other}: means {name} = {meant:g}, but {name} is {value:g}", param=f"{H}.{other}")
    return value if name in h.model_fields_set else meant


def _steps(h: Hyperparameters, prompts: int, training: DataFile | None) -> int:
    if h.n_epochs is None:
        return h.n_steps
    field = f"{H}.n_epochs"
    if "n_steps" in h.model_fields_set:
        raise InvalidRequest(f"{field}: give n_epochs or n_steps, not both", param=field)
    if training is None:
        raise InvalidRequest(f"{field}: an environment has no epochs; give n_steps", param=field)
    return math.ceil(h.n_epochs * training.lines / prompts)


def _sampling(r: Reinforcement) -> dict[str, Any]:
    """`sampling`, or the same two among the hyperparameters, where OpenAI's users look for them."""
    said = r.sampling.model_dump(include=r.sampling.model_fields_set) if r.sampling else {}
    for name in ("max_tokens", "temperature"):
        value = getattr(r.hyperparameters, name)
        if value is not None and said.setdefault(name, value) != value:
            raise InvalidRequest(
                f"{H}.{name}: is {value:g}, but sampling.{name} is {said[name]:g}", param=f"{H}.{name}"
            )
    return said


def _evaluation(h: Hyperparameters, steps: int, validation: DataFile | None) -> dict[str, Any]:
    most = EvalSpec().prompts
    every = h.eval_interval
    if every is None:
        every = max(1, steps // DEFAULT_EVALUATIONS) if validation else 0
    return {
        "every": every,
        "prompts": h.eval_prompts or (min(most, validation.lines) if validation else most),
        "samples": h.eval_samples or 1,
    }


def _environment(r: Reinforcement, training: DataFile | None, validation: DataFile | None) -> dict[str, Any]:
    if r.environment is not None:
        for field, file in (("training_file", training), ("validation_file", validation)):
            if file is not None:
                raise InvalidRequest(f"{field}: goes with a grader; an environment has its data itself", param=field)
        params = dict(r.environment.params)
        if r.environment.type == "dataset":
            params |= {f: plain_file_id(params[f]) for f in ("file_id", "eval_file_id") if f in params}
        return r.environment.model_dump() | {"params": params}
    if training is None:
        raise InvalidRequest(
            "training_file: a grader needs items to grade; upload a JSONL file (POST /v1/files) and give its id,"
            " or give method.reinforcement.environment",
            param="training_file",
        )
    assert r.grader is not None
    params = {"file_id": str(training.id), "grader": r.grader.model_dump(mode="json")}
    if validation is not None:
        params["eval_file_id"] = str(validation.id)
    return {"type": "dataset", "params": params}


def plain_file_id(value: Any) -> Any:
    """The UUID in `file-<hex>`; anything else as it is, for the specification's own check."""
    found = re.fullmatch(r"file-([0-9a-f]{32})", value) if isinstance(value, str) else None
    return str(uuid.UUID(found[1])) if found else value


# --- errors of the specification, told in the words of the request

_FIELDS = {
    "base_model": "model",
    "name": "suffix",
    "evaluation.every": f"{H}.eval_interval",
    "evaluation.prompts": f"{H}.eval_prompts",
    "evaluation.samples": f"{H}.eval_samples",
}
_NESTED = ("environment", "hyperparameters", "sampling", "lora", "weight")
_MENTION = re.compile(
    rf"(?<![\w.])(?:{'|'.join(_NESTED)}|evaluation)\.\w+(?:\.\w+)*|(?:^|(?<=; ))(?:base_model|name|weight)(?=: )"
)
_DATASET = re.compile(r"environment\.params(?:\.(\w+)(.*))?")
_FILES = {None: "training_file", "items": "training_file", "file_id": "training_file"}
_FILES |= {"eval_items": "validation_file", "eval_file_id": "validation_file"}


def request_field(field: str, with_grader: bool = False) -> str:
    """Where a client wrote a field of the specification; `with_grader`: with files and a grader, not an environment."""
    if with_grader and (found := _DATASET.fullmatch(field)):
        if found[1] == "grader":
            return f"method.reinforcement.grader{found[2]}"
        if found[1] in _FILES:
            return _FILES[found[1]]
    if field in _FIELDS:
        return _FIELDS[field]
    return f"method.reinforcement.{field}" if field.split(".")[0] in _NESTED else field


def words_of_request(message: str, with_grader: bool = False) -> str:
    """A message with the fields of the specification by the names that the request has for them."""
    return _MENTION.sub(lambda found: request_field(found[0], with_grader), message)


def in_words_of_request(error: InvalidRequest, with_grader: bool = False) -> InvalidRequest:
    message = words_of_request(error.message, with_grader)
    return InvalidRequest(message, param=error.param and request_field(error.param, with_grader), code=error.code)


def named_field(message: str, with_grader: bool = False) -> str | None:
    """The request's name of the field that a message on a specification begins with."""
    found = _MENTION.match(message)
    return request_field(found[0], with_grader) if found and message.startswith(": ", found.end()) else None


# --- a job's specification as a client would have asked for it


@dataclass(frozen=True)
class Asked:
    """The request that makes this very specification, but for the model and the suffix."""

    training_file: str  # empty: the job has an environment
    validation_file: str | None
    method: dict[str, Any]


def has_grader(spec: JobSpec) -> bool:
    """Whether a request says it with `grader` and files, rather than with `environment`."""
    params = spec.environment.params
    plain = spec.environment == EnvironmentSpec(type="dataset", params=params) and "file_id" in params
    return plain and params.keys() <= {"file_id", "eval_file_id", "grader"}


def asked_for(spec: JobSpec) -> Asked:
    """A request of these fields makes the same specification again, whoever made the job and how."""
    reinforcement: dict[str, Any] = {
        "hyperparameters": hyperparameters_of(spec),
        "sampling": spec.sampling.model_dump(mode="json"),
        "lora": spec.lora.model_dump(mode="json"),
        "weight": spec.weight,
    }
    params = spec.environment.params
    if has_grader(spec):
        reinforcement["grader"] = params["grader"]
        files = [ids.file_id(uuid.UUID(params[f])) if params.get(f) else None for f in ("file_id", "eval_file_id")]
    else:
        reinforcement["environment"] = spec.environment.model_dump(mode="json")
        files = ["", None]
    return Asked(files[0] or "", files[1], {"type": "reinforcement", "reinforcement": reinforcement})


def hyperparameters_of(spec: JobSpec) -> dict[str, Any]:
    h = spec.hyperparameters
    return h.model_dump(mode="json") | {
        "batch_size": h.prompts_per_round,
        "compute_multiplier": h.group_size / DEFAULTS.group_size,
        "learning_rate_multiplier": h.learning_rate / DEFAULTS.learning_rate,
        "eval_interval": spec.evaluation.every,
        "eval_samples": spec.evaluation.samples,
        "eval_prompts": spec.evaluation.prompts,
        "reasoning_effort": "default",
    }
