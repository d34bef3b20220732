"""`/v1/fine_tuning/jobs`: OpenAI's own client creates, steers and reads jobs; nobody sees another tenant's."""

from __future__ import annotations

import io
import json
import uuid
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import urlopen

import openai
import pytest
from apiflask import APIFlask
from flask.testing import FlaskClient
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint
from sqlalchemy import select

from app.api import ids
from app.db import transaction
from app.manager import downloads, retention
from app.manager import trajectories as trajectories_of_jobs
from app.models import StoredObject, Tenant
from app.models.round import EpisodeState
from app.settings import Settings
from app.storage import sha256_of
from tests import by_hand, stored
from tests.api_client import client_with, make_key
from tests.service.conftest import Bells

UNKNOWN = uuid.UUID(int=0)
LINE = json.dumps({"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}).encode()
GRADER = {
    "type": "string_check",
    "name": "exact",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
    "operation": "eq",
}
CALCULATOR = {"type": "calculator", "max_turns": 2}


def method(hyperparameters: dict[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
    """With the calculator, unless a grader is given."""
    said = {"hyperparameters": {"n_steps": 3, "max_tokens": 8} | (hyperparameters or {})} | parts
    return {"type": "reinforcement", "reinforcement": said if "grader" in said else {"environment": CALCULATOR} | said}


def create(client: FlaskClient, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return client.post("/v1/fine_tuning/jobs", json={"model": "tiny", "method": method()} | fields, headers=headers)


def error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json["error"]
    return found


def job_ids(client: FlaskClient, query: str = "") -> list[str]:
    response = client.get(f"/v1/fine_tuning/jobs?{query}")
    assert response.status_code == 200, response.text
    return [job["id"] for job in response.json["data"]]


@pytest.fixture
def stranger(web_app: APIFlask, tenant: Tenant) -> FlaskClient:
    """With a key of another tenant."""
    return client_with(web_app, make_key(by_hand.make_tenant("globex")))


@pytest.fixture
def running(tenant: Tenant) -> uuid.UUID:
    """A job with version 0 and its files, whose first round is open."""
    return stored.start_job(tenant)


@pytest.fixture
def trained(running: uuid.UUID) -> uuid.UUID:
    """The same with versions 1 and 2."""
    stored.step(running, {"reward_mean": 0.25, "loss": 0.5, "total_tokens": 30.0})
    stored.step(running, {"reward_mean": 0.75, "loss": 0.1, "total_tokens": 40.0})
    return running


# --- create


def test_openai_creates_a_job_with_a_grader(openai_client: openai.OpenAI, bells: Bells) -> None:
    training = openai_client.files.create(file=("train.jsonl", LINE), purpose="fine-tune")
    held_out = openai_client.files.create(file=("test.jsonl", LINE), purpose="fine-tune")
    made = openai_client.fine_tuning.jobs.create(
        model="tiny",
        training_file=training.id,
        validation_file=held_out.id,
        suffix="sums",
        seed=7,
        metadata={"team": "night"},
        method={"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": {"batch_size": 2}}},  # type: ignore[typeddict-item]
    )
    FineTuningJob.model_validate(made.model_dump())
    assert (made.object, made.status, made.model, made.seed) == ("fine_tuning.job", "validating_files", "tiny", 7)
    assert (made.training_file, made.validation_file, made.metadata) == (training.id, held_out.id, {"team": "night"})
    assert made.method is not None and made.method.reinforcement is not None
    assert made.method.reinforcement.grader.to_dict() == GRADER
    assert made.hyperparameters.batch_size == 2
    assert (made.organization_id, made.fine_tuned_model, made.error, made.trained_tokens) == ("acme", None, None, None)
    assert openai_client.fine_tuning.jobs.retrieve(made.id).id == made.id
    assert bells.of("tools.validate") == [{"job_id": str(ids.parse_job(made.id))}]


def test_a_job_with_an_environment_has_no_training_file(client: FlaskClient) -> None:
    made = create(client, training_file=None, suffix="adder").json
    assert made["training_file"] == "" and made["suffix"] == "adder"
    assert made["method"]["reinforcement"]["environment"]["type"] == "calculator"
    assert (made["marlaas"]["phase"], made["marlaas"]["version"], made["marlaas"]["n_steps"]) == ("validating", 0, 3)


def test_what_is_shown_of_a_job_makes_it_again(client: FlaskClient) -> None:
    first = create(client, method=method({"compute_multiplier": 0.5}, weight=2.0), seed=3).json
    again = create(client, method=first["method"], seed=3).json
    assert again["id"] != first["id"] and again["method"] == first["method"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "nonsense"}, "model"),
        ({"method": method(grader=GRADER)}, "training_file"),
        ({"method": method(grader=GRADER), "training_file": f"file-{uuid.uuid4().hex}"}, "training_file"),
        ({"method": method(grader=GRADER), "training_file": "file-' OR 1=1"}, "training_file"),
        ({"method": method(environment={"type": "nonsense"})}, "method.reinforcement.environment.type"),
        ({"method": method({"max_tokens": 512})}, "method.reinforcement.sampling.max_tokens"),
        (
            {"method": method({"prompts_per_round": 4096})},
            "method.reinforcement.hyperparameters.prompts_per_round",
        ),
        ({"method": {"type": "supervised"}}, "method.type"),
        ({"metadata": {"k": "\0"}}, None),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch, settings: Settings, fields: dict[str, Any], param: str | None
) -> None:
    monkeypatch.setattr(settings, "environment_modules", "")
    found = error(create(client, **fields), 400)
    assert (found["type"], found["param"]) == ("invalid_request_error", param)
    assert job_ids(client) == []


def test_another_tenants_file_is_no_file(client: FlaskClient, stranger: FlaskClient) -> None:
    form = {"purpose": "fine-tune", "file": (io.BytesIO(LINE), "a.jsonl")}
    theirs = stranger.post("/v1/files", data=form).json["id"]
    found = error(create(client, method=method(grader=GRADER), training_file=theirs), 400)
    assert found["param"] == "training_file" and "there is no file" in found["message"]


def test_a_key_that_only_reads_creates_nothing(web_app: APIFlask, tenant: Tenant) -> None:
    reader = client_with(web_app, make_key(tenant, "read"))
    assert error(create(reader), 403)["code"] == "forbidden"
    assert job_ids(reader) == []


def test_the_quota_of_live_jobs(client: FlaskClient, tenant: Tenant) -> None:
    by_hand.execute("UPDATE tenants SET max_live_jobs = 1 WHERE id = :id", id=tenant.id)
    first = create(client).json["id"]
    found = error(create(client), 429)
    assert found["code"] == "quota_exceeded" and "may have 1; wait until one ends, or cancel one" in found["message"]
    client.post(f"/v1/fine_tuning/jobs/{first}/cancel")
    assert create(client).status_code == 200


def test_two_at_once_do_not_both_take_the_last_place(web_app: APIFlask, tenant: Tenant) -> None:
    by_hand.execute("UPDATE tenants SET max_live_jobs = 1 WHERE id = :id", id=tenant.id)
    key = make_key(tenant)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda seed: create(client_with(web_app, key), seed=seed).status_code, range(4)))
    assert sorted(answers) == [200, 429, 429, 429]


