"""What clients ask for in OpenAI's words becomes a job's specification, and back."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from app.api import ids
from app.api.documents import (
    DataFile,
    Hyperparameters,
    JobRequest,
    asked_for,
    in_words_of_request,
    job_document,
    named_field,
    parse_request,
)
from app.errors import InvalidRequest
from app.manager.jobs import parse_spec
from app.specs.job import HyperparametersSpec, JobSpec

TRAINING = DataFile(uuid.UUID(int=1), lines=100)
VALIDATION = DataFile(uuid.UUID(int=2), lines=10)
GRADER = {
    "type": "string_check",
    "name": "exact",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
    "operation": "eq",
}
CALCULATOR = {"type": "calculator", "params": {"terms": 3}, "max_turns": 4, "call_timeout_seconds": 20.0}
DEFAULTS = HyperparametersSpec()


def request(hyperparameters: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """With a grader; `environment=` takes its place, and changes of the method's other parts go there too."""
    reinforcement: dict[str, Any] = {"hyperparameters": hyperparameters or {}}
    for part in ("grader", "environment", "sampling", "lora", "weight"):
        if part in changes:
            reinforcement[part] = changes.pop(part)
    if "environment" not in reinforcement:
        reinforcement.setdefault("grader", GRADER)
    return {"model": "tiny", "method": {"type": "reinforcement", "reinforcement": reinforcement}} | changes


def spec(document: dict[str, Any], training: DataFile | None = TRAINING, validation: DataFile | None = None) -> JobSpec:
    return parse_spec(job_document(parse_request(document), training, validation))


