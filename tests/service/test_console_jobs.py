"""The console's pages of jobs: list, form, one job, trajectories, comparison; the JSON of charts and timeline."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from apiflask import APIFlask
from sqlalchemy import select

from app.api import documents
from app.console import data
from app.console.job_form import FIELDS, read, values_of
from app.console.job_templates import GRADERS, TEMPLATES
from app.console.snippets import request_body
from app.db import transaction
from app.manager import jobs
from app.manager.job_list import SORTS
from app.manager.timeline import LanePhase, Stretch, timeline, waiting
from app.models import AuditEntry, Job, Round, Tenant
from app.models.job import JobKind, JobState
from app.models.round import EpisodeState
from app.specs.grader import parse_grader
from app.specs.job import JobSpec
from tests import by_hand
from tests.console_client import Console, make_operator
from tests.service.conftest import Bells

HOSTILE = "<script>alert('x')</script>"
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """The timeline that all consoles share is this test's."""
    data._shared.cache_clear()
    yield


@pytest.fixture
def console(web_app: APIFlask, hand: None) -> Console:
    """An operator is logged in."""
    make_operator("otto", "operator")
    browser = Console(web_app.test_client())
    browser.log_in("otto")
    return browser


@pytest.fixture
def viewer(web_app: APIFlask, hand: None) -> Console:
    make_operator("vera", "viewer")
    browser = Console(web_app.test_client())
    browser.log_in("vera")
    return browser


@pytest.fixture
def trained(tenant: Tenant) -> uuid.UUID:
    """A running job with two versions after 0, an evaluation, and a third round under way."""
    job_id = by_hand.start_job(tenant, evaluation={"every": 2, "prompts": 1})
    play_evaluations(job_id)
    for _ in range(2):
        by_hand.step(job_id)
    by_hand.execute(
        "UPDATE step_metrics SET metrics = metrics || CAST(:more AS jsonb)",
        more=json.dumps({"reward_std": 0.5, "loss": -0.01, "loss_tokens": 12, "entropy": 1.5}),
    )
    return job_id


def play_evaluations(job_id: uuid.UUID) -> None:
    with transaction() as session:
        rounds = session.scalars(
            select(Round.id).where(Round.job_id == job_id, Round.kind == "eval", Round.state == "rolling_out")
        ).all()
    for round_id in rounds:
        by_hand.act(by_hand.to_state(round_id, EpisodeState.ACTING))


def audited(action: str) -> list[AuditEntry]:
    with transaction() as session:
        return list(session.scalars(select(AuditEntry).where(AuditEntry.action == action).order_by(AuditEntry.id)))


def only_job() -> Job:
    with transaction() as session:
        return session.scalars(select(Job)).one()


def names(page: str) -> list[str]:
    """Of the jobs in a list, in its order."""
    return re.findall(r'<th scope="row"><a href="/console/jobs/[0-9a-f-]+">([^<]*)</a>', page)


# --- the list


def test_without_jobs_the_list_says_what_to_do(console: Console) -> None:
    assert "Create the first job" in console.page("/console/jobs")


def test_the_list_shows_progress_and_steps_are_live(console: Console, trained: uuid.UUID) -> None:
    page = console.page("/console/jobs")
    assert names(page) == ["digits"]
    assert "2/3" in page and 'hx-trigger="every 2s"' in page
    assert names(console.page("/console/fragments/jobs")) == ["digits"]


def test_filters_leave_what_fits(console: Console, tenant: Tenant) -> None:
    other = by_hand.make_tenant("globex")
    by_hand.submit(tenant, name="first")
    running = by_hand.start_job(other, name="second")
    for query, found in (
        ("state=running", ["second"]),
        (f"tenant={tenant.id}", ["first"]),
        ("base_model=tiny", ["second", "first"]),
        ("base_model=none", []),
        ("q=SECO", ["second"]),
        ("q=glob", ["second"]),
        (f"q={str(running)[:8]}", ["second"]),
        ("q=100%25", []),
    ):
        assert names(console.page(f"/console/jobs?{query}")) == found, query


def test_preflights_are_not_in_the_list(console: Console, tenant: Tenant) -> None:
    with transaction() as session:
        jobs.submit(session, tenant, jobs.parse_spec(by_hand.document()), kind=JobKind.PREFLIGHT)
    assert names(console.page("/console/jobs")) == []


