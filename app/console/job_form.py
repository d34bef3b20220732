"""The form of a new job, made from the models that check it: every option of a job, with its bounds and its words."""

from __future__ import annotations

import json
import types
import typing
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from app.specs.environment import BUILT_IN, DatasetSource
from app.specs.job import (
    LINEAR_LAYERS,
    LORA_RANKS,
    EnvironmentSpec,
    EvalSpec,
    HyperparametersSpec,
    JobSpec,
    LoraSpec,
    PreflightSpec,
    SamplingSpec,
)
from app.specs.problems import problems

Kind = Literal["int", "number", "text", "choice", "checks", "yaml", "lines", "pair", "file"]
PARAMS: dict[str, type[BaseModel]] = {**BUILT_IN, "dataset": DatasetSource}
OTHER = "other"  # an environment of the operator's own, which alone knows its parameters
WHOLE = ""  # errors that belong to no field


LABELS = {
    "hyperparameters.n_steps": "Steps",
    "evaluation.every": "Evaluate every",
    "params.dataset.file_id": "Training file",
    "params.dataset.eval_file_id": "Held-out file",
    "params.dataset.items": "Items",
    "params.dataset.eval_items": "Held-out items",
    "hyperparameters.tis_cap": "TIS cap",
    "hyperparameters.kl_coefficient": "KL coefficient",
}

NAME_RULE = "takes letters, digits, dot, dash and underscore, a letter or digit first"

# What is said of a dataset's parameters names the API's fields and the command line; beside the form's own fields and
# its upload it is said so: (path, part of the saying, words of the form).
FORM_WORDS = (
    ("environment.params", "give either `file_id`", "choose a training file, upload one, or write the items below"),
    ("environment.params", "give `eval_file_id`", "choose a held-out file or write held-out items, not both"),
    ("environment.params", "upload the items", "the items are too large for the form; upload them as a file"),
    ("environment.params.file_id", "no file", "is no file of this tenant any more; choose or upload another one"),
    ("environment.params.eval_file_id", "no file", "is no file of this tenant any more; choose another one"),
)

# Words where the model's own name or description is not enough in a form.
HELP = {
    "name": "letters, digits, dot, dash, underscore; also the suffix of the model's name",
    "seed": "the same seed draws the same prompts and the same random numbers",
    "metadata": "a name: value pair a line, for your own use",
    "sampling.temperature": "of training rollouts; the full softmax is sampled",
    "lora.rank": "size of the adapter; what the engines serve",
    "lora.alpha": "the adapter is scaled by alpha / rank",
    "lora.target_modules": "linear layers that are adapted",
    "environment.max_turns": "most generations of one episode: a tool call and the answer to it are two",
    "environment.call_timeout_seconds": "deadline of one call of the environment or grader",
    "hyperparameters.prompts_per_round": "prompts of one update",
    "hyperparameters.learning_rate": "of AdamW; 1e-4 suits adapters of rank 8 to 32",
    "hyperparameters.max_grad_norm": "the gradient is clipped to this norm",
    "hyperparameters.clip_low": "ratios below 1 − this are clipped",
    "hyperparameters.clip_high": "ratios above 1 + this are clipped",
    "evaluation.prompts": "held-out prompts of one evaluation",
    "evaluation.samples": "answers to each of them",
    "preflight.prompts": "training prompts",
    "params.dataset.file_id": "the uploaded file with the training items",
    "params.dataset.eval_file_id": "held-out items; none: a fifth of the training items is held out",
    "params.dataset.items": "instead of a file: JSON Lines, each with `messages` and further fields",
    "params.dataset.eval_items": "instead of a held-out file: JSON Lines",
    "params.dataset.grader": "YAML or JSON; templates read {{ item.* }} and {{ sample.output_text }}",
    "hyperparameters.tis_cap": "cap of trainer/engine importance weights; empty: off",
    "params.reasoning_gym.train_size": "most different training items; empty: no limit",
    "params.reasoning_gym.system": "system message; empty: none",
    "params.calculator.system": "system message; empty: none",
    "params.calculator.operators": "of the questions",
    "params.calculator.max_operand": "largest number in a question",
    "params.calculator.terms": "numbers in a question",
}


