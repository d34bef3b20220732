"""A job's document is refused with the field that is wrong and what to do."""

from __future__ import annotations

from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from app.errors import InvalidRequest
from app.manager.jobs import parse_spec
from app.specs.environment import MAX_PARAMS_BYTES, MIN_TURNS, check_environment
from app.specs.job import EnvironmentSpec
from app.specs.reasoning_gym import TASKS
from workers.tools.registry import build_registry

ITEM = {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}
GRADER = {"type": "string_check", "reference": "{{ item.answer }}"}


def document(**changes: Any) -> dict[str, Any]:
    return {"name": "sums", "base_model": "tiny", "environment": {"type": "calculator"}} | changes


def refused(**changes: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_spec(document(**changes))
    return caught.value


def environment_refused(kind: str, params: dict[str, Any], plugins: bool = False, **changes: Any) -> InvalidRequest:
    spec = EnvironmentSpec(type=kind, params=params, **({"max_turns": 2} | changes))
    with pytest.raises(InvalidRequest) as caught:
        check_environment(spec, 30.0, plugins=plugins)
    return caught.value


def test_a_short_document_is_enough() -> None:
    spec = parse_spec(document())
    assert (spec.hyperparameters.group_size, spec.lora.rank) == (8, 8)


@pytest.mark.parametrize(
    ("changes", "field", "fix"),
    [
        ({"name": None}, "name", "valid string"),
        ({"name": "no spaces"}, "name", "match pattern"),
        ({"base_model": "a\0b"}, "base_model", "NUL"),
        ({"environment": {}}, "environment.type", "is required"),
        ({"environment": {"type": "calculator", "max_turns": 0}}, "environment.max_turns", "at least 1, not 0"),
        ({"environment": {"type": "x", "params": {"a": "\0"}}}, "environment.params", "NUL"),
        ({"environment": {"type": "x", "params": {"a": float("nan")}}}, "environment.params", "plain JSON"),
        ({"environment": {"type": "x", "params": {"a": object()}}}, "environment.params", "plain JSON"),
        ({"hyperparameters": {"group_size": 1}}, "hyperparameters.group_size", "must be at least 2, not 1"),
        ({"hyperparameters": {"groupsize": 4}}, "hyperparameters.groupsize", "did you mean 'group_size'?"),
        ({"hyperparameters": {"n_steps": 0}}, "hyperparameters.n_steps", "must be at least 1"),
        ({"hyperparameters": {"learning_rate": 0}}, "hyperparameters.learning_rate", "must be above 0"),
        ({"hyperparameters": {"max_grad_norm": float("inf")}}, "hyperparameters.max_grad_norm", "finite"),
        (
            {"hyperparameters": {"prompts_per_round": 2, "minibatches": 3}},
            "hyperparameters.minibatches",
            "must not exceed prompts_per_round, which is 2",
        ),
        ({"lora": {"rank": 5}}, "lora.rank", "must be one of 1, 8, 16"),
        ({"lora": {"target_modules": ["embed_tokens"]}}, "lora.target_modules", "choose from q_proj"),
        ({"sampling": {"temperature": 0.009}}, "sampling.temperature", "must be at least 0.01"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p", "known fields: max_tokens, temperature"),
        ({"evaluation": {"every": -1}}, "evaluation.every", "must be at least 0"),
        ({"seed": -1}, "seed", "must be at least 0"),
        ({"metadata": {"note": "x" * 513}}, "metadata.note", "at most 512"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_field_is_named_with_the_fix(changes: dict[str, Any], field: str, fix: str) -> None:
    error = refused(**changes)
    assert error.param == field
    assert f"{field}: " in error.message
    assert fix in error.message


def test_all_wrong_fields_are_told_at_once() -> None:
    error = refused(seed=-1, sampling={"max_tokens": 0})
    assert "sampling.max_tokens: must be at least 1" in error.message
    assert "seed: must be at least 0" in error.message


@pytest.mark.parametrize(
    ("kind", "params", "field", "fix"),
    [
        ("calc", {}, "environment.type", "known: calculator, dataset, reasoning_gym"),
        ("calculator", {"terms": 1}, "environment.params.terms", "must be at least 2"),
        ("calculator", {"operator": 3}, "environment.params.operator", "did you mean 'operators'?"),
        ("calculator", {"latency_seconds": [0, 20]}, "environment.params.latency_seconds", "call_timeout_seconds"),
        ("reasoning_gym", {}, "environment.params.task", "is required"),
        ("reasoning_gym", {"task": "chainsum"}, "environment.params.task", "it has chain_sum"),
        ("dataset", {"items": [ITEM]}, "environment.params.grader", "is required"),
        ("dataset", {"grader": GRADER}, "environment.params", "give either `file_id`"),
        ("dataset", {"grader": GRADER, "items": []}, "environment.params.items", "at least 1"),
        ("dataset", {"grader": GRADER, "items": [ITEM, {}]}, "environment.params.items", "line 2: messages"),
        ("dataset", {"grader": GRADER, "file_id": "sums"}, "environment.params.file_id", "valid UUID"),
        ("dataset", {"grader": {"type": "exact"}, "items": [ITEM]}, "environment.params.grader", "string_check"),
        ("dataset", {"grader": GRADER, "items": [ITEM] * 4000}, "environment.params", "marlaas file upload"),
    ],
)
def test_a_wrong_environment_is_named_with_the_fix(kind: str, params: dict[str, Any], field: str, fix: str) -> None:
    error = environment_refused(kind, params)
    assert error.param == field
    assert fix in error.message


def test_an_environment_says_how_many_turns_it_takes() -> None:
    assert environment_refused("calculator", {}, max_turns=1).param == "environment.max_turns"


def test_an_operators_environment_is_left_to_the_worker_that_has_it() -> None:
    assert check_environment(EnvironmentSpec(type="ours", params={"any": 1}), 30.0, plugins=True) is None


def test_the_size_of_an_operators_parameters_is_bounded_too() -> None:
    error = environment_refused("ours", {"text": "x" * MAX_PARAMS_BYTES}, plugins=True)
    assert error.param == "environment.params"


def test_known_tasks_are_those_of_the_library() -> None:
    assert set(DATASETS) == TASKS


@pytest.mark.parametrize("name", ["calculator", "dataset", "reasoning_gym"])
def test_least_turns_are_those_of_the_environment(name: str) -> None:
    assert MIN_TURNS.get(name, 1) == build_registry().get(name).min_turns
