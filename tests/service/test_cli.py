"""The `marlaas` command against the real services: what it does, prints and exits with."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner, Result

from app import db
from app.cli import app, output
from app.db import transaction
from app.manager import jobs, tenants
from app.models import ApiKey, Tenant
from app.settings import get_settings
from tests import by_hand, stored
from tests.service.conftest import Bells

SPEC = Path(__file__).parent.parent.parent / "docs" / "examples"


def run(*arguments: object, input: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=input)


def told(*arguments: object, input: str | None = None) -> Any:
    """What a command says as JSON; it must succeed."""
    result = run(*arguments, "--json", input=input)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: object, status: int = 2, input: str | None = None) -> str:
    """The one line with which a command is refused."""
    result = run(*arguments, input=input)
    assert result.exit_code == status, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(by_hand.document()))
    return path


# --- tenants and keys


def test_a_tenant_is_created_changed_and_listed(hand: None) -> None:
    made = told("tenant", "create", "acme", "--weight", 2)
    assert (made["name"], made["weight"], made["max_running_jobs"]) == ("acme", 2.0, 4)
    told("tenant", "set", "acme", "--max-running-jobs", 1, "--suspend")
    (listed,) = told("tenant", "list")
    assert (listed["weight"], listed["max_running_jobs"], listed["suspended"]) == (2.0, 1, True)
    assert told("tenant", "set", "acme", "--unsuspend")["suspended"] is False


def test_the_next_step_can_be_pasted(hand: None) -> None:
    assert "--tenant 'night shift'" in run("tenant", "create", "night shift").output


def test_lifting_a_suspension_rings_for_admission(tenant: Tenant, bells: Bells) -> None:
    told("tenant", "set", tenant.name, "--unsuspend")
    assert [task for task, _ in bells] == ["manager.admit"]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("create", "acme"), "acme"),
        (("create", "a:b"), "a letter or digit"),
        (("create", "../x"), "a letter or digit"),
        (("create", "x" * 65), "1 to 64"),
        (("create", "two\n"), "a letter or digit"),
        (("set", "acme", "--weight", "0"), "weight"),
        (("set", "nobody"), "nobody"),
    ],
)
def test_a_wrong_tenant_is_refused(tenant: Tenant, arguments: tuple[str, ...], field: str) -> None:
    assert field in refused("tenant", *arguments)


def test_a_keys_secret_is_shown_once(tenant: Tenant) -> None:
    made = told("key", "create", "ci", "--tenant", "acme", "--scope", "read", "--expires-days", 1)
    assert made["secret"].startswith(made["prefix"])
    (listed,) = told("key", "list", "--tenant", "acme")
    assert listed == {k: v for k, v in made.items() if k != "secret"}
    assert made["secret"] not in run("key", "list", "--tenant", "acme").output
    with transaction() as session:
        assert session.get_one(ApiKey, uuid.UUID(made["id"])).secret_hash == tenants.hash_secret(made["secret"])


def test_a_key_is_revoked_by_what_list_shows(tenant: Tenant) -> None:
    made = told("key", "create", "ci", "--tenant", "acme")
    assert told("key", "revoke", made["prefix"], "--tenant", "acme")["revoked_at"] is not None


# --- jobs


def test_a_job_is_created_from_a_file_with_changes(tenant: Tenant, document: Path) -> None:
    arguments = ("job", "create", "-f", document, "-t", "acme", "--set", "hyperparameters.n_steps=7", "--set", "seed=5")
    made = told(*arguments)
    assert (made["state"], made["phase"], made["n_steps"]) == ("validating_files", "validating", 7)
    assert by_hand.job(uuid.UUID(made["job_id"])).spec["seed"] == 5


def test_a_job_is_created_from_yaml_on_standard_input(tenant: Tenant) -> None:
    text = """
    name: digits
    base_model: tiny
    environment: {type: toy_digits}
    hyperparameters: {learning_rate: 1e-4}
    """
    made = told("job", "create", "-f", "-", "-t", "acme", input=text)
    assert by_hand.job(uuid.UUID(made["job_id"])).spec["hyperparameters"]["learning_rate"] == 1e-4


def test_a_submit_key_makes_one_job(tenant: Tenant, document: Path) -> None:
    arguments = ("job", "create", "-f", document, "-t", "acme", "--submit-key", "monday")
    assert told(*arguments)["job_id"] == told(*arguments)["job_id"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("base_model=gpt", "base_model: unknown 'gpt'; known: tiny"),
        ("lora.rank=128", "lora.rank: 128 is over the engines' maximum of 64"),
        ("hyperparameters.group_size=1", "hyperparameters.group_size: must be at least 2"),
        ("sampling.max_tokens=512", "leaves no room for a prompt in 512 tokens"),
        ("hyperparameters.prompts_per_round=4096", "hyperparameters.prompts_per_round: 4096 prompts of 2 episodes"),
        ("environment={type: calculator}", "environment.max_turns: calculator takes at least 2"),
        ("environment={type: reasoning_gym, params: {task: sums}}", "environment.params.task"),
        ("seed", "--set takes FIELD=VALUE"),
        ("name.first=x", "name holds a value"),
        ("seed={", "is not a YAML value"),
    ],
)
def test_a_wrong_job_is_refused_by_field_and_never_made(
    tenant: Tenant, document: Path, change: str, words: str
) -> None:
    assert words in refused("job", "create", "-f", document, "-t", "acme", "--set", change)
    assert told("job", "list") == []


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not YAML or JSON"), ("- a", "must hold the fields of a job"), ("a: [", "line 1")]
)
def test_a_file_that_is_no_job_is_refused(tenant: Tenant, text: str, words: str) -> None:
    assert words in refused("job", "create", "-f", "-", "-t", "acme", input=text)


def test_a_missing_file_is_refused(tenant: Tenant) -> None:
    assert "cannot be read" in refused("job", "create", "-f", "/no/such.yaml", "-t", "acme")


@pytest.mark.parametrize("path", sorted(SPEC.glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_jobs(tenant: Tenant, path: Path) -> None:
    by_hand.register_model("smollm2-135m-instruct")
    assert told("job", "create", "-f", path, "-t", "acme")["phase"] == "validating"


def test_jobs_are_found_by_id_start_of_id_and_name(tenant: Tenant) -> None:
    job_id = by_hand.submit(tenant)
    for name in (job_id, str(job_id)[:6], "digits"):
        assert told("job", "show", name)["job_id"] == str(job_id)


def test_an_unknown_job_is_refused(tenant: Tenant) -> None:
    assert "no job 'nixe'; `marlaas job list`" in refused("job", "show", "nixe")


def test_a_start_of_an_id_that_is_too_short_is_said_to_be(tenant: Tenant) -> None:
    assert "at least 4 characters" in refused("job", "show", str(by_hand.submit(tenant))[:3])


def test_jobs_are_listed_by_tenant_and_state(tenant: Tenant) -> None:
    mine, other = by_hand.submit(tenant), by_hand.submit(by_hand.make_tenant("other"))
    with transaction() as session:
        jobs.cancel(session, other)
    assert [j["job_id"] for j in told("job", "list")] == [str(mine), str(other)]
    assert [j["job_id"] for j in told("job", "list", "-t", "other")] == [str(other)]
    assert [j["job_id"] for j in told("job", "list", "--state", "validating_files")] == [str(mine)]


def test_pause_resume_and_cancel_act_on_all_named_jobs(tenant: Tenant) -> None:
    ids = [by_hand.queue_job(tenant, name=name) for name in ("one", "two")]

    def states() -> set[tuple[str, str]]:
        return {(j.state, j.wanted) for j in map(by_hand.job, ids)}

    assert len(told("job", "pause", "one", "two")) == 2
    assert states() == {("paused", "pause")}
    told("job", "resume", "one", "two")
    assert states() == {("queued", "run")}
    told("job", "cancel", "one", "two")
    assert states() == {("cancelled", "cancel")}


def test_where_one_job_cannot_be_cancelled_none_is(tenant: Tenant) -> None:
    over, live = by_hand.queue_job(tenant, name="over"), by_hand.queue_job(tenant, name="live")
    told("job", "cancel", "over")
    assert "is cancelled already" in refused("job", "cancel", str(live), str(over))
    assert by_hand.job(live).state == "queued"


def test_watch_ends_with_status_0_when_all_succeeded(tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant, hyperparameters={"n_steps": 1})
    by_hand.step(job_id)
    result = run("job", "watch", "digits")
    assert (result.exit_code, "1/1" in result.stdout) == (0, True)


@pytest.mark.parametrize(("width", "headings"), [(80, 7), (160, 11)])
def test_watch_shows_what_a_terminal_has_room_for(tenant: Tenant, width: int, headings: int) -> None:
    """No word is cut: the heading is one line and each job another."""
    by_hand.start_job(tenant)
    told("job", "cancel", "digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output.out, "width", width)
        lines = run("job", "watch", "digits").stdout.splitlines()
    heading, line = lines[:2]
    assert heading.startswith("TENANT" if width == 80 else "ID")
    assert (len(heading.split()), len(line.split())) == (headings, headings)


def test_watch_ends_with_status_1_and_the_reason_when_one_failed(tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant)
    with transaction() as session:
        jobs.fail_by_id(session, job_id, "environment_error", "the grader raised")
    result = run("job", "watch", "digits", "--json")
    assert result.exit_code == 1
    assert "environment_error: the grader raised" in result.stderr
    (line,) = map(json.loads, result.stdout.splitlines())
    assert (line["phase"], line["error"]) == ("failed", "environment_error: the grader raised")


def test_events_and_metrics_are_told_in_order(tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant)
    by_hand.step(job_id)
    by_hand.step(job_id)
    codes = [event["code"] for event in told("job", "events", "digits")]
    assert codes == ["job_created", "job_validated", "job_started"]
    assert [event["code"] for event in told("job", "events", "digits", "--limit", 1)] == ["job_started"]
    assert [(row["version"], row["reward_mean"]) for row in told("job", "metrics", "digits")] == [(1, 0.5), (2, 0.5)]


def test_trajectories_tell_prompts_turns_and_rewards(tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant)
    by_hand.finish_round(job_id)
    found = told("job", "trajectories", "digits", "--limit", 1, "--offset", 1)
    assert (found["version"], found["kind"], found["state"], found["groups_total"]) == (0, "train", "ready", 2)
    (group,) = found["groups"]
    assert (group["index"], group["messages"]) == (1, [{"role": "user", "content": "?"}])
    assert [e["reward"] for e in group["episodes"]] == [0.0, 1.0]
    (turn,) = group["episodes"][0]["turns"]
    assert (turn["kind"], turn["messages"][0]["content"], turn["tokens"]) == ("policy", "7", 3)


def test_trajectories_of_a_version_that_has_none_are_refused(tenant: Tenant) -> None:
    by_hand.start_job(tenant)
    assert "versions 0 to 0" in refused("job", "trajectories", "digits", "--version", 3)


def test_text_of_a_model_cannot_steer_the_terminal(tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant)
    by_hand.to_state(by_hand.live_round(job_id).id, by_hand.EpisodeState.GENERATING)
    claims = by_hand.claim(by_hand.ids(by_hand.episodes_of(by_hand.live_round(job_id).id)), "generating")  # type: ignore[arg-type]
    by_hand.record_turns([by_hand.turn(c, text="\x1b[2J[red]gone") for c in claims])
    result = run("job", "trajectories", "digits")
    assert "\x1b" not in result.stdout
    assert "[red]gone" in result.stdout


# --- adapters, files, workers


def test_an_adapter_is_downloaded_by_the_jobs_name(tenant: Tenant, tmp_path: Path) -> None:
    stored.step(stored.start_job(tenant))
    done = told("adapter", "download", "digits", "--to", tmp_path / "a")
    assert done["version"] == 1
    assert (tmp_path / "a" / "adapter_model.safetensors").read_bytes() == stored.weights(1)
    assert "--force" in refused("adapter", "download", "digits", "--version", 0, "--to", tmp_path / "a")
    assert [v["version"] for v in told("adapter", "list", "digits")] == [0, 1]
    assert len(run("adapter", "url", "digits").stdout.split()) == 2


def test_a_file_is_uploaded_listed_and_deleted(tenant: Tenant, tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "2+2?"}]}) + "\n")
    made = told("file", "upload", path, "--tenant", "acme")
    (listed,) = told("file", "list", "--tenant", "acme")
    assert (listed["id"], listed["name"], listed["lines"]) == (made["id"], "sums.jsonl", 1)
    told("file", "delete", made["id"], "--tenant", "acme")
    assert told("file", "list", "--tenant", "acme") == []


def test_workers_are_listed_and_drained(hand: None) -> None:
    told("worker", "drain", "rollout@hand")
    draining = {w["name"]: w["draining"] for w in told("worker", "list")}
    assert draining == {"rollout@hand": True, "tools@hand": False, "training@hand": False}
    assert told("worker", "undrain", "rollout@hand")["draining"] is False
    assert "no worker is named" in refused("worker", "drain", "rollout@nowhere")


def test_tables_are_for_people(tenant: Tenant) -> None:
    by_hand.start_job(tenant)
    for arguments in (("tenant", "list"), ("key", "list", "-t", "acme"), ("job", "list"), ("job", "show", "digits")):
        assert run(*arguments).exit_code == 0
    assert run("job", "list").stdout.split()[:6] == ["ID", "TENANT", "JOB", "PHASE", "VERSION", "REWARD"]


# --- services that do not answer


@pytest.fixture
def other_database(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Points the command at another database for the time of the test."""

    def point(url: str) -> None:
        for name in ("MARLAAS_DATABASE_URL", "MARLAAS_DATABASE_SERVICE_URL"):
            monkeypatch.setenv(name, url)
        get_settings.cache_clear()
        db.engine.cache_clear()

    yield point
    monkeypatch.undo()
    get_settings.cache_clear()
    db.engine.cache_clear()


def test_a_database_that_does_not_answer_is_told_with_the_way_to_start_one(hand: None, other_database: Any) -> None:
    other_database("postgresql+psycopg://nobody@127.0.0.1:9/none")
    line = refused("tenant", "list", status=3)
    assert "127.0.0.1:9" in line
    assert "marlaas up" in line


def test_a_database_without_schema_is_told_with_the_way_to_make_it(hand: None, other_database: Any) -> None:
    url = get_settings().database_url.get_secret_value()
    plain = url.replace("+psycopg", "")
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute("CREATE DATABASE bare")
        try:
            other_database(url.rpartition("/")[0] + "/bare")
            assert "marlaas db upgrade" in refused("tenant", "list", status=3)
        finally:
            db.dispose_engines()
            connection.execute("DROP DATABASE bare")