@pytest.mark.parametrize("query", ["state=odd", "tenant=7", "sort=size", "cursor=abc", "cursor=WzEsMl0"])
def test_a_filter_without_sense_is_refused(console: Console, query: str) -> None:
    assert console.get(f"/console/jobs?{query}").status_code == 400


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("sort", SORTS)
def test_pages_show_each_job_once_in_every_order(
    console: Console, tenant: Tenant, monkeypatch: pytest.MonkeyPatch, sort: str, order: str
) -> None:
    monkeypatch.setattr("app.manager.job_list.job_page.__defaults__", (3,))
    for number in range(7):
        by_hand.submit(tenant, name=f"job-{number}")
    seen, address = [], f"/console/jobs?sort={sort}&order={order}"
    while address:
        page = console.page(address)
        seen += names(page)
        following = re.search(r'href="([^"]+)" rel="next"', page)
        address = following[1] if following else ""
    assert sorted(seen) == [f"job-{number}" for number in range(7)]
    if sort in ("name", "created"):
        assert seen == sorted(seen, reverse=order == "desc")


def test_several_jobs_are_cancelled_at_once_and_audited(console: Console, tenant: Tenant) -> None:
    chosen = [by_hand.submit(tenant, name=name) for name in ("a", "b")]
    left = by_hand.submit(tenant, name="c")
    page = console.done("/console/jobs/steer?q=a", action="cancel", job=[str(i) for i in chosen])
    assert "2 jobs cancelled" in page
    assert [by_hand.job(i).state for i in (*chosen, left)] == [JobState.CANCELLED] * 2 + [JobState.VALIDATING]
    assert {e.target_id for e in audited("job.cancel")} == {str(i) for i in chosen}


def test_one_job_that_is_over_does_not_keep_others_from_it(console: Console, tenant: Tenant) -> None:
    over, live = by_hand.submit(tenant), by_hand.queue_job(tenant)
    by_hand.cancel(over)
    page = console.done("/console/jobs/steer", action="pause", job=[str(over), str(live)])
    assert "1 job pausing" in page and "only a live job can be paused" in page
    assert by_hand.job(live).state == JobState.PAUSED


def test_where_no_job_can_be_chosen_there_is_nothing_to_choose_with(console: Console, tenant: Tenant) -> None:
    by_hand.cancel(by_hand.submit(tenant))
    page = console.page("/console/jobs")
    assert "data-all" not in page and "With the chosen" not in page
    by_hand.submit(tenant)
    page = console.page("/console/jobs")
    assert "data-all" in page and "With the chosen" in page


@pytest.mark.parametrize("fields", [{"action": "delete", "job": ["x"]}, {"action": "cancel", "job": ["x"]}])
def test_steering_without_sense_is_refused(console: Console, fields: dict[str, Any]) -> None:
    assert console.post("/console/jobs/steer", **fields).status_code == 400


# --- a job


def test_a_jobs_page_tells_health_facts_and_curves(console: Console, trained: uuid.UUID) -> None:
    page = console.page(f"/console/jobs/{trained}")
    for told in ("Too early to tell", ">of 3<", "rank 8", 'data-metric="logprob_gap"', "data-timeline"):
        assert told in page


@pytest.mark.parametrize("part", ["", "/events", "/checkpoints", "/document", "/trajectories"])
def test_each_part_of_a_job_of_each_age(console: Console, tenant: Tenant, trained: uuid.UUID, part: str) -> None:
    for job_id in (by_hand.submit(tenant), by_hand.queue_job(tenant), trained):
        console.page(f"/console/jobs/{job_id}{part}")
    assert console.get(f"/console/jobs/{uuid.uuid4()}{part}").status_code == 404


def test_a_job_that_is_over_is_not_polled(console: Console, tenant: Tenant) -> None:
    job_id = by_hand.submit(tenant)
    assert "data-poll" in console.page(f"/console/fragments/jobs/{job_id}")
    by_hand.cancel(job_id)
    for part in ("", "/events"):
        assert "data-poll" not in console.page(f"/console/fragments/jobs/{job_id}{part}")


def test_a_preflight_is_no_job(console: Console, tenant: Tenant) -> None:
    with transaction() as session:
        made = jobs.submit(session, tenant, jobs.parse_spec(by_hand.document()), kind=JobKind.PREFLIGHT)
    assert console.get(f"/console/jobs/{made.id}").status_code == 404


def test_a_job_is_paused_resumed_and_cancelled(console: Console, tenant: Tenant) -> None:
    job_id = by_hand.queue_job(tenant)
    assert "Resume" in console.done(f"/console/jobs/{job_id}/pause")
    assert by_hand.job(job_id).state == JobState.PAUSED
    assert "Resume" not in console.done(f"/console/jobs/{job_id}/resume")
    assert "Cancelled at version 0" in console.done(f"/console/jobs/{job_id}/cancel")
    told = [(e.action, e.actor, e.tenant_id) for a in ("pause", "resume", "cancel") for e in audited(f"job.{a}")]
    assert told == [(f"job.{a}", "otto", tenant.id) for a in ("pause", "resume", "cancel")]


