"""What all routes of the API share: keys, scopes, limits, errors, ids of requests, idempotency, the document."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import openai
import pydantic
import pytest
from apiflask import APIFlask
from flask.testing import FlaskClient
from pydantic import SecretStr
from sqlalchemy import select
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from app.api.auth import requires, tenant_transaction
from app.api.blueprint import Blueprint, Body
from app.api.idempotency import Answer, idempotent
from app.db import transaction
from app.errors import Conflict, InfrastructureFault
from app.manager import tenants
from app.models import ApiKey, File, StoredAnswer, StoredObject, Tenant
from app.settings import Settings, get_settings
from app.web import create_app
from tests import by_hand
from tests.api_client import client_with, make_key, serving

LIST = "/v1/files"


def error(response: Any) -> dict[str, Any]:
    assert response.json.keys() == {"error"}
    assert response.json["error"].keys() == {"message", "type", "param", "code"}
    found: dict[str, Any] = response.json["error"]
    return found


# --- keys


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        ("Basic bWs6eA==", "missing_api_key"),
        ("Bearer", "missing_api_key"),
        ("Bearer mk-unknown", "invalid_api_key"),
        ("Bearer ' OR 1=1 --", "missing_api_key"),
        ("Bearer \xff\xfe", "invalid_api_key"),
    ],
    ids=["none", "basic", "empty", "unknown", "sql", "not ascii"],
)
def test_without_a_good_key_nothing_is_answered(
    web_app: APIFlask, tenant: Tenant, header: str | None, code: str
) -> None:
    response = web_app.test_client().get(LIST, headers={"Authorization": header} if header else {})
    assert (response.status_code, error(response)["code"]) == (401, code)
    assert response.headers["WWW-Authenticate"] == "Bearer"


def test_a_revoked_key_is_refused_at_once(client: FlaskClient) -> None:
    assert client.get(LIST).status_code == 200
    by_hand.execute("UPDATE api_keys SET revoked_at = now()")
    assert client.get(LIST).status_code == 401


def test_an_expired_key_is_refused(web_app: APIFlask, tenant: Tenant) -> None:
    with transaction() as session:
        past = datetime.now(UTC) - timedelta(seconds=1)
        _, secret = tenants.create_key(session, tenant, "old", expires_at=past)
    assert client_with(web_app, secret).get(LIST).status_code == 401


def test_a_key_knows_when_it_was_used(client: FlaskClient) -> None:
    client.get(LIST)
    with transaction() as session:
        assert session.scalars(select(ApiKey)).one().last_used_at is not None


def test_a_key_does_only_what_its_scopes_say(web_app: APIFlask, tenant: Tenant) -> None:
    reader, writer = (client_with(web_app, make_key(tenant, scope)) for scope in ("read", "write"))
    assert reader.get(LIST).status_code == 200
    assert (reader.post(LIST).status_code, writer.get(LIST).status_code) == (403, 403)
    assert writer.post(LIST).status_code == 400  # it came as far as the missing file


def test_a_suspended_tenant_reads_and_writes_nothing(client: FlaskClient) -> None:
    by_hand.execute("UPDATE tenants SET suspended = true")
    assert client.get(LIST).status_code == 200
    response = client.post(LIST)
    assert (response.status_code, error(response)["code"]) == (403, "tenant_suspended")


def test_a_transaction_of_a_tenant_sees_its_rows_without_any_filter(probe: FlaskClient, tenant: Tenant) -> None:
    for owner in (tenant, by_hand.make_tenant("other")):
        stored = StoredObject(
            id=owner.id, tenant_id=owner.id, kind="file", key=owner.name, sha256="0" * 64, size=1, state="live"
        )
        file = File(id=owner.id, tenant_id=owner.id, name="f", lines=1, object_id=owner.id)
        with transaction() as session:
            session.add(stored)
            session.flush()
            session.add(file)
    assert probe.get("/v1/probe/files").json == [str(tenant.id)]


# --- limits


def test_a_key_that_asks_too_often_is_told_to_wait(web_app: APIFlask, tenant: Tenant) -> None:
    by_hand.execute("UPDATE tenants SET requests_per_minute = 2")
    client = client_with(web_app, make_key(tenant))
    first, second, third = (client.get(LIST) for _ in range(3))
    assert [first.status_code, second.status_code, third.status_code] == [200, 200, 429]
    assert [r.headers["x-ratelimit-remaining-requests"] for r in (first, second, third)] == ["1", "0", "0"]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert 1 <= int(third.headers["Retry-After"]) <= 60
    assert error(third)["type"] == "rate_limit_error"
    assert client_with(web_app, make_key(tenant)).get(LIST).status_code == 200  # another key


def test_a_tenant_without_requests_is_served_none(client: FlaskClient) -> None:
    by_hand.execute("UPDATE tenants SET requests_per_minute = 0")
    assert client.get(LIST).status_code == 429


def test_without_redis_nobody_counts(client: FlaskClient, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "redis_url", SecretStr("redis://127.0.0.1:1/0"))
    with capture_logs() as lines:
        assert client.get(LIST).status_code == 200
    assert "rate_limit_off" in [line["event"] for line in lines]


# --- errors and ids of requests


def test_an_unknown_route_is_answered_in_json(web_app: APIFlask) -> None:
    response = web_app.test_client().get("/v1/nothing")
    assert (response.status_code, error(response)["code"]) == (404, "not_found")


def test_a_route_outside_of_the_api_is_not_answered_in_its_envelope(web_app: APIFlask) -> None:
    response = web_app.test_client().get("/nothing")
    assert (response.status_code, response.is_json) == (404, False)


def test_a_wrong_method_is_told_the_right_ones(client: FlaskClient) -> None:
    response = client.delete(LIST)
    assert (response.status_code, error(response)["code"]) == (405, "method_not_allowed")
    assert set(response.headers["Allow"].split(", ")) == {"GET", "HEAD", "OPTIONS", "POST"}


def test_head_is_get_without_its_body(client: FlaskClient) -> None:
    response = client.head(LIST)
    assert (response.status_code, response.data) == (200, b"")


def test_options_needs_no_key(web_app: APIFlask) -> None:
    assert web_app.test_client().options(LIST).status_code == 200


def test_every_answer_and_its_log_lines_name_the_request(client: FlaskClient) -> None:
    with capture_logs() as lines:
        answers = [client.get(path) for path in (LIST, f"{LIST}/none", "/v1/none", "/healthz")]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 4
    assert [line["status"] for line in lines if line["event"] == "api_request"] == [200, 404, 404]


class EchoBody(Body):
    text: str = pydantic.Field(max_length=10)
    size: int = 1


class Probe:
    """A blueprint with routes that do what a test says."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.raises: Exception | None = None
        self.blueprint = Blueprint("probe", __name__, url_prefix="/v1/probe")
        bp = self.blueprint

        @bp.post("/echo")
        @requires("write")
        @bp.input(EchoBody, arg_name="body")
        @idempotent
        def echo(session: Session, body: EchoBody) -> Answer:
            self.runs.append(body.text)
            if self.raises:
                raise self.raises
            return {"text": body.text, "run": len(self.runs)}, 201

        @bp.get("/files")
        @requires("read")
        def files() -> list[str]:
            with tenant_transaction() as session:
                return [str(id) for id in session.scalars(select(File.id))]

        @bp.get("/crash")
        @requires("read")
        def crash() -> None:
            raise RuntimeError("secret")