def test_the_same_key_creates_one_job(client: FlaskClient, bells: Bells) -> None:
    key = {"Idempotency-Key": "once"}
    first, second = create(client, key), create(client, key)
    assert second.json == first.json and second.headers["Idempotent-Replayed"] == "true"
    assert len(job_ids(client)) == 1 and len(bells.of("tools.validate")) == 1


def test_a_retry_of_openais_client_creates_nothing(client: FlaskClient) -> None:
    first = create(client, {"x-stainless-retry-count": "0"}, seed=1).json
    assert create(client, {"x-stainless-retry-count": "1"}, seed=1).json == first
    assert len(job_ids(client)) == 1


# --- list and retrieve


def test_jobs_are_listed_page_by_page_newest_first(openai_client: openai.OpenAI, tenant: Tenant) -> None:
    made = [ids.job_id(by_hand.submit(tenant)) for _ in range(5)]
    listed = [job.id for job in openai_client.fine_tuning.jobs.list(limit=2)]
    assert listed == made[::-1]


def test_jobs_are_found_by_metadata(openai_client: openai.OpenAI, client: FlaskClient) -> None:
    night = create(client, metadata={"team": "night", "run": "1"}).json["id"]
    create(client, metadata={"team": "day"})
    assert [job.id for job in openai_client.fine_tuning.jobs.list(metadata={"team": "night", "run": "1"})] == [night]
    assert not openai_client.fine_tuning.jobs.list(metadata={"team": "night", "run": "2"}).data