def test_what_cannot_be_done_is_told_and_not_audited(console: Console, tenant: Tenant) -> None:
    job_id = by_hand.submit(tenant)
    response = console.post(f"/console/jobs/{job_id}/resume")
    assert response.status_code == 400 and "not paused" in response.text
    assert audited("job.resume") == []


def test_a_viewer_sees_no_buttons(viewer: Console, trained: uuid.UUID) -> None:
    page = viewer.page(f"/console/jobs/{trained}")
    assert "/cancel" not in page and "Clone" not in page
    assert "/adapter" not in viewer.page(f"/console/jobs/{trained}/checkpoints")
    assert viewer.get(f"/console/jobs/{trained}/checkpoints/1/adapter").status_code == 403
    assert viewer.get("/console/jobs/new").status_code == 403


def test_an_adapter_that_is_not_there_is_told(console: Console, trained: uuid.UUID) -> None:
    assert console.get(f"/console/jobs/{trained}/checkpoints/9/adapter").status_code == 404


def test_checkpoints_come_in_pages(console: Console, trained: uuid.UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.console.job.CHECKPOINTS", 2)
    page = console.page(f"/console/jobs/{trained}/checkpoints")
    assert "Version 2" in page and "Version 0" not in page
    older = re.search(r'href="([^"]+)" rel="next"', page)
    assert older and "Version 0" in console.page(older[1])


def test_the_document_makes_the_same_job(console: Console, trained: uuid.UUID) -> None:
    found = re.search(
        r'<pre class="code" id="document"[^>]*>(.*?)</pre>', console.page(f"/console/jobs/{trained}/document"), re.S
    )
    assert found
    assert JobSpec.model_validate(yaml.safe_load(found[1])).model_dump(mode="json") == by_hand.job(trained).spec


# --- trajectories


def say(job_id: uuid.UUID, content: str) -> None:
    by_hand.execute(
        "UPDATE turns SET messages = CAST(:said AS jsonb) WHERE kind = 'policy'",
        said=json.dumps([{"role": "assistant", "content": content}]),
    )


def test_trajectories_show_tool_calls_and_rewards(console: Console, trained: uuid.UUID) -> None:
    say(trained, f"thinking {CALL}")
    page = console.get(f"/console/jobs/{trained}/trajectories?version=1").text
    assert (
        page.count('<mark class="tool-call">' + html.escape(CALL).replace("&#x27;", "&#39;").replace("&quot;", "&#34;"))
        == 4
    )
    assert page.count("reward reward-good") == page.count("reward reward-none") == 4  # two each, told twice


@pytest.mark.parametrize(
    ("query", "answers"),
    [
        ("version=1", 4),
        ("version=1&passed=yes", 2),
        ("version=1&min_reward=0.5", 2),
        ("version=1&max_reward=0.5", 2),
        ("version=&kind=eval", 2),
        ("version=&kind=train", 12),
        ("version=9", 0),
        ("kind=preflight", 0),
    ],
)
def test_trajectories_are_filtered(console: Console, trained: uuid.UUID, query: str, answers: int) -> None:
    page = console.page(f"/console/jobs/{trained}/trajectories?{query}")
    assert page.count('<details class="episode">') == answers


def test_trajectories_come_in_pages(console: Console, trained: uuid.UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.console.trajectories.PAGE", 5)
    address, pages = f"/console/jobs/{trained}/trajectories?version=&kind=train", []
    while address:
        page = console.page(address)
        pages.append(page.count('<details class="episode">'))
        following = re.search(r'href="([^"]+)" rel="next"', page)
        address = following[1] if following else ""
    assert pages == [5, 5, 2]


@pytest.mark.parametrize(
    "query", ["version=x", "kind=odd", "min_reward=nan", "after=99999999999999999999", "version=1e9"]
)
def test_a_trajectory_filter_without_sense_is_refused(console: Console, trained: uuid.UUID, query: str) -> None:
    assert console.get(f"/console/jobs/{trained}/trajectories?{query}").status_code == 400


def test_removed_turns_are_told(console: Console, trained: uuid.UUID) -> None:
    by_hand.execute("DELETE FROM turns")
    assert "removed by retention" in console.page(f"/console/jobs/{trained}/trajectories?version=1")


def test_a_long_message_is_cut(console: Console, trained: uuid.UUID) -> None:
    say(trained, "x" * 30_000)
    assert "10000 more characters" in console.page(f"/console/jobs/{trained}/trajectories?version=1")


# --- hostile text


def test_text_of_others_is_shown_and_not_run(console: Console, tenant: Tenant, trained: uuid.UUID) -> None:
    say(trained, HOSTILE)
    by_hand.execute(
        "UPDATE groups SET messages = CAST(:said AS jsonb)", said=json.dumps([{"role": HOSTILE, "content": HOSTILE}])
    )
    by_hand.execute("UPDATE episodes SET flags = CAST(:flags AS jsonb)", flags=json.dumps([HOSTILE]))
    by_hand.execute("UPDATE jobs SET name = :name, error_message = :name", name=HOSTILE)
    by_hand.execute("UPDATE tenants SET name = :name", name=HOSTILE)
    by_hand.execute("UPDATE events SET message = :text, code = :text", text=HOSTILE)
    for path in (
        "/console/jobs",
        "/console/jobs?q=" + HOSTILE,
        f"/console/jobs/{trained}",
        f"/console/jobs/{trained}/events",
        f"/console/jobs/{trained}/checkpoints",
        f"/console/jobs/{trained}/trajectories?version=1",
        f"/console/compare?job={trained}&q=" + HOSTILE,
        "/console/jobs/new",
        f"/console/jobs/new?clone={trained}",
    ):
        text = console.get(path).text
        assert "<script>alert(" not in text, path
        assert "&lt;script&gt;alert(" in text, path


def test_hostile_values_of_the_form_come_back_as_text(console: Console, tenant: Tenant) -> None:
    filled = form("calculator", tenant) | dict.fromkeys(FIELDS, HOSTILE)
    for path, status in (
        ("/console/jobs/new", 422),
        ("/console/fragments/new-job", 200),
        ("/console/jobs/preflight", 200),
    ):
        response = console.post(path, **filled)
        assert response.status_code == status
        assert "<script>alert(" not in response.text


def test_pages_hold_no_code_or_style_of_their_own(console: Console, trained: uuid.UUID) -> None:
    for path in ("/console/jobs", f"/console/jobs/{trained}", "/console/jobs/new", f"/console/compare?job={trained}"):
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|javascript:", console.get(path).text)


# --- the form


def form(template: str, tenant: Tenant | None, **changes: Any) -> dict[str, Any]:
    """What a browser sends for a template, with some fields changed."""
    filled: dict[str, Any] = dict(values_of(dict(TEMPLATES[template].document) | {"base_model": by_hand.MODEL}))
    return filled | {"once": str(uuid.uuid4()), "tenant": str(tenant.id) if tenant else ""} | changes


SMALL = {"sampling.max_tokens": "8"}


@pytest.mark.parametrize("template", ["calculator", "reasoning_gym"])
def test_a_template_makes_a_job_of_it(console: Console, tenant: Tenant, bells: Bells, template: str) -> None:
    page = console.done("/console/jobs/new", **form(template, tenant, **SMALL))
    made = only_job()
    expected = jobs.parse_spec(
        TEMPLATES[template].document | {"base_model": by_hand.MODEL, "sampling": {"max_tokens": 8}}
    )
    assert JobSpec.model_validate(made.spec) == expected
    assert made.name in page
    (entry,) = audited("job.create")
    assert (entry.target_id, entry.tenant_id) == (str(made.id), tenant.id)


def test_own_data_and_a_grader_make_a_job(console: Console, tenant: Tenant) -> None:
    items = '{"messages": [{"role": "user", "content": "1+1?"}], "answer": "2"}\n' * 5
    grader = GRADERS["Python"]
    fields = {"params.dataset.items": items, "params.dataset.grader": grader, "sampling.max_tokens": "8"}
    console.done("/console/jobs/new", **form("dataset", tenant, **fields))
    params = only_job().spec["environment"]["params"]
    assert len(params["items"]) == 5 and params["grader"]["type"] == "python"


def test_a_form_sent_twice_makes_one_job(console: Console, tenant: Tenant) -> None:
    filled = form("calculator", tenant, **SMALL)
    for _ in range(2):
        console.done("/console/jobs/new", **filled)
    only_job()


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("tenant", "", "choose the tenant"),
        ("name", "no spaces!", "takes letters"),
        ("base_model", "other", "unknown"),
        ("hyperparameters.group_size", "1", "must be at least 2"),
        ("hyperparameters.n_steps", "many", "valid integer"),
        ("hyperparameters.learning_rate", "nan", "finite"),
        ("hyperparameters.minibatches", "9", "must not exceed prompts_per_round"),
        ("lora.rank", "7", "must be one of"),
        ("lora.target_modules", [], "choose from"),
        ("environment.max_turns", "1", "at least 2 turns"),
        ("sampling.max_tokens", "9999", "leaves no room"),
        ("metadata", "[1, 2]", "valid dictionary"),
        ("metadata", "a: &b c\nd: *b", "aliases"),
        ("params.calculator.terms", "1", "must be at least 2"),
        ("params.calculator.latency_seconds", "3, 1", "[low, high]"),
        ("params.calculator.operators", ["%"], "Input should be"),
    ],
)
def test_an_error_stands_beside_its_field_and_values_stay(
    console: Console, tenant: Tenant, field: str, value: Any, told: str
) -> None:
    filled = form("calculator", tenant, **SMALL, name="kept-as-it-was") | {field: value}
    response = console.post("/console/jobs/new", **filled)
    page = html.unescape(response.text)
    assert response.status_code == 422
    beside = re.search(
        rf'id="{re.escape(field)}-error">(.*?)</span>|<fieldset aria-describedby="{re.escape(field)}-error"', page
    )
    assert beside, field
    assert told in page
    assert 'value="kept-as-it-was"' in page or field == "name"
    with transaction() as session:
        assert session.scalars(select(Job)).first() is None


