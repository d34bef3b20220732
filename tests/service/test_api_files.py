"""`/v1/files`: OpenAI's client stores, lists, reads and deletes; what is broken is refused and leaves nothing."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from flask.testing import FlaskClient
from sqlalchemy import select
from werkzeug.test import TestResponse

from app.db import transaction
from app.models import File, StoredObject, Tenant
from app.specs import dataset
from tests import by_hand
from tests.api_client import client_with, make_key

LINE = json.dumps({"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}).encode()
OTHER_LINE = LINE.replace(b"2+2", b"3+1")


def post(
    client: FlaskClient, content: bytes, name: str = "sums.jsonl", headers: dict[str, str] | None = None, **fields: Any
) -> TestResponse:
    form = {"purpose": "fine-tune"} | fields
    return client.post("/v1/files", data=form | {"file": (io.BytesIO(content), name)}, headers=headers)


def stored(tenant: Tenant) -> Sequence[File]:
    with transaction() as session:
        return session.scalars(select(File).where(File.tenant_id == tenant.id)).all()


def objects(tenant: Tenant) -> Sequence[StoredObject]:
    with transaction() as session:
        return session.scalars(select(StoredObject).where(StoredObject.tenant_id == tenant.id)).all()


def test_openai_uploads_reads_and_deletes(openai_client: openai.OpenAI) -> None:
    content = LINE + b"\n" + OTHER_LINE + b"\n"
    made = openai_client.files.create(file=("sums.jsonl", content), purpose="fine-tune")
    assert (made.object, made.filename, made.bytes, made.purpose, made.status) == (
        "file",
        "sums.jsonl",
        len(content),
        "fine-tune",
        "processed",
    )
    assert openai_client.files.retrieve(made.id) == made
    assert openai_client.files.content(made.id).read() == content
    assert openai_client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        openai_client.files.retrieve(made.id)


def test_openai_pages_through_the_list(openai_client: openai.OpenAI) -> None:
    made = [openai_client.files.create(file=(f"{i}.jsonl", LINE), purpose="fine-tune").id for i in range(5)]
    assert [f.id for f in openai_client.files.list(limit=2)] == made[::-1]
    assert [f.id for f in openai_client.files.list(limit=2, order="asc")] == made
    first = openai_client.files.list(limit=2)
    assert (first.has_more, len(first.data)) == (True, 2)


def test_a_list_goes_on_only_from_an_entry_of_its_own(client: FlaskClient) -> None:
    response = client.get("/v1/files", query_string={"after": "file-" + "0" * 32})
    assert (response.status_code, response.json["error"]["param"]) == (404, "after")


def test_content_is_never_shown_as_a_page(client: FlaskClient) -> None:
    made = post(client, LINE, name="<script>.jsonl").json
    response = client.get(f"/v1/files/{made['id']}/content")
    assert response.data == LINE
    assert response.headers["Content-Type"] == "application/octet-stream"
    assert response.headers["Content-Disposition"].startswith("attachment")
    assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "no items"),
        (LINE + b"\n{", "line 2 is not JSON"),
        (b'{"messages": []}', "line 1: messages must be a list"),
        (LINE + b"\n\xff\xfe", "line 2 is not UTF-8"),
        (LINE.replace(b'"4"', b'"\\u0000"'), "line 1 .*NUL"),
        (LINE.replace(b'"4"', b'"\\ud800"'), "line 1 .*surrogate"),
        (LINE.replace(b'"4"', b"1e999"), "line 1 .*too large a number"),
        (LINE.replace(b'"4"', b"[" * 100 + b"]" * 100), "line 1 .*nested deeper"),
        (LINE.replace(b'"4"', b"[" * 100_000), "line 1 .*nested deeper"),
        (b"x" * (dataset.MAX_LINE_BYTES + 2), "line 1 is longer"),
    ],
    ids=["empty", "json", "messages", "utf8", "nul", "surrogate", "infinite", "deep", "very deep", "long line"],
)
def test_a_broken_file_is_refused_by_line_and_leaves_nothing(
    client: FlaskClient, tenant: Tenant, content: bytes, problem: str
) -> None:
    response = post(client, content)
    assert response.status_code == 400
    assert re.search(problem, response.json["error"]["message"])
    assert (stored(tenant), objects(tenant)) == ([], [])


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"purpose": "assistants", "file": (io.BytesIO(LINE), "a.jsonl")}, "purpose"),
        ({"file": (io.BytesIO(LINE), "a.jsonl")}, "purpose"),
        ({"purpose": "fine-tune"}, "file"),
        ({"purpose": "fine-tune", "file": "no file"}, "file"),
        ({"purpose": "fine-tune", "file": (io.BytesIO(LINE), "a.jsonl"), "color": "red"}, "color"),
        ({"purpose": "fine-tune", "file": (io.BytesIO(LINE), "a" * 300)}, "name"),
    ],
    ids=["other purpose", "no purpose", "no file", "text for file", "unknown field", "long name"],
)
def test_a_wrong_form_is_refused_by_field(client: FlaskClient, form: dict[str, Any], param: str) -> None:
    response = client.post("/v1/files", data=form)
    assert (response.status_code, response.json["error"]["param"]) == (400, param)


def test_a_path_in_a_name_is_dropped(client: FlaskClient) -> None:
    assert post(client, LINE, name="../../etc/sums.jsonl").json["filename"] == "sums.jsonl"


def test_a_body_over_the_limit_is_not_read(client: FlaskClient, tenant: Tenant) -> None:
    response = client.post("/v1/files", environ_overrides={"CONTENT_LENGTH": str(dataset.MAX_FILE_BYTES * 2)})
    assert (response.status_code, response.json["error"]["code"]) == (413, "request_too_large")
    assert stored(tenant) == []


def test_a_file_over_the_quota_is_refused_and_leaves_nothing(client: FlaskClient, tenant: Tenant) -> None:
    by_hand.execute("UPDATE tenants SET max_file_bytes = :n", n=2 * len(LINE))
    assert post(client, LINE).status_code == 200
    response = post(client, LINE + b"\n" + OTHER_LINE)
    assert (response.status_code, response.json["error"]["code"]) == (429, "quota_exceeded")
    assert response.headers["x-should-retry"] == "false"
    assert len(stored(tenant)) == len(objects(tenant)) == 1


def test_deleting_makes_room(client: FlaskClient, tenant: Tenant) -> None:
    by_hand.execute("UPDATE tenants SET max_file_bytes = :n", n=len(LINE))
    first = post(client, LINE).json["id"]
    assert post(client, OTHER_LINE).status_code == 429
    assert client.delete(f"/v1/files/{first}").status_code == 200
    assert post(client, OTHER_LINE).status_code == 200


def test_a_file_that_a_live_job_reads_cannot_be_deleted(client: FlaskClient, tenant: Tenant) -> None:
    made = post(client, LINE).json["id"]
    (file,) = stored(tenant)
    grader = {"type": "string_check", "reference": "{{ item.answer }}"}
    by_hand.submit(tenant, environment={"type": "dataset", "params": {"file_id": str(file.id), "grader": grader}})
    response = client.delete(f"/v1/files/{made}")
    assert (response.status_code, response.json["error"]["code"]) == (409, "conflict")


def test_the_same_key_stores_once(client: FlaskClient, tenant: Tenant) -> None:
    headers = {"Idempotency-Key": "one"}
    first, second = (post(client, LINE, headers=headers) for _ in range(2))
    assert first.json == second.json
    assert second.headers["Idempotent-Replayed"] == "true"
    assert len(stored(tenant)) == 1


def test_the_same_key_for_another_file_is_refused(client: FlaskClient, tenant: Tenant) -> None:
    headers = {"Idempotency-Key": "one"}
    post(client, LINE, headers=headers)
    response = post(client, OTHER_LINE, headers=headers)
    assert (response.status_code, response.json["error"]["code"]) == (422, "idempotency_key_reused")
    assert len(stored(tenant)) == 1


def test_a_retry_without_a_key_finds_the_first(client: FlaskClient, tenant: Tenant) -> None:
    first = post(client, LINE).json
    retried = post(client, LINE, headers={"x-stainless-retry-count": "1"}).json
    again = post(client, LINE).json
    assert first["id"] == retried["id"] != again["id"]


@pytest.mark.parametrize("method", ["get", "delete"])
def test_files_of_another_tenant_are_not_found(client: FlaskClient, web_app: Any, method: str) -> None:
    made = post(client, LINE).json["id"]
    stranger = client_with(web_app, make_key(by_hand.make_tenant("other")))
    assert getattr(stranger, method)(f"/v1/files/{made}").status_code == 404
    assert stranger.get(f"/v1/files/{made}/content").status_code == 404
    assert stranger.get("/v1/files").json["data"] == []


@pytest.mark.parametrize(
    "hostile",
    ["1", "file-", "file-" + "g" * 32, "file-" + "0" * 31, "' OR 1=1 --", "%00", "..%2F..%2Fetc", "file-" + "٠" * 32],
)
def test_a_hostile_id_is_not_found(client: FlaskClient, hostile: str) -> None:
    assert client.get(f"/v1/files/{hostile}").status_code == 404