def test_jobs_are_found_by_status(client: FlaskClient, running: uuid.UUID) -> None:
    create(client)
    assert job_ids(client, "status=running") == [ids.job_id(running)]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("limit=0", 400),
        ("limit=1e9", 400),
        ("status=nonsense", 400),
        ("after=nonsense", 404),
        (f"after=ftjob-{UNKNOWN.hex}", 404),
        ("metadata[a]=%00", 400),
        ("metadata[%00]=a", 400),
        (f"metadata[a]={'x' * 1000}", 400),
        ("metadata[' OR 1=1 --]=1", 200),
    ],
)
def test_a_query_that_is_none(client: FlaskClient, query: str, status: int) -> None:
    assert client.get(f"/v1/fine_tuning/jobs?{query}").status_code == status


def test_lines_in_a_jobs_own_document_are_not_listed(client: FlaskClient) -> None:
    params = {"items": [json.loads(LINE)] * 3, "grader": GRADER}
    made = create(client, method=method(environment={"type": "dataset", "params": params})).json
    (listed,) = client.get("/v1/fine_tuning/jobs").json["data"]
    assert listed["method"]["reinforcement"]["environment"]["params"].keys() == {"grader"}
    found = client.get(f"/v1/fine_tuning/jobs/{made['id']}").json["method"]["reinforcement"]["environment"]
    assert found["params"]["items"] == params["items"]


def test_a_preflight_is_no_fine_tuning_job(client: FlaskClient, tenant: Tenant) -> None:
    job_id = by_hand.submit(tenant)
    by_hand.execute("UPDATE jobs SET kind = 'preflight' WHERE id = :id", id=job_id)
    assert job_ids(client) == []
    assert client.get(f"/v1/fine_tuning/jobs/{ids.job_id(job_id)}").status_code == 404


def test_progress_of_a_running_job(client: FlaskClient, trained: uuid.UUID) -> None:
    found = client.get(f"/v1/fine_tuning/jobs/{ids.job_id(trained)}").json
    said = found["marlaas"]
    assert (found["status"], said["version"], said["n_steps"], said["reward_mean"]) == ("running", 2, 3, 0.75)
    assert said["time_to_first_step_seconds"] > 0 and found["estimated_finish"] >= found["created_at"]
    assert found["trained_tokens"] is None


def test_a_job_that_succeeded(openai_client: openai.OpenAI, trained: uuid.UUID) -> None:
    stored.step(trained, {"reward_mean": 1.0, "total_tokens": 50.0})
    found = openai_client.fine_tuning.jobs.retrieve(ids.job_id(trained))
    assert (found.status, found.trained_tokens) == ("succeeded", 120)
    assert found.fine_tuned_model == f"ft:tiny:acme:digits:{trained.hex}"
    assert found.finished_at is not None and found.finished_at >= found.created_at


def test_a_job_that_failed_says_why(openai_client: openai.OpenAI, running: uuid.UUID) -> None:
    with transaction() as session:
        by_hand.jobs.fail_by_id(session, running, "environment_error", "the grader raised")
    found = openai_client.fine_tuning.jobs.retrieve(ids.job_id(running))
    assert found.status == "failed" and found.error is not None
    assert (found.error.code, found.error.message) == ("environment_error", "the grader raised")


def test_a_job_that_fails_its_validation_says_where_the_request_is_wrong(client: FlaskClient) -> None:
    file = client.post("/v1/files", data={"purpose": "fine-tune", "file": (io.BytesIO(LINE), "train.jsonl")}).json["id"]
    name = create(client, training_file=file, method=method(grader=GRADER)).json["id"]
    with transaction() as session:
        message = "environment.params.grader.reference: line 1: item.a is not there"
        by_hand.jobs.fail_by_id(session, ids.parse_job(name), "invalid_request", message)
    where = "method.reinforcement.grader.reference"
    told = f"{where}: line 1: item.a is not there"
    found = client.get(f"/v1/fine_tuning/jobs/{name}").json["error"]
    assert found == {"code": "invalid_request", "message": told, "param": where}
    assert client.get(f"/v1/fine_tuning/jobs/{name}/events").json["data"][0]["message"] == told