def test_data_that_is_missing_is_told_beside_the_file(console: Console, tenant: Tenant) -> None:
    page = console.post("/console/jobs/new", **form("dataset", tenant)).text
    assert 'id="params.dataset.file_id-error">choose a training file, upload one' in page
    assert "`" not in page.split("</aside>")[0].split('id="form-errors"')[1].split("</div>")[0]


def test_a_broken_grader_stands_beside_the_grader(console: Console, tenant: Tenant) -> None:
    filled = form("dataset", tenant, **{"params.dataset.grader": "type: endpoint"})
    page = html.unescape(console.post("/console/jobs/new", **filled).text)
    assert 'id="params.dataset.grader-error"' in page


def test_a_suspended_tenant_gets_no_job(console: Console, tenant: Tenant) -> None:
    by_hand.execute("UPDATE tenants SET suspended = true")
    response = console.post("/console/jobs/new", **form("calculator", tenant, **SMALL))
    assert response.status_code == 422 and "is suspended" in response.text


def test_a_form_without_its_number_is_refused(console: Console, tenant: Tenant) -> None:
    assert console.post("/console/jobs/new", **form("calculator", tenant, **SMALL, once="1")).status_code == 400


def test_a_clone_is_filled_with_the_jobs_options(console: Console, tenant: Tenant) -> None:
    job_id = by_hand.submit(tenant, seed=77, lora={"rank": 16}, environment={"params": {"operators": ["*"]}})
    page = console.page(f"/console/jobs/new?clone={job_id}")
    assert 'value="digits-again"' in page and 'value="77"' in page
    assert f'<option value="{tenant.id}" selected>' in page
    assert console.get("/console/jobs/new?clone=x").status_code == 404
    assert console.get("/console/jobs/new?template=x").status_code == 404