@pytest.fixture
def probed() -> Probe:
    return Probe()


@pytest.fixture
def probe(database: str, tenant: Tenant, probed: Probe) -> Iterator[FlaskClient]:
    """A client of an app with the routes of `probed`."""
    app = create_app()
    app.register_blueprint(probed.blueprint)
    yield client_with(app, make_key(tenant))


def echo(probe: FlaskClient, text: str = "hi", **headers: str) -> Any:
    return probe.post("/v1/probe/echo", json={"text": text}, headers=headers)


@pytest.mark.parametrize(
    ("raised", "status", "headers"),
    [
        (Conflict("busy"), 409, {"x-should-retry": "false"}),
        (InfrastructureFault("s3.internal is away"), 503, {"Retry-After": "1"}),
    ],
    ids=["conflict", "infrastructure"],
)
def test_errors_say_whether_to_try_again(
    probe: FlaskClient, probed: Probe, raised: Exception, status: int, headers: dict[str, str]
) -> None:
    probed.raises = raised
    response = echo(probe)
    assert response.status_code == status
    assert headers.items() <= dict(response.headers).items()
    assert "internal" not in error(response)["message"]


def test_a_crash_tells_nothing_but_where_to_look(probe: FlaskClient) -> None:
    response = probe.get("/v1/probe/crash")
    assert (response.status_code, error(response)["type"]) == (500, "server_error")
    assert "secret" not in response.text
    assert response.headers["x-request-id"].startswith("req-")


# --- bodies


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b'{"text": "\xff"}', "is not UTF-8"),
        (b'{"text": "a\\u0000"}', "NUL"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b'{"size": NaN}', "NaN"),
        (b'{"size": 1e999}', "too large a number"),
        (b'{"size": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"[" * 65 + b"]" * 65, "nested deeper"),
        (b"[" * 100_000, "nested deeper"),
        (b'{"a":' * 100_000, "nested deeper"),
        (b"[]", "dictionary"),
        (b"null", "text: is required"),
    ],
)
def test_a_body_that_is_no_plain_json_object_is_refused(probe: FlaskClient, body: bytes, problem: str) -> None:
    response = probe.post("/v1/probe/echo", data=body, content_type="application/json")
    assert response.status_code == 400
    assert problem in error(response)["message"]