# --- steer


def test_openai_pauses_resumes_and_cancels(openai_client: openai.OpenAI, running: uuid.UUID) -> None:
    jobs, name = openai_client.fine_tuning.jobs, ids.job_id(running)
    assert jobs.pause(name).status == "paused"
    assert jobs.resume(name).status == "queued"
    assert jobs.cancel(name).status == "cancelled"
    assert by_hand.live_round(running).state == "abandoned"


def test_what_a_state_does_not_allow_is_a_conflict(client: FlaskClient, running: uuid.UUID) -> None:
    name = ids.job_id(running)
    said = {
        "resume": f"job {name} is running, not paused; only a paused job can be resumed",
        "cancel": f"job {name} is cancelled already; only a live job can be cancelled",
        "pause": f"job {name} is cancelled; only a live job can be paused",
    }
    for verb, message in said.items():
        assert error(client.post(f"/v1/fine_tuning/jobs/{name}/{verb}"), 409)["message"] == message
        client.post(f"/v1/fine_tuning/jobs/{name}/cancel")


def test_a_cancel_that_is_sent_again_is_answered_again(client: FlaskClient, running: uuid.UUID) -> None:
    path, key = f"/v1/fine_tuning/jobs/{ids.job_id(running)}/cancel", {"Idempotency-Key": "stop"}
    first = client.post(path, headers=key)
    second = client.post(path, headers=key)
    assert (first.status_code, second.status_code) == (200, 200) and second.json == first.json
    assert client.post(path, headers={"x-stainless-retry-count": "1"}).json == first.json


# --- events


def test_events_come_newest_first_page_by_page(openai_client: openai.OpenAI, trained: uuid.UUID) -> None:
    listed = list(openai_client.fine_tuning.jobs.list_events(ids.job_id(trained), limit=2))
    for event in listed:
        FineTuningJobEvent.model_validate(event.model_dump())
    codes = [event.data["code"] for event in listed]  # type: ignore[index]
    assert codes == ["job_started", "job_validated", "job_created"]


@pytest.mark.parametrize("after", ["ftevent-", "ftevent-99999999999999999999", "1", "ftevent-1 OR 1=1"])
def test_a_place_among_events_that_is_none(client: FlaskClient, running: uuid.UUID, after: str) -> None:
    path = f"/v1/fine_tuning/jobs/{ids.job_id(running)}/events"
    assert client.get(path, query_string={"after": after}).status_code == 404


# --- checkpoints and adapters


def test_openai_lists_checkpoints(openai_client: openai.OpenAI, trained: uuid.UUID) -> None:
    listed = list(openai_client.fine_tuning.jobs.checkpoints.list(ids.job_id(trained), limit=1))
    for checkpoint in listed:
        FineTuningJobCheckpoint.model_validate(checkpoint.model_dump())
    assert [c.step_number for c in listed] == [2, 1]
    newest = listed[0]
    assert newest.id == ids.checkpoint_id(trained, 2) and newest.fine_tuning_job_id == ids.job_id(trained)
    assert newest.fine_tuned_model_checkpoint == f"ft:tiny:acme:digits:{trained.hex}:ckpt-step-2"
    assert (newest.metrics.step, newest.metrics.train_loss) == (2, 0.1)
    assert newest.metrics.to_dict()["train_mean_reward"] == 0.75


def test_a_checkpoint_tells_its_evaluation(client: FlaskClient, tenant: Tenant) -> None:
    job_id = stored.start_job(tenant, evaluation={"every": 1, "prompts": 1, "samples": 1})
    stored.step(job_id)
    by_hand.execute(
        "UPDATE rounds SET state = 'committed', open_episodes = 0, finished_at = now(),"
        """ summary = '{"pass_rate": 0.5, "reward_mean": 0.6}'"""
        " WHERE job_id = :job AND kind = 'eval' AND policy_version = 1",
        job=job_id,
    )
    (found,) = client.get(f"/v1/fine_tuning/jobs/{ids.job_id(job_id)}/checkpoints").json["data"]
    assert (found["metrics"]["valid_pass_rate"], found["metrics"]["valid_mean_reward"]) == (0.5, 0.6)