@dataclass(frozen=True)
class FormField:
    name: str  # in the form: the path in the job's document; parameters of an environment as params.<type>.<field>
    label: str
    kind: Kind
    default: Any
    required: bool
    help: str = ""
    choices: tuple[str, ...] = ()
    bounds: Mapping[str, float] = field(default_factory=dict)  # ge, gt, le, lt
    nullable: bool = False

    @property
    def label_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def placeholder(self) -> str:
        return "" if self.default is None else show(self.default, self.kind)

    @property
    def step(self) -> str:
        return "1" if self.kind == "int" else "any"


@dataclass(frozen=True)
class FormGroup:
    title: str
    hint: str
    fields: tuple[FormField, ...]
    folded: bool = False


def fields_of(model: type[BaseModel], prefix: str = "", *, leave: Sequence[str] = ()) -> tuple[FormField, ...]:
    """The fields of a specification that a form can show, in the order of their definition."""
    return tuple(_field(prefix + name, info) for name, info in model.model_fields.items() if name not in leave)


def _field(name: str, info: FieldInfo) -> FormField:
    kind, choices, nullable = _kind(name, info.annotation)
    default = None if info.default is PydanticUndefined else info.default
    if info.default_factory is not None:
        default = info.get_default(call_default_factory=True)
    bounds = {b: getattr(m, b) for m in info.metadata for b in ("ge", "gt", "le", "lt") if hasattr(m, b)}
    label = name.rsplit(".", 1)[-1].replace("_", " ")
    return FormField(
        name=name,
        label=LABELS.get(name) or label[:1].upper() + label[1:],
        kind=kind,
        default=default,
        required=info.is_required(),
        help=HELP.get(name) or info.description or "",
        choices=choices,
        bounds=bounds,
        nullable=nullable,
    )


def _kind(name: str, annotation: Any) -> tuple[Kind, tuple[str, ...], bool]:
    """How a field is shown, its choices, and whether it may be left empty for null."""
    if name == "lora.rank":
        return "choice", tuple(map(str, LORA_RANKS)), False
    if name == "lora.target_modules":
        return "checks", LINEAR_LAYERS, False
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return _kind(name, arguments[0])
    if origin in (types.UnionType, typing.Union) and type(None) in arguments:
        (inner,) = [a for a in arguments if a is not type(None)][:1]
        kind, choices, _ = _kind(name, inner)
        return kind, choices, True
    if origin is Literal:
        return "choice", tuple(map(str, arguments)), False
    if origin is tuple and len(arguments) == 2 and arguments[1] is not Ellipsis:
        return "pair", (), False
    if origin is tuple:
        return "checks", tuple(map(str, get_args(arguments[0]))), False
    if origin is list:
        return "lines", (), False
    plain: dict[Any, Kind] = {int: "int", float: "number", str: "text", uuid.UUID: "file"}
    return plain.get(annotation, "yaml"), (), False


_H = fields_of(HyperparametersSpec, "hyperparameters.")
_BASIC = ("n_steps", "prompts_per_round", "group_size", "learning_rate")
_JOB = {f.name: f for f in fields_of(JobSpec)}
_ENVIRONMENT = {f.name: f for f in fields_of(EnvironmentSpec, "environment.")}