def test_what_is_wrong_is_said_by_field(probe: FlaskClient) -> None:
    response = probe.post("/v1/probe/echo", json={"text": "x" * 11, "sise": 2})
    assert (response.status_code, error(response)["param"]) == (400, "text")
    assert "sise: unknown field; did you mean 'size'?" in error(response)["message"]


def test_a_body_of_another_type_is_refused(probe: FlaskClient) -> None:
    response = probe.post("/v1/probe/echo", data=b'{"text": "hi"}', content_type="text/plain")
    assert (response.status_code, error(response)["code"]) == (415, "unsupported_media_type")


def test_a_large_body_is_refused_and_the_client_hears_it(probed: Probe, probe: FlaskClient) -> None:
    secret = probe.environ_base["HTTP_AUTHORIZATION"]
    with serving(probe.application) as url:
        request = urllib.request.Request(
            f"{url}/v1/probe/echo",
            data=json.dumps({"text": "y" * (32 << 20)}).encode(),
            headers={"Authorization": secret, "Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
    assert caught.value.code == 413
    assert probed.runs == []


# --- idempotency


def test_the_same_key_runs_once(probe: FlaskClient, probed: Probe) -> None:
    first, second = (echo(probe, **{"Idempotency-Key": "k"}) for _ in range(2))
    assert (first.status_code, first.json) == (second.status_code, second.json) == (201, {"text": "hi", "run": 1})
    assert ("Idempotent-Replayed" in first.headers, "Idempotent-Replayed" in second.headers) == (False, True)
    assert probed.runs == ["hi"]


def test_spacing_and_order_make_no_other_request(probe: FlaskClient, probed: Probe) -> None:
    for body in (b'{"text":"a","size":2}', b'{ "size": 2, "text": "a" }'):
        headers = {"Idempotency-Key": "k", "Content-Type": "application/json"}
        assert probe.post("/v1/probe/echo", data=body, headers=headers).status_code == 201
    assert probed.runs == ["a"]


def test_the_same_key_for_another_body_is_refused(probe: FlaskClient, probed: Probe) -> None:
    echo(probe, "one", **{"Idempotency-Key": "k"})
    response = echo(probe, "two", **{"Idempotency-Key": "k"})
    assert (response.status_code, error(response)["code"]) == (422, "idempotency_key_reused")
    assert probed.runs == ["one"]


@pytest.mark.parametrize("key", ["", "k" * 256, "\x7f", "é"])
def test_a_key_that_is_none_is_refused(probe: FlaskClient, key: str) -> None:
    response = echo(probe, **{"Idempotency-Key": key})
    assert (response.status_code, error(response)["param"]) == (400, "Idempotency-Key")


def test_a_request_that_failed_runs_again(probe: FlaskClient, probed: Probe) -> None:
    probed.raises = Conflict("not now")
    assert echo(probe, **{"Idempotency-Key": "k"}).status_code == 409
    probed.raises = None
    assert echo(probe, **{"Idempotency-Key": "k"}).status_code == 201


def test_keys_of_two_tenants_have_nothing_in_common(probe: FlaskClient, probed: Probe) -> None:
    stranger = client_with(probe.application, make_key(by_hand.make_tenant("other")))
    assert [echo(who, **{"Idempotency-Key": "k"}).json["run"] for who in (probe, stranger)] == [1, 2]


def test_a_retry_without_a_key_finds_the_first(probe: FlaskClient, probed: Probe) -> None:
    echo(probe)
    assert echo(probe, **{"x-stainless-retry-count": "1"}).json["run"] == 1
    assert echo(probe, "other", **{"x-stainless-retry-count": "1"}).json["run"] == 2
    assert echo(probe, **{"x-stainless-retry-count": "0"}).json["run"] == 3  # not a retry: made on purpose


def test_a_retry_long_after_is_a_request_of_its_own(probe: FlaskClient) -> None:
    echo(probe)
    by_hand.execute("UPDATE idempotency_keys SET created_at = now() - interval '11 min'")
    assert echo(probe, **{"x-stainless-retry-count": "1"}).json["run"] == 2


def test_equal_requests_at_once_run_once(probe: FlaskClient, probed: Probe) -> None:
    app, secret = probe.application, probe.environ_base["HTTP_AUTHORIZATION"].removeprefix("Bearer ")

    def send(_: int) -> Any:
        return echo(client_with(app, secret), **{"Idempotency-Key": "k"}).json

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(send, range(8)))
    assert answers == [{"text": "hi", "run": 1}] * 8
    assert probed.runs == ["hi"]


def test_an_answer_is_stored_with_what_was_made_or_not_at_all(probe: FlaskClient, probed: Probe) -> None:
    probed.raises = Conflict("no")
    echo(probe)
    with transaction() as session:
        assert session.scalars(select(StoredAnswer)).all() == []


# --- models


def ended_job(tenant: Tenant) -> str:
    job_id = by_hand.start_job(tenant, hyperparameters={"n_steps": 1})
    by_hand.step(job_id)
    assert by_hand.job(job_id).state == "succeeded"
    return f"ft:tiny:{tenant.name}:digits:{job_id.hex}"


def test_openai_lists_and_retrieves_models(openai_client: openai.OpenAI, tenant: Tenant) -> None:
    by_hand.register_model("Qwen/Qwen3-0.6B")
    adapter = ended_job(tenant)
    assert [m.id for m in openai_client.models.list()] == ["tiny", "Qwen/Qwen3-0.6B", adapter]
    for name in ("Qwen/Qwen3-0.6B", adapter, f"{adapter}:ckpt-step-1"):
        found = openai_client.models.retrieve(name)
        assert (found.id, found.object) == (name, "model")
    assert openai_client.models.retrieve(adapter).owned_by == tenant.name


def test_a_job_that_runs_has_checkpoints_but_no_model_yet(client: FlaskClient, tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant)
    by_hand.step(job_id)
    name = f"ft:tiny:{tenant.name}:digits:{job_id.hex}"
    assert client.get(f"/v1/models/{name}").status_code == 404
    assert client.get(f"/v1/models/{name}:ckpt-step-1").status_code == 200
    assert [m["id"] for m in client.get("/v1/models").json["data"]] == ["tiny"]


def test_models_are_paged(client: FlaskClient, tenant: Tenant) -> None:
    names = [ended_job(tenant) for _ in range(3)][::-1]
    first = client.get("/v1/models?limit=2").json
    assert ([m["id"] for m in first["data"]], first["has_more"]) == (["tiny", *names[:2]], True)
    second = client.get("/v1/models", query_string={"limit": 2, "after": first["last_id"]}).json
    assert ([m["id"] for m in second["data"]], second["has_more"]) == (names[2:], False)


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name + ":ckpt-step-0",
        lambda name: name + ":ckpt-step-2",
        lambda name: name + ":ckpt-step-01",
        lambda name: name + ":ckpt-step-99999999999",
        lambda name: name.replace("digits", "letters"),
        lambda name: name.replace("acme", "other"),
        lambda name: name[:-1],
        lambda name: "ft:x:" + "0" * 32,
        lambda name: "%00",
        lambda name: "no//such/model",
    ],
)
def test_a_name_that_is_not_quite_a_models_is_not_found(client: FlaskClient, tenant: Tenant, change: Any) -> None:
    assert client.get(f"/v1/models/{change(ended_job(tenant))}").status_code == 404


