"""Nothing crosses between tenants: by every route's ids, and by row-level security alone with the filters gone."""

from __future__ import annotations

import io
import json
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import event
from werkzeug.routing import Rule
from werkzeug.test import TestResponse

from app import db, storage
from app.api import auth, ids
from app.db import transaction
from app.manager import files, jobs, preflight
from app.models import Job, Tenant
from app.web import create_app
from tests import by_hand, stored
from tests.api_client import client_with, make_key

LINE = {"messages": [{"role": "user", "content": "a secret question"}], "answer": "4"}
GRADER = {
    "type": "string_check",
    "name": "exact",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
}
TENANT_FILTER = re.compile(r"\b\w+\.tenant_id = %\(\w+\)s(::UUID)?")


@dataclass(frozen=True)
class House:
    """What one tenant has, by the name that a route gives its id."""

    tenant: Tenant
    client: FlaskClient
    names: dict[str, str]

    @property
    def marks(self) -> list[str]:
        """What would be seen in an answer that shows something of this tenant."""
        return [self.tenant.name, *(re.findall(r"[0-9a-f]{32}", name)[0] for name in self.names.values())]


@pytest.fixture
def app(hand: None) -> Flask:
    storage.client.cache_clear()
    return create_app()


def make_house(app: Flask, name: str) -> House:
    """A tenant with a file, a job of two versions with trajectories, and a preflight."""
    tenant = by_hand.make_tenant(f"{name}-{uuid.uuid4().hex}")
    file = files.upload(tenant.id, "items.jsonl", io.BytesIO(json.dumps(LINE).encode()))
    job_id = stored.start_job(tenant)
    stored.step(job_id)
    with transaction() as session:
        job = session.get_one(Job, job_id)
        spec = jobs.parse_spec(job.spec)
        trial = preflight.submit(session, session.merge(tenant), spec, 1, 2)
        model = ids.model_id(job, tenant.name, 1)
    names = {
        "fine_tuning_job_id": ids.job_id(job_id),
        "fine_tuning_checkpoint_id": ids.checkpoint_id(job_id, 1),
        "file_id": ids.file_id(file.id),
        "preflight_id": ids.preflight_id(trial.id),
        "model": model,
    }
    return House(tenant, client_with(app, make_key(tenant)), names)


@pytest.fixture
def houses(app: Flask) -> tuple[House, House]:
    return make_house(app, "one"), make_house(app, "two")


def routes(app: Flask) -> list[Rule]:
    return [rule for rule in app.url_map.iter_rules() if rule.rule.startswith("/v1/")]


def ask(client: FlaskClient, rule: Rule, method: str, names: dict[str, str]) -> TestResponse:
    with client.application.test_request_context():
        url = client.application.url_map.bind("localhost").build(rule.endpoint, {a: names[a] for a in rule.arguments})
    return client.open(url, method=method, json={} if method == "POST" else None)


def named_routes(app: Flask) -> list[tuple[Rule, str]]:
    return [(r, m) for r in routes(app) if r.arguments for m in sorted((r.methods or set()) - {"HEAD", "OPTIONS"})]


def test_every_route_is_404_for_another_tenants_ids(app: Flask, houses: tuple[House, House]) -> None:
    victim, stranger = houses
    asked = named_routes(app)
    assert len(asked) >= 14
    for rule, method in asked:
        answer = ask(stranger.client, rule, method, victim.names)
        assert answer.status_code == 404, f"{method} {rule.rule}: {answer.status_code} {answer.text}"


def test_every_route_finds_the_tenants_own_ids(app: Flask, houses: tuple[House, House]) -> None:
    """So that the 404s above are those of strangers."""
    mine = houses[0]
    for rule, method in sorted(named_routes(app), key=lambda asked: asked[1] == "DELETE"):
        answer = ask(mine.client, rule, method, mine.names)
        assert answer.status_code in (200, 409), f"{method} {rule.rule}: {answer.status_code} {answer.text}"


def test_a_checkpoint_of_another_job_is_404(app: Flask, houses: tuple[House, House]) -> None:
    victim, stranger = houses
    mixed = stranger.names | {"fine_tuning_checkpoint_id": victim.names["fine_tuning_checkpoint_id"]}
    url = "/v1/fine_tuning/jobs/{fine_tuning_job_id}/checkpoints/{fine_tuning_checkpoint_id}/adapter"
    assert stranger.client.get(url.format(**mixed)).status_code == 404