def refused(document: Any, training: DataFile | None = TRAINING, validation: DataFile | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        spec(document, training, validation)
    return in_words_of_request(caught.value)


def test_a_grader_and_a_file_are_a_dataset_environment() -> None:
    made = spec(request(), validation=VALIDATION).environment
    assert made.type == "dataset"
    assert made.params["file_id"] == str(TRAINING.id) and made.params["eval_file_id"] == str(VALIDATION.id)
    assert made.params["grader"]["reference"] == "{{ item.answer }}"


def test_what_is_not_said_has_the_defaults() -> None:
    made = spec(request())
    assert made.hyperparameters == DEFAULTS and made.evaluation.every == 0


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [
        ({"batch_size": 6}, "prompts_per_round", 6),
        ({"batch_size": 6, "prompts_per_round": 6}, "prompts_per_round", 6),
        ({"compute_multiplier": 2.0}, "group_size", 16),
        ({"compute_multiplier": 0.1}, "group_size", 2),
        ({"learning_rate_multiplier": 0.5}, "learning_rate", 5e-5),
        ({"n_epochs": 2}, "n_steps", 50),
        ({"n_epochs": 1, "batch_size": 3}, "n_steps", 34),
        ({"kl_coefficient": 0.1}, "kl_coefficient", 0.1),
        ({"tis_cap": None}, "tis_cap", None),
        ({"batch_size": "auto", "n_epochs": "auto", "compute_multiplier": "auto"}, "group_size", DEFAULTS.group_size),
        ({"minibatches": 6, "batch_size": 6}, "minibatches", 6),
    ],
)
def test_hyperparameters_in_openais_words(said: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(spec(request(said)).hyperparameters, field) == value


@pytest.mark.parametrize("field", Hyperparameters.model_fields)
def test_every_hyperparameter_may_be_auto(field: str) -> None:
    assert spec(request({field: "auto"}, seed=1)) == spec(request(seed=1))
    schema = JobRequest.model_json_schema()["$defs"]["Hyperparameters"]["properties"][field]
    assert {"const": "auto"} in schema["anyOf"]


def test_a_validation_file_is_evaluated_ten_times_by_default() -> None:
    made = spec(request({"n_steps": 30}), validation=VALIDATION).evaluation
    assert (made.every, made.prompts, made.samples) == (3, 10, 1)


def test_evaluation_as_it_is_asked_for() -> None:
    said = {"eval_interval": 5, "eval_samples": 2, "eval_prompts": 7}
    made = spec(request(said), validation=VALIDATION).evaluation
    assert (made.every, made.prompts, made.samples) == (5, 7, 2)


def test_sampling_may_stand_among_the_hyperparameters() -> None:
    made = spec(request({"max_tokens": 9}, sampling={"temperature": 0.5})).sampling
    assert (made.max_tokens, made.temperature) == (9, 0.5)


def test_an_environment_takes_the_place_of_grader_and_file() -> None:
    made = spec(request(environment=CALCULATOR, training_file=""), training=None)
    assert made.environment.model_dump(mode="json") == CALCULATOR


def test_a_dataset_environment_names_files_as_the_api_does() -> None:
    params = {"file_id": ids.file_id(TRAINING.id), "grader": GRADER}
    made = spec(request(environment={"type": "dataset", "params": params}), training=None)
    assert made.environment.params["file_id"] == str(TRAINING.id)


def test_a_seed_is_drawn_where_none_is_given() -> None:
    assert spec(request(seed=7)).seed == 7
    assert len({spec(request()).seed for _ in range(8)}) > 1


H = "method.reinforcement.hyperparameters"


@pytest.mark.parametrize(
    ("document", "param", "words"),
    [
        ({"model": "tiny"}, None, "method is required"),
        ({"model": "tiny", "method": {"type": "dpo", "dpo": {}}}, "method.type", "reinforcement learning is"),
        ({"model": "tiny", "method": {"type": "supervised"}}, "method.type", "'supervised' is not done here"),
        ([], None, "valid dictionary"),
        (request(training_fil="x"), "training_fil", "did you mean 'training_file'"),
        (request(suffix="a b"), "suffix", "pattern"),
        (request(suffix=""), "suffix", "at least 1 character"),
        (request(seed=-1), "seed", "at least 0"),
        (request(metadata={"k": 1}), "metadata.k", "string"),
        (request(metadata={"k": "a\0"}), "metadata.k", "NUL"),
        (request(integrations=[{"type": "wandb"}]), None, "integrations"),
        (request() | {"hyperparameters": {"n_epochs": 3}}, None, f"belong into {H}"),
        (request({"group_size": 1}), f"{H}.group_size", "at least 2, not 1"),
        (request({"batch_size": 0}), f"{H}.batch_size", "at least 1, not 0"),
        (request({"n_step": 5}), f"{H}.n_step", "did you mean 'n_steps'"),
        (request({"learning_rate": "fast"}), f"{H}.learning_rate", "valid number"),
        (request({"n_step": "auto"}), f"{H}.n_step", "did you mean 'n_steps'"),
        (request({"learning_rate": float("nan")}), f"{H}.learning_rate", "finite"),
        (request({"reasoning_effort": "high"}), f"{H}.reasoning_effort", "default"),
        (request({"n_epochs": 1, "n_steps": 5}), f"{H}.n_epochs", "not both"),
        (request({"batch_size": 2, "prompts_per_round": 4}), f"{H}.batch_size", "prompts_per_round is 4"),
        (request({"compute_multiplier": 2, "group_size": 4}), f"{H}.compute_multiplier", "group_size is 4"),
        (request({"learning_rate_multiplier": 2, "learning_rate": 0.1}), f"{H}.learning_rate_multiplier", "is 0.1"),
        (request({"minibatches": 8}), f"{H}.minibatches", "must not exceed prompts_per_round, which is 4"),
        (request({"max_tokens": 4}, sampling={"max_tokens": 5}), f"{H}.max_tokens", "sampling.max_tokens is 5"),
        (request(lora={"rank": 3}), "method.reinforcement.lora.rank", "one of 1, 8"),
        (request(grader={"type": "string_check"}), "method.reinforcement.grader.reference", "required"),
        (request(grader={"type": "nonsense"}), "method.reinforcement.grader", "nonsense"),
        (request(grader=GRADER, environment=CALCULATOR), "method.reinforcement", "either"),
        (request(grader=None), "method.reinforcement", "either"),
    ],
)
def test_what_is_wrong_is_named_where_it_was_written(document: Any, param: str | None, words: str) -> None:
    error = refused(document)
    assert error.param == param
    assert words in error.message


def test_too_many_epochs_are_too_many_steps() -> None:
    error = refused(request({"n_epochs": 1000, "batch_size": 1}), training=DataFile(uuid.UUID(int=1), lines=101))
    assert error.param == f"{H}.n_steps" and "at most 100000, not 101000" in error.message


def test_a_grader_needs_a_training_file() -> None:
    assert refused(request(), training=None).param == "training_file"


@pytest.mark.parametrize("field", ["training_file", "validation_file"])
def test_an_environment_takes_no_files(field: str) -> None:
    files = {"training_file": (TRAINING, None), "validation_file": (None, VALIDATION)}[field]
    assert refused(request(environment=CALCULATOR), *files).param == field


def test_an_environment_has_no_epochs() -> None:
    assert refused(request({"n_epochs": 1}, environment=CALCULATOR), training=None).param == f"{H}.n_epochs"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("base_model: unknown 'x'; known: y", "model: unknown 'x'; known: y"),
        (
            "hyperparameters.prompts_per_round: 9 prompts; lower it or hyperparameters.group_size",
            f"{H}.prompts_per_round: 9 prompts; lower it or {H}.group_size",
        ),
        ("evaluation.prompts: too many; name: x", f"{H}.eval_prompts: too many; suffix: x"),
        ("environment.params.task: no", "method.reinforcement.environment.params.task: no"),
        (f"{H}.n_epochs: give one", f"{H}.n_epochs: give one"),
    ],
)
def test_messages_are_told_in_the_words_of_the_request(ours: str, theirs: str) -> None:
    error = in_words_of_request(InvalidRequest(ours, param=ours.partition(":")[0]))
    assert (error.message, error.param) == (theirs, theirs.partition(":")[0])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            "environment.params.grader.reference: line 3: item.a is not there",
            "method.reinforcement.grader.reference: line 3: item.a is not there",
        ),
        ("environment.params: a prompt is too long", "training_file: a prompt is too long"),
        ("environment.params.file_id: no file", "training_file: no file"),
        ("environment.params.eval_items: line 2", "validation_file: line 2"),
        ("environment.max_turns: no", "method.reinforcement.environment.max_turns: no"),
    ],
)
def test_with_a_grader_messages_name_it_and_the_files(ours: str, theirs: str) -> None:
    assert in_words_of_request(InvalidRequest(ours), with_grader=True).message == theirs
    assert named_field(ours, with_grader=True) == theirs.partition(":")[0]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("environment.params.task: no", "method.reinforcement.environment.params.task"),
        ("hyperparameters.n_steps: no", f"{H}.n_steps"),
        ("the grader raised", None),
        ("environment.params.task went away", None),
    ],
)
def test_the_field_that_a_message_begins_with(message: str, param: str | None) -> None:
    assert named_field(message) == param


@pytest.mark.parametrize(
    "document",
    [
        request(),
        request({"n_epochs": 3, "batch_size": 7, "learning_rate_multiplier": 0.3, "tis_cap": None}, weight=2.0),
        request({"eval_interval": 2, "eval_samples": 3, "compute_multiplier": 0.4, "temperature": 0.7}),
    ],
)
def test_what_a_job_shows_makes_the_same_job_again(document: dict[str, Any]) -> None:
    first = spec(document | {"seed": 1}, validation=VALIDATION)
    asked = asked_for(first)
    assert (asked.training_file, asked.validation_file) == (ids.file_id(TRAINING.id), ids.file_id(VALIDATION.id))
    assert spec({"model": "tiny", "seed": 1, "method": asked.method}, validation=VALIDATION) == first


def test_what_a_job_with_an_environment_shows_makes_it_again() -> None:
    first = spec(request(environment=CALCULATOR, seed=1, lora={"rank": 16}), training=None)
    asked = asked_for(first)
    assert asked.training_file == ""
    assert spec({"model": "tiny", "seed": 1, "method": asked.method}, training=None) == first
