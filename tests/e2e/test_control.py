"""Celery's own command line and `marlaas` beside it: submitting, inspecting, draining real workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from typing import Any

from sqlalchemy import select
from typer.testing import CliRunner

from app import broker
from app.cli import app
from app.db import transaction
from app.manager.progress import job_progress
from app.models import Job
from tests.e2e.conftest import Service
from tests.workers import ROOT, wait_for

SPEC = {
    "name": "by-celery",
    "base_model": "tiny",
    "environment": {"type": "toy_digits"},
    "sampling": {"max_tokens": 4},
    "hyperparameters": {"n_steps": 1, "prompts_per_round": 2, "group_size": 2},
}


def celery(*arguments: str) -> str:
    """What `celery -A workers …` prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "workers", *arguments],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def jobs_named(name: str) -> list[uuid.UUID]:
    with transaction() as session:
        return list(session.scalars(select(Job.id).where(Job.name == name)))


def phase(job_id: uuid.UUID) -> str:
    with transaction() as session:
        (progress,) = job_progress(session, [job_id])
    return progress.phase


def queues(worker: str) -> list[str]:
    """What the worker takes messages from."""
    answer = broker.celery.control.inspect([worker]).active_queues() or {}
    return [queue["name"] for queue in answer.get(worker, ())]


def inspect(worker: str) -> dict[str, Any]:
    return dict(json.loads(celery("inspect", "engine", "-d", worker, "--json"))[worker])


def test_celery_call_submits_a_job_that_marlaas_watches_to_its_end(service: Service) -> None:
    tenant = service.tenant("acme")
    celery("call", "jobs.submit", "--kwargs", json.dumps({"tenant": tenant.name, "spec": SPEC}))
    wait_for(lambda: jobs_named("by-celery"), 20, "the job is to be made", service.workers)
    result = CliRunner().invoke(app, ["job", "watch", "by-celery", "--json"])
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    assert (last["state"], last["version"]) == ("succeeded", 1)
    (job_id,) = jobs_named("by-celery")
    assert f"{job_id}:0" in inspect("rollout@test")["resident"]


def test_a_drained_worker_is_given_nothing_until_it_is_undrained(service: Service) -> None:
    celery("control", "drain", "-d", "rollout@test")
    assert inspect("rollout@test")["draining"] is True
    wait_for(lambda: queues("rollout@test") == [], 10, "the worker is to leave its queue", service.workers)
    job_id = service.submit(service.tenant("acme"), hyperparameters={"n_steps": 1})
    wait_for(lambda: phase(job_id) == "waiting", 30, "the round is to wait for an engine", service.workers)
    assert CliRunner().invoke(app, ["worker", "undrain", "rollout@test"]).exit_code == 0
    assert service.wait(job_id, "succeeded", "failed").state == "succeeded"
    assert queues("rollout@test") == ["rollout"]
    assert inspect("rollout@test")["draining"] is False