LISTS = ("files", "fine_tuning/jobs", "models", "usage")


@pytest.mark.parametrize("path", LISTS)
def test_lists_show_the_callers_things_alone(houses: tuple[House, House], path: str) -> None:
    victim, stranger = houses
    answer = stranger.client.get(f"/v1/{path}")
    assert answer.status_code == 200
    assert not [mark for mark in victim.marks if mark in answer.text]


@pytest.mark.parametrize(("path", "name"), [("files", "file_id"), ("fine_tuning/jobs", "fine_tuning_job_id")])
def test_a_cursor_of_another_tenant_is_404(houses: tuple[House, House], path: str, name: str) -> None:
    victim, stranger = houses
    answer = stranger.client.get(f"/v1/{path}", query_string={"after": victim.names[name]})
    assert answer.status_code == 404


def job_request(**changes: Any) -> dict[str, Any]:
    method = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}
    return {"model": "tiny", "method": method} | changes


@pytest.mark.parametrize("field", ["training_file", "validation_file"])
def test_a_job_cannot_read_another_tenants_file(houses: tuple[House, House], field: str) -> None:
    victim, stranger = houses
    request = job_request(training_file=stranger.names["file_id"]) | {field: victim.names["file_id"]}
    for path in ("jobs", "preflights"):
        answer = stranger.client.post(f"/v1/fine_tuning/{path}", json=request)
        assert (answer.status_code, answer.json["error"]["param"]) == (400, field)  # type: ignore[index]


def test_an_environment_cannot_read_another_tenants_file(houses: tuple[House, House]) -> None:
    victim, stranger = houses
    file_id = str(uuid.UUID(victim.names["file_id"].removeprefix("file-")))
    environment = {"type": "dataset", "params": {"file_id": file_id, "grader": GRADER}}
    request = job_request(method={"type": "reinforcement", "reinforcement": {"environment": environment}})
    answer = stranger.client.post("/v1/fine_tuning/jobs", json=request)
    assert answer.status_code == 400 and "file" in answer.json["error"]["message"]  # type: ignore[index]


def test_another_tenants_adapter_cannot_answer(houses: tuple[House, House]) -> None:
    victim, stranger = houses
    question = {"model": victim.names["model"], "messages": [{"role": "user", "content": "a"}]}
    assert stranger.client.post("/v1/chat/completions", json=question).status_code == 404


# --- row-level security alone


@contextmanager
def without_filters(role: db.Role) -> Iterator[None]:
    """Takes every `tenant_id = …` out of the statements of a role, on purpose."""

    def strip(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> tuple[str, Any]:
        return TENANT_FILTER.sub("TRUE", statement), parameters

    event.listen(db.engine(role), "before_cursor_execute", strip, retval=True)
    try:
        yield
    finally:
        event.remove(db.engine(role), "before_cursor_execute", strip)


def test_row_level_security_hides_all_when_the_filters_are_gone(app: Flask, houses: tuple[House, House]) -> None:
    victim, stranger = houses
    with without_filters("api"):
        for rule, method in named_routes(app):
            answer = ask(stranger.client, rule, method, victim.names)
            assert answer.status_code == 404, f"{method} {rule.rule}: {answer.status_code} {answer.text}"
        for path in LISTS:
            answer = stranger.client.get(f"/v1/{path}")
            assert answer.status_code == 200
            assert not [mark for mark in victim.marks if mark in answer.text]
    assert victim.client.get(f"/v1/files/{victim.names['file_id']}").status_code == 200  # nothing was deleted


def test_without_both_it_would_leak(app: Flask, houses: tuple[House, House], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above removes what it says: neither filters nor row-level security."""
    victim, stranger = houses
    monkeypatch.setattr(auth.db, "transaction", lambda role, tenant_id=None: transaction("service"))
    with without_filters("service"):
        answer = stranger.client.get(f"/v1/fine_tuning/jobs/{victim.names['fine_tuning_job_id']}")
    assert answer.status_code == 200