BASICS = (_JOB["name"], _JOB["base_model"])
TURNS = (_ENVIRONMENT["environment.max_turns"], _ENVIRONMENT["environment.call_timeout_seconds"])
ENVIRONMENTS = {
    kind: tuple(replace(f, required=False) for f in fields_of(model, f"params.{kind}."))
    for kind, model in PARAMS.items()
}
SAMPLING = fields_of(SamplingSpec, "sampling.")
GROUPS = (
    FormGroup(
        "Training",
        "Each step samples prompts × group size answers and makes one version.",
        (*(f for f in _H if f.label_name in _BASIC), *SAMPLING),
    ),
    FormGroup(
        "Evaluation", "Rounds on held-out prompts; they never hold up training.", fields_of(EvalSpec, "evaluation.")
    ),
    FormGroup("Adapter", "LoRA on the linear layers.", fields_of(LoraSpec, "lora."), folded=True),
    FormGroup(
        "Optimizer and loss",
        "GRPO's own settings; the defaults suit most jobs.",
        tuple(f for f in _H if f.label_name not in _BASIC),
        folded=True,
    ),
    FormGroup(
        "Preflight",
        "What is tried with the base model before the job is created.",
        fields_of(PreflightSpec, "preflight."),
        folded=True,
    ),
    FormGroup("Share, seed and notes", "", (_JOB["seed"], _JOB["weight"], _JOB["metadata"]), folded=True),
)
OTHER_FIELDS = (
    FormField("other.type", "Name", "text", None, False, "as the module in MARLAAS_ENVIRONMENT_MODULES registers it"),
    FormField("other.params", "Parameters", "yaml", None, False, "YAML or JSON"),
)
FIELDS = {
    f.name: f
    for f in (
        *BASICS,
        *TURNS,
        *(f for g in GROUPS for f in g.fields),
        *(f for e in ENVIRONMENTS.values() for f in e),
        *OTHER_FIELDS,
    )
}

Values = dict[str, str | list[str]]  # as a form holds them


# --- from a document to the form


def show(value: Any, kind: Kind) -> str:
    """A value as its input shows it."""
    if value is None:
        return ""
    if kind == "lines":
        return "\n".join(json.dumps(item, ensure_ascii=False) for item in value)
    if kind == "yaml":
        plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).strip() if plain else ""
    if kind in ("pair", "checks"):
        return ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value)
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


def values_of(document: Mapping[str, Any]) -> Values:
    """The form filled with a job's document; what the document leaves out has its default."""
    environment = document.get("environment", {})
    kind = str(environment.get("type", "reasoning_gym"))
    values: Values = {"environment.type": kind if kind in PARAMS else OTHER}
    other = {} if kind in PARAMS else {"other.type": kind, "other.params": environment.get("params")}
    for name, f in FIELDS.items():
        if name.startswith("other."):
            value = other.get(name)
        else:
            value = _param(environment, kind, name, f) if name.startswith("params.") else _at(document, name)
        values[name] = [str(v) for v in value or ()] if f.kind == "checks" else show(value, f.kind)
    return values


def _at(document: Mapping[str, Any], name: str) -> Any:
    here: Any = document
    for part in name.split("."):
        if not isinstance(here, Mapping) or part not in here:
            return FIELDS[name].default
        here = here[part]
    return here


def _param(environment: Mapping[str, Any], kind: str, name: str, f: FormField) -> Any:
    _, of, param = name.split(".", 2)
    return environment.get("params", {}).get(param, f.default) if of == kind else f.default


# --- from the form to a document


@dataclass(frozen=True)
class Filled:
    """A form that was sent: the document it makes (only what differs from the defaults), and what is wrong with it."""

    values: Values
    document: dict[str, Any]
    spec: JobSpec | None
    errors: dict[str, list[str]]  # by form field; WHOLE: of no field

    def with_error(self, param: str | None, message: str) -> Filled:
        errors = {name: list(told) for name, told in self.errors.items()}
        where = form_name(param or "", str(self.values["environment.type"]))
        errors.setdefault(where, []).append(in_form_words(param or "", message))
        return replace(self, errors=errors)