def adapter(client: FlaskClient, job_id: uuid.UUID, version: int | None = None) -> Any:
    checkpoint = "" if version is None else f"/checkpoints/{ids.checkpoint_id(job_id, version)}"
    return client.get(f"/v1/fine_tuning/jobs/{ids.job_id(job_id)}{checkpoint}/adapter")


def fetch(url: str) -> bytes:
    with urlopen(url) as answer:
        return answer.read()  # type: ignore[no-any-return]


def archives(job_id: uuid.UUID) -> list[StoredObject]:
    with transaction() as session:
        found = select(StoredObject).where(StoredObject.job_id == job_id, StoredObject.kind == "adapter_zip")
        return list(session.scalars(found.order_by(StoredObject.created_at)))


def test_an_adapter_comes_down_as_a_zip_and_file_by_file(client: FlaskClient, trained: uuid.UUID) -> None:
    said = adapter(client, trained, 1).json
    content = fetch(said["url"])
    assert (sha256_of(content), len(content)) == (said["sha256"], said["size"])
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    assert inside == {"adapter_config.json": stored.CONFIG, "adapter_model.safetensors": stored.weights(1)}
    for file in said["files"]:
        assert fetch(file["url"]) == inside[file["name"]] and sha256_of(inside[file["name"]]) == file["sha256"]


def test_the_latest_adapter_of_a_job(client: FlaskClient, trained: uuid.UUID) -> None:
    said = adapter(client, trained).json
    assert (said["step_number"], said["checkpoint_id"]) == (2, ids.checkpoint_id(trained, 2))
    assert said["filename"] == "digits-v2.zip"


def test_a_zip_is_made_once(client: FlaskClient, trained: uuid.UUID) -> None:
    first, second = adapter(client, trained, 1).json, adapter(client, trained, 1).json
    assert first["sha256"] == second["sha256"]
    (made,) = archives(trained)
    assert (made.state, made.version) == ("live", 1) and made.key.startswith(
        f"tenants/{made.tenant_id}/jobs/{trained}/"
    )


def test_two_at_once_get_one_and_the_same_zip(web_app: APIFlask, tenant: Tenant, trained: uuid.UUID) -> None:
    key = make_key(tenant)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: adapter(client_with(web_app, key), trained, 1).json, range(4)))
    assert len({a["sha256"] for a in answers}) == 1
    assert all(sha256_of(fetch(a["url"])) == a["sha256"] for a in answers)
    assert [a.state for a in archives(trained)].count("live") == 1


def test_a_version_without_signal_shares_the_zip_of_the_one_before(client: FlaskClient, trained: uuid.UUID) -> None:
    first = adapter(client, trained, 2).json
    by_hand.finish_round(trained)
    by_hand.train(signal=False)
    assert adapter(client, trained, 3).json["sha256"] == first["sha256"]
    assert len(archives(trained)) == 1


