"""`/v1/fine_tuning/preflights`: asked for as a job is, read by its own tenant, cancelled; never a job."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from apiflask import APIFlask
from flask.testing import FlaskClient
from sqlalchemy import func, select

from app import broker
from app.db import transaction
from app.manager import jobs
from app.models import Job, Round, Tenant
from tests import by_hand
from tests.api_client import client_with, make_key
from tests.preflights import finish, to_acting
from tests.service.conftest import Bells

PATH = "/v1/fine_tuning/preflights"


def body(**changes: Any) -> dict[str, Any]:
    """2 prompts × 2 answers of a job of 3 steps."""
    reinforcement = {
        "environment": {"type": "calculator", "max_turns": 2},
        "hyperparameters": {"n_steps": 3, "prompts_per_round": 2, "group_size": 2, "max_tokens": 8},
    }
    return {
        "model": by_hand.MODEL,
        "suffix": "digits",
        "seed": 5,
        "method": {"type": "reinforcement", "reinforcement": reinforcement},
        "preflight": {"prompts": 2, "samples": 2},
    } | changes


def create(client: FlaskClient, **changes: Any) -> dict[str, Any]:
    made = client.post(PATH, json=body(**changes))
    assert made.status_code == 200, made.text
    document: dict[str, Any] = made.get_json()
    return document


def started(client: FlaskClient) -> tuple[str, uuid.UUID]:
    """The API's id and ours of one whose episodes wait for admission."""
    text = create(client)["id"]
    job_id = uuid.UUID(text.removeprefix("preflight-"))
    with transaction() as session:
        jobs.validated(session, job_id)
    by_hand.admit()
    by_hand.publish_initial(job_id)
    return text, job_id


def error(client: FlaskClient, method: str, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
    answered = client.open(path, method=method, **more)
    return answered.status_code, answered.get_json()["error"]


def test_it_is_asked_for_as_a_job_is(client: FlaskClient, bells: Bells) -> None:
    made = create(client)
    job = by_hand.job(uuid.UUID(made["id"].removeprefix("preflight-")))
    assert (job.kind, job.spec["hyperparameters"]["n_steps"], job.spec["seed"]) == ("preflight", 3, 5)
    assert (made["status"], made["report"], made["preflight"]) == (
        "validating_files",
        None,
        {"prompts": 2, "samples": 2},
    )
    assert len(bells.of(broker.VALIDATE)) == 1


def test_numbers_have_defaults(client: FlaskClient) -> None:
    without = {k: v for k, v in body().items() if k != "preflight"}
    assert client.post(PATH, json=without).get_json()["preflight"] == {"prompts": 8, "samples": 4}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"preflight": {"prompts": 65}}, "preflight.prompts"),
        ({"preflight": {"samples": 1}}, "preflight.samples"),
        ({"preflight": {"episodes": 1}}, "preflight.episodes"),
        ({"model": "unknown"}, "model"),
        ({"method": None}, None),
    ],
)
def test_what_is_wrong_is_named(client: FlaskClient, changes: dict[str, Any], param: str | None) -> None:
    status, said = error(client, "POST", PATH, json=body(**changes))
    assert (status, said["param"]) == (400, param)


def test_progress_shows_while_it_runs_and_the_report_after(client: FlaskClient) -> None:
    text, job_id = started(client)
    to_acting(job_id)
    running = client.get(f"{PATH}/{text}").get_json()
    assert (running["status"], running["phase"], running["episodes_total"]) == ("running", "environment", 4)
    by_hand.act(by_hand.ids(by_hand.episodes_of(round_id(job_id))))
    by_hand.admit()
    done = client.get(f"{PATH}/{text}").get_json()
    assert done["status"] == "succeeded"
    report = done["report"]
    assert report["verdict"]["code"] == "too_easy"
    assert report["measured"]["pass_rate"] == 1.0
    assert report["prediction"]["cost"]["generated_tokens"] == 12 * 3
    assert report["samples"][0]["prompt"] == [{"role": "user", "content": "?"}]


def round_id(job_id: uuid.UUID) -> int:
    with transaction() as session:
        return session.scalars(select(Round.id).where(Round.job_id == job_id)).one()


def test_a_failed_one_shows_its_error(client: FlaskClient) -> None:
    text, job_id = started(client)
    with transaction() as session:
        jobs.fail_by_id(session, job_id, "environment_error", "the grader is broken")
    failed = client.get(f"{PATH}/{text}").get_json()
    assert (failed["status"], failed["report"]) == ("failed", None)
    assert failed["error"] == {"code": "environment_error", "message": "the grader is broken", "param": None}


def test_it_can_be_cancelled_once(client: FlaskClient) -> None:
    text, _ = started(client)
    assert client.post(f"{PATH}/{text}/cancel").get_json()["status"] == "cancelled"
    status, said = error(client, "POST", f"{PATH}/{text}/cancel")
    assert (status, said["param"]) == (409, "preflight_id")


def test_a_third_one_is_one_too_many(client: FlaskClient) -> None:
    create(client), create(client)
    status, said = error(client, "POST", PATH, json=body())
    assert (status, said["code"]) == (429, "quota_exceeded")


def test_the_same_key_makes_one(client: FlaskClient) -> None:
    made = [client.post(PATH, json=body(), headers={"Idempotency-Key": "k"}).get_json()["id"] for _ in range(2)]
    assert made[0] == made[1]
    with transaction() as session:
        assert session.scalar(select(func.count()).select_from(Job)) == 1


def test_it_is_no_job_and_a_job_is_no_preflight(client: FlaskClient, tenant: Tenant) -> None:
    text, job_id = started(client)
    trained = by_hand.start_job(tenant)
    listed = client.get("/v1/fine_tuning/jobs").get_json()["data"]
    assert [job["id"] for job in listed] == [f"ftjob-{trained.hex}"]
    for path in (
        f"/v1/fine_tuning/jobs/ftjob-{job_id.hex}",
        f"/v1/fine_tuning/jobs/ftjob-{job_id.hex}/events",
        f"/v1/fine_tuning/jobs/ftjob-{job_id.hex}/checkpoints",
        f"{PATH}/preflight-{trained.hex}",
        f"{PATH}/{text[:-1]}",
        f"{PATH}/{text}0",
    ):
        assert client.get(path).status_code == 404, path


def test_it_is_no_model(client: FlaskClient) -> None:
    _, job_id = started(client)
    finish(job_id)
    assert job_id.hex not in json.dumps(client.get("/v1/models").get_json())


def test_another_tenants_is_not_there(web_app: APIFlask, client: FlaskClient) -> None:
    text, _ = started(client)
    other = client_with(web_app, make_key(by_hand.make_tenant("other")))
    assert other.get(f"{PATH}/{text}").status_code == 404
    assert other.post(f"{PATH}/{text}/cancel").status_code == 404


def test_a_key_that_only_reads_makes_none(web_app: APIFlask, tenant: Tenant) -> None:
    reader = client_with(web_app, make_key(tenant, "read"))
    assert reader.post(PATH, json=body()).status_code == 403