def test_models_of_another_tenant_are_not_found(client: FlaskClient, web_app: APIFlask, tenant: Tenant) -> None:
    adapter = ended_job(tenant)
    stranger = client_with(web_app, make_key(by_hand.make_tenant("other")))
    assert stranger.get(f"/v1/models/{adapter}").status_code == 404
    assert [m["id"] for m in stranger.get("/v1/models").json["data"]] == ["tiny"]


def test_models_cannot_be_deleted(client: FlaskClient) -> None:
    response = client.delete("/v1/models/tiny")
    assert (response.status_code, error(response)["code"]) == (405, "method_not_allowed")


# --- the document


def test_the_document_is_public_and_describes_every_route(web_app: APIFlask) -> None:
    document = web_app.test_client().get("/v1/openapi.json").json
    assert document["openapi"].startswith("3.1")
    described = {
        (path.replace("path:", ""), method.upper()) for path, item in document["paths"].items() for method in item
    }
    routes = {
        (rule.rule.replace("<path:", "{").replace("<", "{").replace(">", "}"), method)
        for rule in web_app.url_map.iter_rules()
        if rule.rule.startswith("/v1/") and rule.rule != "/v1/openapi.json"
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }
    assert described == routes


def test_every_operation_needs_a_key_and_documents_its_errors(web_app: APIFlask) -> None:
    document = web_app.test_client().get("/v1/openapi.json").json
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert operation["security"] in ([{"api_key": ["read"]}], [{"api_key": ["write"]}]), (method, path)
            assert {"401", "403", "429", "503"} <= operation["responses"].keys(), (method, path)
            assert "default" not in operation["responses"]


def test_names_of_operations_are_unique(web_app: APIFlask) -> None:
    document = web_app.test_client().get("/v1/openapi.json").json
    names = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(names) == len(set(names))


def test_settings_say_where_the_api_is(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_settings(), "public_url", "https://rl.example")
    document = create_app().test_client().get("/v1/openapi.json").json
    assert document["servers"] == [{"url": "https://rl.example"}]