def test_a_zip_that_is_left_half_made_is_swept(
    client: FlaskClient, trained: uuid.UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(downloads.storage, "put_stream", _fails)
        with pytest.raises(OSError, match="dies"):
            downloads.download(lambda: transaction(), trained, 1)
    (left,) = archives(trained)
    assert left.state == "pending"
    assert adapter(client, trained, 1).status_code == 200
    by_hand.execute("UPDATE objects SET state_at = now() - interval '1 d' WHERE id = :id", id=left.id)
    with transaction() as session:
        retention.expire_orphans(session)
    assert sorted(a.state for a in archives(trained)) == ["expired", "live"]


def _fails(*_: Any) -> None:
    raise OSError("the process dies")


def test_a_zip_goes_with_its_version(
    client: FlaskClient, trained: uuid.UUID, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    monkeypatch.setattr(settings, "keep_adapter_every", 2)
    adapter(client, trained, 1)
    adapter(client, trained, 2)
    with transaction() as session:
        assert retention.expire_adapters(session) == 2
        assert retention.expire_archives(session) == 1
    assert {a.version: a.state for a in archives(trained)} == {1: "expired", 2: "live"}
    found = error(adapter(client, trained, 1), 404)
    assert found["code"] == "adapter_expired" and "kept: 0, 2" in found["message"]
    (_, listed) = client.get(f"/v1/fine_tuning/jobs/{ids.job_id(trained)}/checkpoints").json["data"]
    assert listed["available"] is False


def test_a_zip_does_not_come_to_life_after_its_version(trained: uuid.UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    def expires_first(key: str, *_: Any) -> None:
        by_hand.execute(
            "UPDATE objects SET state = 'expired' WHERE job_id = :job AND kind = 'adapter_model'", job=trained
        )

    monkeypatch.setattr(downloads.storage, "put_stream", expires_first)
    with pytest.raises(downloads.adapters.AdapterExpired):
        downloads.download(lambda: transaction(), trained, 1)
    assert [a.state for a in archives(trained)] == ["pending"]


def test_a_job_without_a_version_has_no_adapter(client: FlaskClient, tenant: Tenant) -> None:
    assert "none yet" in error(adapter(client, by_hand.submit(tenant)), 404)["message"]


def test_the_checkpoint_of_another_job_is_not_found(client: FlaskClient, tenant: Tenant, trained: uuid.UUID) -> None:
    other = ids.job_id(by_hand.submit(tenant))
    path = f"/v1/fine_tuning/jobs/{other}/checkpoints/{ids.checkpoint_id(trained, 1)}/adapter"
    assert error(client.get(path), 404)["param"] == "fine_tuning_checkpoint_id"


# --- metrics, trajectories, usage


def test_metrics_are_series(client: FlaskClient, trained: uuid.UUID) -> None:
    found = client.get(f"/v1/fine_tuning/jobs/{ids.job_id(trained)}/metrics").json
    assert (found["steps"], found["step_number"]) == ([1, 2], 2)
    assert (found["series"]["reward_mean"], found["series"]["loss"]) == ([0.25, 0.75], [0.5, 0.1])
    assert client.get(f"/v1/fine_tuning/jobs/{ids.job_id(trained)}/metrics?after=1").json["steps"] == [2]


def trajectories(client: FlaskClient, job_id: uuid.UUID, **query: Any) -> Any:
    response = client.get(f"/v1/fine_tuning/jobs/{ids.job_id(job_id)}/trajectories", query_string=query)
    assert response.status_code == 200, response.text
    return response.json


def test_a_trajectory_tells_all_that_was_said(client: FlaskClient, running: uuid.UUID) -> None:
    found = by_hand.to_state(by_hand.live_round(running).id, EpisodeState.ACTING)
    by_hand.act(found[:1], reward=None)
    by_hand.generate(found[:1])
    by_hand.act(found[:1], reward=0.25)
    first = trajectories(client, running, limit=1)["data"][0]
    assert first["prompt"] == [{"role": "user", "content": "?"}]
    assert (first["kind"], first["version"], first["prompt_index"], first["index"]) == ("train", 0, 0, 0)
    assert (first["state"], first["reward"], first["passed"]) == ("finished", 0.25, False)
    assert [t["by"] for t in first["turns"]] == ["policy", "environment", "policy"]
    assert [t["messages"] for t in first["turns"][:2]] == [
        [{"role": "assistant", "content": "7"}],
        [{"role": "tool", "content": "go on"}],
    ]
    assert first["turns"][0]["tokens"] == len(by_hand.GENERATED)


def test_tool_calls_are_told_well_and_badly_formed(client: FlaskClient, running: uuid.UUID) -> None:
    said = 'so <tool_call>{"name": "calculator", "arguments": {"a": 1}}</tool_call> or <tool_call>nonsense'
    round_id = by_hand.live_round(running).id
    (claim, *_) = by_hand.claim(by_hand.to_state(round_id, EpisodeState.GENERATING), EpisodeState.GENERATING)
    by_hand.record_turns([by_hand.turn(claim, text=said)])
    found = {t["id"]: t for t in trajectories(client, running)["data"]}[f"trajectory-{claim.episode_id}"]
    assert found["turns"][0]["tool_calls"] == [
        {
            "text": '{"name": "calculator", "arguments": {"a": 1}}',
            "name": "calculator",
            "arguments": {"a": 1},
        },
        {"text": "nonsense", "name": None, "arguments": None},
    ]


def test_trajectories_are_listed_page_by_page_through_rounds(client: FlaskClient, trained: uuid.UUID) -> None:
    everything = trajectories(client, trained, limit=100)
    assert len(everything["data"]) == 12 and not everything["has_more"]
    assert [t["version"] for t in everything["data"]] == [0] * 4 + [1] * 4 + [2] * 4
    seen, page = [], trajectories(client, trained, limit=5)
    while page["data"]:
        seen += page["data"]
        page = trajectories(client, trained, limit=5, after=seen[-1]["id"])
    assert seen == everything["data"]


def test_trajectories_are_found_in_the_last_of_many_rounds(
    client: FlaskClient, trained: uuid.UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectories_of_jobs, "FIRST_ROUNDS", 1)
    monkeypatch.setattr(trajectories_of_jobs, "MOST_ROUNDS", 1)
    found = trajectories(client, trained, state="waiting")["data"]
    assert [t["version"] for t in found] == [2] * 4


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ({"version": 1}, 4),
        ({"version": 9}, 0),
        ({"kind": "train"}, 12),
        ({"kind": "eval"}, 0),
        ({"min_reward": 0.5}, 4),
        ({"max_reward": 0.5}, 4),
        ({"min_reward": 0.0, "max_reward": 1.0}, 8),
        ({"passed": "true"}, 4),
        ({"passed": "false", "version": 0}, 2),
        ({"state": "finished"}, 8),
        ({"state": "waiting"}, 4),
    ],
)
def test_trajectories_are_filtered(client: FlaskClient, trained: uuid.UUID, query: dict[str, Any], count: int) -> None:
    assert len(trajectories(client, trained, limit=100, **query)["data"]) == count


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({"after": "trajectory-0"}, 404),
        ({"after": "trajectory-99999999999999999999"}, 404),
        ({"after": "trajectory-9223372036854775807"}, 404),
        ({"after": "1; DROP TABLE jobs"}, 404),
        ({"min_reward": "nan"}, 400),
        ({"version": "99999999999"}, 400),
        ({"state": "nonsense"}, 400),
    ],
)
def test_a_filter_that_is_none(client: FlaskClient, running: uuid.UUID, query: dict[str, str], status: int) -> None:
    path = f"/v1/fine_tuning/jobs/{ids.job_id(running)}/trajectories"
    assert client.get(path, query_string=query).status_code == status