def test_an_environment_of_the_operators_own_can_be_given(console: Console, tenant: Tenant) -> None:
    fields = {"environment.type": "other", "other.type": "toy", "other.params": "{}", **SMALL}
    console.done("/console/jobs/new", **form("calculator", tenant, **fields))
    assert only_job().spec["environment"]["type"] == "toy"


def test_the_equal_call_follows_the_form(console: Console, tenant: Tenant) -> None:
    filled = form("calculator", tenant, name="it's", **{"hyperparameters.n_steps": "77"})
    page = html.unescape(console.post("/console/fragments/new-job", **filled).text)
    assert '"n_steps": 77' in page and "'\\''" in page  # quoted for the shell
    assert "Name: takes letters" in page


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hyperparameters": {"n_steps": 9, "tis_cap": None}, "evaluation": {"every": 2, "prompts": 3, "samples": 2}},
        {"sampling": {"max_tokens": 8, "temperature": 0.7}, "lora": {"rank": 16}, "weight": 2.0, "seed": 5},
        {
            "environment": {
                "type": "dataset",
                "params": {"file_id": str(uuid.UUID(int=7)), "grader": {"type": "string_check", "reference": "a"}},
            }
        },
    ],
)
def test_the_equal_call_makes_the_same_job(changes: dict[str, Any]) -> None:
    document = {"name": "same", "base_model": "tiny", "environment": {"type": "calculator", "max_turns": 2}} | changes
    asked = documents.parse_request(request_body(document))
    file = documents.DataFile(uuid.UUID(int=7), 10) if asked.training_file else None
    made = documents.job_document(asked, file, None)
    for each in (made, document):
        if each["environment"]["type"] == "dataset":  # what a grader leaves out is its default
            each["environment"]["params"]["grader"] = parse_grader(each["environment"]["params"]["grader"]).model_dump()
    assert jobs.parse_spec(made) == jobs.parse_spec(document)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_goes_through_the_form_unchanged(template: str) -> None:
    document = TEMPLATES[template].document | {"base_model": "tiny"}
    filled = read({name: v if isinstance(v, list) else [v] for name, v in values_of(document).items()})
    assert filled.document == document


