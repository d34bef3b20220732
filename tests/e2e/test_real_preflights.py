"""Preflights by real workers: what they say before a job is what the job then meets with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app.cli import app
from app.models import Tenant
from tests.e2e.conftest import Service


@pytest.fixture(scope="module")
def tenant(service: Service) -> Tenant:
    return service.tenant("acme")


def check(tenant: Tenant, **changes: Any) -> Result:
    document = {
        "name": "digits",
        "base_model": "tiny",
        "environment": {"type": "toy_digits"},
        "sampling": {"max_tokens": 192},  # enough for a random model to end by itself
        "hyperparameters": {"n_steps": 3, "prompts_per_round": 2, "group_size": 4},
        "preflight": {"prompts": 4, "samples": 4},
    } | changes
    return CliRunner().invoke(app, ["job", "preflight", "-f", "-", "-t", tenant.name, "--json"], json.dumps(document))


def test_a_task_with_signal_is_good_and_its_cost_is_foretold(service: Service, tenant: Tenant) -> None:
    service.wait(service.submit(tenant), "succeeded")  # from it the speed of training is known
    done = check(tenant)
    said = json.loads(done.stdout)
    measured, prediction = said["report"]["measured"], said["report"]["prediction"]
    assert (said["report"]["verdict"]["code"], done.exit_code) == ("good", 0)
    assert (measured["prompts"], measured["episodes"], measured["dropped"]) == (4, 16, {})
    assert 0 < measured["generated_tokens"] <= 192
    assert prediction["unknown"] == []
    assert prediction["total_seconds"] > 0
    assert prediction["cost"]["generated_tokens"] == round(24 * measured["generated_tokens"])


def test_a_task_whose_answers_are_all_worth_the_same_has_no_signal(service: Service, tenant: Tenant) -> None:
    done = check(tenant, environment={"type": "toy_constant"})
    assert (json.loads(done.stdout)["report"]["verdict"]["code"], done.exit_code) == ("too_hard", 1)


def test_answers_that_are_cut_off_are_seen(service: Service, tenant: Tenant) -> None:
    done = check(tenant, sampling={"max_tokens": 1})
    assert json.loads(done.stdout)["report"]["verdict"]["code"] == "truncated"


def test_a_broken_environment_fails_the_preflight_with_its_error(service: Service, tenant: Tenant) -> None:
    done = check(tenant, environment={"type": "toy_raising"})
    said = json.loads(done.stdout)
    assert (said["state"], said["error"]["error_code"], said["report"]) == ("failed", "environment_error", None)
    assert "the grader is broken" in said["error"]["error_message"]
    assert done.exit_code == 1