def spend(tenant: Tenant, job_id: uuid.UUID, day: str, tokens: int, table: str = "usage") -> None:
    more = ", round_id, episode_id, turn, attempt" if table == "usage" else ""
    values = f", 0, {tokens}, 0, 1" if table == "usage" else ""
    by_hand.execute(
        f"INSERT INTO {table} (tenant_id, job_id, {'created_at' if more else 'day'},"
        f" prompt_tokens, generated_tokens, trained_tokens, busy_seconds{more})"
        f" VALUES (:tenant, :job, CAST(:day AS {'timestamptz' if more else 'date'}), :n, :n, :n, 0.5{values})",
        tenant=tenant.id,
        job=job_id,
        day=day,
        n=tokens,
    )


@pytest.fixture
def used(tenant: Tenant, running: uuid.UUID) -> uuid.UUID:
    """A job that used 1 and 2 on one day, 4 on the next; 8 went to the base model."""
    spend(tenant, running, "2026-01-01", 1, "usage_days")
    spend(tenant, running, "2026-01-01 23:59:59+00", 2)
    spend(tenant, running, "2026-01-02 00:00:00+00", 4)
    spend(tenant, uuid.UUID(int=0), "2026-01-02 12:00:00+00", 8)
    return running


@pytest.mark.parametrize(
    ("group_by", "sums"),
    [
        ("day,job", [("2026-01-01", True, 3), ("2026-01-02", False, 8), ("2026-01-02", True, 4)]),
        ("day", [("2026-01-01", False, 3), ("2026-01-02", False, 12)]),
        ("job", [(None, False, 8), (None, True, 7)]),
    ],
)
def test_usage_is_summed(client: FlaskClient, used: uuid.UUID, group_by: str, sums: list[tuple[Any, ...]]) -> None:
    query = {"start_date": "2026-01-01", "end_date": "2026-01-02", "group_by": group_by}
    found = client.get("/v1/usage", query_string=query).json
    name = ids.job_id(used)
    assert [(r["day"], r["job"] == name, r["trained_tokens"]) for r in found["data"]] == sums
    assert (found["total"]["generated_tokens"], found["total"]["busy_seconds"]) == (15, 2.0)