@pytest.mark.parametrize("preset", GRADERS)
def test_grader_presets_are_graders(preset: str) -> None:
    parse_grader(yaml.safe_load(GRADERS[preset]))


def test_the_files_of_the_chosen_tenant_are_offered(console: Console, tenant: Tenant) -> None:
    object_id, file_id = uuid.uuid4(), uuid.uuid4()
    by_hand.execute(
        "INSERT INTO objects (id, tenant_id, kind, key, sha256, size, state) VALUES"
        " (:id, :tenant, 'file', 'k', repeat('0', 64), 1, 'live')",
        id=object_id, tenant=tenant.id,
    )  # fmt: skip
    by_hand.execute(
        "INSERT INTO files (id, tenant_id, name, purpose, lines, object_id)"
        " VALUES (:id, :t, :name, 'fine-tune', 3, :o)",
        id=file_id, t=tenant.id, name=HOSTILE, o=object_id,
    )  # fmt: skip
    text = console.get(f"/console/fragments/new-job/files?tenant={tenant.id}").text
    assert str(file_id) in text and "<script>alert(" not in text
    assert str(file_id) not in console.get(f"/console/fragments/new-job/files?tenant={uuid.uuid4()}").text


LINES = b'{"messages": [{"role": "user", "content": "1+1?"}], "answer": "2"}\n' * 3


def upload(console: Console, tenant_id: object, content: bytes, name: str = "sums.jsonl") -> str:
    fields = {"tenant": str(tenant_id), "file": (io.BytesIO(content), name)}
    response = console.post("/console/fragments/new-job/files", headers={"X-CSRF-Token": console.token()}, **fields)
    assert response.status_code == 200
    return response.text


def test_a_file_is_uploaded_and_chosen(console: Console, tenant: Tenant) -> None:
    page = upload(console, tenant.id, LINES)
    (entry,) = audited("file.upload")
    assert f'<option value="{entry.target_id}" selected>sums.jsonl (3 lines)' in page
    fields = {"params.dataset.file_id": entry.target_id, "sampling.max_tokens": "8"}
    console.done("/console/jobs/new", **form("dataset", tenant, **fields))
    assert only_job().spec["environment"]["params"]["file_id"] == entry.target_id


@pytest.mark.parametrize(("content", "told"), [(b"{", "line 1 is not JSON"), (b"", "no items"), (b"\xff", "not UTF-8")])
def test_a_file_that_cannot_be_read_is_refused(console: Console, tenant: Tenant, content: bytes, told: str) -> None:
    page = html.unescape(upload(console, tenant.id, content))
    assert told in page and "selected" not in page
    assert audited("file.upload") == []


def test_a_file_wants_its_tenant_first(console: Console, hand: None) -> None:
    assert "choose the tenant first" in upload(console, "", LINES)