def read(sent: Mapping[str, list[str]]) -> Filled:
    """`sent`: the values of each form field. Nothing is raised: what is wrong stands beside its field."""
    kind = (sent.get("environment.type") or ["reasoning_gym"])[0]
    values: Values = {"environment.type": kind}
    document: dict[str, Any] = {"environment": {"type": kind, "params": {}}}
    errors: dict[str, list[str]] = {}
    for name, f in FIELDS.items():
        given = sent.get(name, [])
        values[name] = given if f.kind == "checks" else (given[0] if given else "")
        if name.startswith(("params.", "other.")) and not name.startswith((f"params.{kind}.", f"{kind}.")):
            continue
        try:
            value = _parse(f, given)
        except ValueError as error:
            errors.setdefault(name, []).append(str(error))
            continue
        if value is not _LEFT_OUT and not _same(value, f.default):
            _put(document, name, value)
    if not document["environment"]["params"]:
        del document["environment"]["params"]
    spec = _check(document, kind, errors)
    return Filled(values, document, spec, errors)


_LEFT_OUT = object()


def _parse(f: FormField, given: Sequence[str]) -> Any:
    """The value of an input. A number that is none stays a text: the model says what is wrong. Raises ValueError."""
    if f.kind == "checks":
        return list(given)
    text = given[0].strip() if given else ""
    if not text:
        return None if f.nullable and f.default is not None and given else _LEFT_OUT
    if f.kind in ("int", "number") or f.name == "lora.rank":
        return _number(text, f.kind)
    if f.kind == "pair":
        return [_number(part.strip(), "number") for part in text.replace(" to ", ",").split(",")]
    if f.kind == "yaml":
        return _yaml(text)
    if f.kind == "lines":
        return [_json_line(line, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return text


def _number(text: str, kind: Kind) -> Any:
    try:
        return float(text) if kind == "number" else int(text)
    except ValueError:
        return text


def _yaml(text: str) -> Any:
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("aliases (*name) are not taken; write the value out")  # they could grow without bound
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"is not YAML: {' '.join(str(error).split())[:200]}") from error


def _json_line(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number} is not JSON: {error}") from error


def _same(value: Any, default: Any) -> bool:
    return value == (list(default) if isinstance(default, tuple) else default)


def _put(document: dict[str, Any], name: str, value: Any) -> None:
    path = name.split(".")
    if path[0] == "params":
        path = ["environment", "params", *path[2:]]
    elif path[0] == OTHER:
        path[0] = "environment"
    here = document
    for part in path[:-1]:
        here = here.setdefault(part, {})
    here[path[-1]] = value


def _check(document: dict[str, Any], kind: str, errors: dict[str, list[str]]) -> JobSpec | None:
    spec = None
    found: list[tuple[str, str]] = []
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        found += problems(error, JobSpec)
    if model := PARAMS.get(kind):
        try:
            model.model_validate(document["environment"].get("params", {}))
        except ValidationError as error:
            found += problems(error, model, "environment", "params")
    for path, what in found:
        told = errors.setdefault(form_name(path, kind), [])
        if not told:  # what could not be read needs no second complaint
            told.append(NAME_RULE if path == "name" and "pattern" in what else in_form_words(path, what))
    return None if errors else spec


def in_form_words(path: str, what: str) -> str:
    return next((words for at, part, words in FORM_WORDS if at == path and part in what), what)


# Where what is wrong with parameters as a whole is told.
_SPEAKS_FOR = {"params.dataset": "params.dataset.file_id", "params.calculator": "params.calculator.latency_seconds"}


def form_name(path: str, kind: str) -> str:
    """The form's field at or above a path of the document; WHOLE where there is none."""
    if kind == OTHER and path.startswith(("environment.type", "environment.params")):
        path = path.replace("environment", OTHER, 1)
    if path.startswith("environment.params"):
        path = path.replace("environment.params", f"params.{kind}", 1)
    while path and path not in FIELDS and path not in ("tenant", "environment.type"):
        if path in _SPEAKS_FOR:
            return _SPEAKS_FOR[path]
        path = path.rpartition(".")[0]
    return path or WHOLE