def test_usage_of_one_job_and_day(client: FlaskClient, used: uuid.UUID) -> None:
    query = {"start_date": "2026-01-02", "end_date": "2026-01-02", "job": ids.job_id(used)}
    assert client.get("/v1/usage", query_string=query).json["total"]["prompt_tokens"] == 4


def test_usage_of_a_preflight_is_under_its_own_id(client: FlaskClient, tenant: Tenant) -> None:
    made = client.post("/v1/fine_tuning/preflights", json={"model": "tiny", "method": method()}).json["id"]
    spend(tenant, ids.parse_preflight(made), "2026-01-01", 5, "usage_days")
    query = {"start_date": "2026-01-01", "end_date": "2026-01-01", "job": made}
    (row,) = client.get("/v1/usage", query_string=query).json["data"]
    assert (row["job"], row["prompt_tokens"]) == (made, 5)
    as_job = query | {"job": made.replace("preflight-", "ftjob-")}
    assert client.get("/v1/usage", query_string=as_job).status_code == 404


def test_usage_of_another_tenant_is_none(stranger: FlaskClient, used: uuid.UUID) -> None:
    dates = {"start_date": "2026-01-01", "end_date": "2026-01-02"}
    assert stranger.get("/v1/usage", query_string=dates).json["data"] == []
    assert stranger.get("/v1/usage", query_string=dates | {"job": ids.job_id(used)}).status_code == 404


@pytest.mark.parametrize(
    "query",
    [
        {"start_date": "nonsense"},
        {"start_date": "2026-01-02", "end_date": "2026-01-01"},
        {"start_date": "2020-01-01", "end_date": "2026-01-01"},
        {"group_by": "moon"},
    ],
)
def test_a_range_of_usage_that_is_none(client: FlaskClient, query: dict[str, str]) -> None:
    assert client.get("/v1/usage", query_string=query).status_code == 400


@pytest.mark.parametrize("end", ["0001-01-01", "9999-12-31"])
def test_usage_at_the_ends_of_time(client: FlaskClient, end: str) -> None:
    assert client.get(f"/v1/usage?end_date={end}").json["data"] == []


# --- whose is it

ROUTES = [
    ("GET", ""),
    ("POST", "/cancel"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/events"),
    ("GET", "/checkpoints"),
    ("GET", "/checkpoints/{checkpoint}/adapter"),
    ("GET", "/adapter"),
    ("GET", "/metrics"),
    ("GET", "/trajectories"),
]


@pytest.mark.parametrize(("verb", "path"), ROUTES)
def test_another_tenants_job_is_not_found(stranger: FlaskClient, trained: uuid.UUID, verb: str, path: str) -> None:
    path = path.format(checkpoint=ids.checkpoint_id(trained, 1))
    found = error(stranger.open(f"/v1/fine_tuning/jobs/{ids.job_id(trained)}{path}", method=verb), 404)
    assert "There is no fine-tuning job" in found["message"]
    assert by_hand.job(trained).wanted == "run"


HOSTILE = ["ftjob-", "ftjob-xyz", "ftjob-' OR '1'='1", "../../etc/passwd", "%00", "ftjob-%F0%9F%92%A9", "x" * 2000, "1"]


@pytest.mark.parametrize("job", HOSTILE)
@pytest.mark.parametrize(("verb", "path"), ROUTES)
def test_a_hostile_id_is_not_found(client: FlaskClient, job: str, verb: str, path: str) -> None:
    path = path.format(checkpoint=job)
    error(client.open(f"/v1/fine_tuning/jobs/{job}{path}", method=verb), 404)


def test_others_jobs_are_not_listed(stranger: FlaskClient, trained: uuid.UUID) -> None:
    assert job_ids(stranger) == []
    assert stranger.get(f"/v1/fine_tuning/jobs?after={ids.job_id(trained)}").status_code == 404


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "'; DROP TABLE jobs; --", "{{ 7*7 }}", "\u202e\U0001f4a9", "a\nb"]
)
def test_text_is_kept_as_it_is(client: FlaskClient, text: str) -> None:
    made = create(client, metadata={"note": text}).json
    assert client.get(f"/v1/fine_tuning/jobs/{made['id']}").json["metadata"] == {"note": text}