def test_a_file_over_the_limit_is_refused(console: Console, tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.console.new_job.UPLOAD_BYTES", 100)
    fields = {"tenant": str(tenant.id), "file": (io.BytesIO(LINES), "x.jsonl")}
    headers = {"X-CSRF-Token": console.token()}
    assert console.post("/console/fragments/new-job/files", headers=headers, **fields).status_code == 413


# --- preflight


def test_a_preflight_is_started_and_followed(console: Console, tenant: Tenant) -> None:
    response = console.post("/console/jobs/preflight", **form("calculator", tenant, **SMALL))
    assert "Preflight under way" in response.text
    made = only_job()
    assert made.kind == JobKind.PREFLIGHT
    assert len(audited("preflight.create")) == 1
    by_hand.cancel(made.id)
    page = console.page(f"/console/fragments/preflights/{made.id}")
    assert "The preflight cancelled" in page and "data-poll" not in page


def test_a_preflight_of_a_wrong_form_tells_what_is_wrong(console: Console, tenant: Tenant) -> None:
    filled = form("calculator", None, **{"hyperparameters.group_size": "1"})
    page = console.post("/console/jobs/preflight", **filled).text
    assert "Group size: must be at least 2" in page and "Tenant: choose the tenant" in page


def test_a_job_is_no_preflight(console: Console, trained: uuid.UUID) -> None:
    assert console.get(f"/console/fragments/preflights/{trained}").status_code == 404


# --- series


def test_series_hold_metrics_by_version_and_evaluations(console: Console, trained: uuid.UUID) -> None:
    play_evaluations(trained)
    (one,) = console.get(f"/console/data/series?job={trained}").json["jobs"]
    assert (one["versions"], one["over"], one["version"]) == ([1, 2], False, 2)
    assert one["metrics"]["reward_mean"] == [0.5, 0.5]
    assert one["metrics"]["kl"] == [None, None]
    assert all(speed > 0 for speed in one["metrics"]["tokens_per_second"])
    assert one["evals"] == {"versions": [0, 2], "reward_mean": [1.0, 1.0], "pass_rate": [1.0, 1.0]}


def test_only_newer_versions_are_told(console: Console, trained: uuid.UUID) -> None:
    (one,) = console.get(f"/console/data/series?job={trained}&after=1").json["jobs"]
    assert one["versions"] == [2]


def test_long_curves_are_thinned_but_keep_the_last_version(
    console: Console, trained: uuid.UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand.step(trained)
    monkeypatch.setattr("app.manager.series.MOST_POINTS", 2)
    (one,) = console.get(f"/console/data/series?job={trained}").json["jobs"]
    assert one["versions"] == [2, 3]


def test_only_evaluations_that_ended_since_are_told(console: Console, trained: uuid.UUID) -> None:
    play_evaluations(trained)
    by_hand.execute("UPDATE rounds SET finished_at = now() - interval '1 h' WHERE kind = 'eval' AND policy_version = 0")
    (one,) = console.get(f"/console/data/series?job={trained}&after=1").json["jobs"]
    assert one["evals"]["versions"] == [2]


def test_an_evaluation_that_ends_late_is_told(console: Console, trained: uuid.UUID) -> None:
    play_evaluations(trained)
    (one,) = console.get(f"/console/data/series?job={trained}&after=2").json["jobs"]
    assert one["evals"]["versions"] == [0, 2]


def test_evaluations_are_thinned_but_keep_the_last(
    console: Console, trained: uuid.UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_evaluations(trained)
    monkeypatch.setattr("app.manager.series.MOST_POINTS", 1)
    (one,) = console.get(f"/console/data/series?job={trained}").json["jobs"]
    assert one["evals"]["versions"] == [2]


def test_series_as_csv(console: Console, trained: uuid.UUID) -> None:
    by_hand.execute("UPDATE tenants SET name = '=1+1'")
    response = console.get(f"/console/data/series.csv?job={trained}")
    rows = list(csv.DictReader(io.StringIO(response.text)))
    assert [row["version"] for row in rows] == ["0", "1", "2"]  # at 0 there is an evaluation only
    assert rows[1]["loss"] == "-0.01" and rows[0]["eval_pass_rate"] == "1.0"
    assert rows[0]["tenant"] == "'=1+1"


@pytest.mark.parametrize("query", ["job=x", "job=" + "&job=".join(str(uuid.uuid4()) for _ in range(13))])
def test_series_of_odd_or_too_many_jobs_are_refused(console: Console, query: str) -> None:
    assert console.get(f"/console/data/series?{query}").status_code == 400


def test_the_comparison_draws_the_chosen_jobs(console: Console, tenant: Tenant, trained: uuid.UUID) -> None:
    other = by_hand.submit(tenant, name="other")
    page = console.page("/console/compare")
    assert "Choose jobs to compare" in page and "other" in page
    page = console.page(f"/console/compare?job={trained}&job={other}")
    assert f'data-src="/console/data/series?job={trained}&job={other}"' in page
    assert page.count("data-palette") == 2


def test_jobs_of_one_name_are_told_apart_by_their_ids(console: Console, tenant: Tenant) -> None:
    twins = [by_hand.submit(tenant, name="twin") for _ in range(2)]
    single = by_hand.submit(tenant, name="single")
    page = console.page("/console/compare")
    assert all(f'small">{str(job_id)[:8]}<' in page for job_id in twins)
    assert f'small">{str(single)[:8]}<' not in page


# --- timeline


def span(round_id: int, phase: str, start: float, end: float) -> None:
    """Seconds before now."""
    by_hand.execute(
        "INSERT INTO phase_spans (tenant_id, round_id, phase, worker, started_at, ended_at)"
        " SELECT tenant_id, id, :phase, 'w', now() - make_interval(secs => :start),"
        " now() - make_interval(secs => :end) FROM rounds WHERE id = :round",
        round=round_id, phase=phase, start=start, end=end,
    )  # fmt: skip


def lane(console: Console, query: str = "minutes=1") -> dict[str, list[tuple[int, float]]]:
    """Of the only job: (version, seconds) of each phase's stretches."""
    (found,) = console.get(f"/console/data/timeline?{query}").json["lanes"]
    phases: dict[str, list[tuple[int, float]]] = {}
    for phase, version, _, start, end in found["spans"]:
        phases.setdefault(phase, []).append((version, round(end - start)))
    return phases


def test_a_lane_has_the_phases_of_its_versions(console: Console, tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant)
    by_hand.step(job_id)
    first, second = (r.id for r in rounds_of(job_id))
    by_hand.execute(
        "UPDATE rounds SET created_at = now() - interval '50 s', admitted_at = now() - interval '50 s',"
        " ready_at = now() - interval '38 s', training_at = now() - interval '36 s',"
        " finished_at = now() - interval '30 s' WHERE id = :id",
        id=first,
    )
    by_hand.execute("UPDATE rounds SET created_at = now() - interval '30 s' WHERE id = :id", id=second)
    span(first, "rollout", 50, 45)
    span(first, "rollout", 45.1, 42)  # goes on: one stretch
    span(first, "environment", 44, 38)
    span(second, "rollout", 25, 20)
    assert lane(console) == {
        "rollout": [(0, 8), (1, 5)],
        "environment": [(0, 6)],
        "training": [(0, 6)],
        "waiting": [(0, 2), (1, 5), (1, 20)],
    }


def rounds_of(job_id: uuid.UUID) -> list[Any]:
    with transaction() as session:
        return list(session.scalars(select(Round).where(Round.job_id == job_id).order_by(Round.id)))


def test_what_is_under_way_is_seen_before_its_span_is_written(console: Console, tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant)
    held = by_hand.claim(
        by_hand.to_state(by_hand.live_round(job_id).id, EpisodeState.GENERATING), EpisodeState.GENERATING
    )
    assert held
    by_hand.execute("UPDATE rounds SET created_at = now() - interval '20 s', admitted_at = now() - interval '20 s'")
    by_hand.execute("UPDATE episodes SET doorbell_at = now() - interval '12 s'")
    assert lane(console) == {"rollout": [(0, 12)], "waiting": [(0, 8)]}


def test_an_update_under_way_is_training(console: Console, tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant)
    by_hand.to_phase(job_id, "training")
    by_hand.execute("UPDATE rounds SET created_at = now() - interval '9 s', admitted_at = now() - interval '9 s'")
    by_hand.execute("UPDATE rounds SET training_at = now() - interval '7 s'")
    assert lane(console) == {"training": [(0, 7)], "waiting": [(0, 2)]}


def test_the_timeline_of_a_job_that_is_over_ends_with_it(console: Console, tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant)
    round_id = by_hand.live_round(job_id).id
    by_hand.cancel(job_id)
    by_hand.execute("UPDATE jobs SET finished_at = now() - interval '1 h'")
    by_hand.execute(
        "UPDATE rounds SET created_at = now() - interval '3620 s', admitted_at = NULL,"
        " finished_at = now() - interval '1 h'"
    )
    span(round_id, "rollout", 3610, 3600)
    assert console.get("/console/data/timeline?minutes=1").json["lanes"] == []
    assert lane(console, f"minutes=1&job={job_id}") == {"waiting": [(0, 10)], "rollout": [(0, 10)]}


def test_a_lane_says_whether_it_is_of_a_preflight(console: Console, tenant: Tenant) -> None:
    by_hand.start_job(tenant)
    (one,) = console.get("/console/data/timeline?minutes=1").json["lanes"]
    assert one["kind"] == "train"
    by_hand.execute("UPDATE jobs SET kind = 'preflight'")
    data._shared.cache_clear()
    (one,) = console.get("/console/data/timeline?minutes=1").json["lanes"]
    assert one["kind"] == "preflight"


def test_the_timeline_of_chosen_jobs_has_no_others(hand: None, tenant: Tenant) -> None:
    one, other = by_hand.start_job(tenant), by_hand.start_job(tenant)
    with transaction() as session:
        assert [lane.job_id for lane in timeline(session, 5, [other]).lanes] == [other]
        assert {lane.job_id for lane in timeline(session, 5).lanes} == {one, other}


@pytest.mark.parametrize(
    ("query", "status"), [("minutes=0", 400), ("minutes=999", 400), ("job=7", 400), (f"job={uuid.UUID(int=1)}", 404)]
)
def test_a_timeline_without_sense_is_refused(console: Console, query: str, status: int) -> None:
    assert console.get(f"/console/data/timeline?{query}").status_code == status


def test_waiting_is_what_no_stage_covers() -> None:
    def stretch(phase: LanePhase, version: int, start: float, end: float) -> Stretch:
        return Stretch(phase, version, "train", start, end)

    live = [stretch(LanePhase.WAITING, 0, 0, 10), stretch(LanePhase.WAITING, 1, 8, 30)]  # an evaluation overlaps
    worked = [
        stretch(LanePhase.ROLLOUT, 0, 2, 5),
        stretch(LanePhase.ENVIRONMENT, 0, 4, 6),
        stretch(LanePhase.ROLLOUT, 1, 20, 25),
    ]
    found = [(s.version, s.start, s.end) for s in waiting(live, worked, 0.5)]
    assert found == [(0, 0, 2), (0, 6, 10), (1, 10, 20), (1, 25, 30)]
