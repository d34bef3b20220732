"""Upload bombs, and SQL and HTML in every text field: a clear 4xx or plain text again, nothing executed or left."""

from __future__ import annotations

import io
import json
import resource
from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy import func, select

from app.db import transaction
from app.models import File, Job, StoredObject, Tenant
from app.models.job import JobKind

MEGABYTE = 1 << 20
LINE = b'{"messages": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}\n'

HOSTILE = [
    "'; DROP TABLE jobs; --",
    "1' OR '1'='1",
    '"; SELECT pg_sleep(10); --',
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }}",
    "${jndi:ldap://127.0.0.1/x}",
    "../../../../etc/passwd",
    "a\u202eb\u0000c",
    "\ud800",
    "A" * 100_000,
]


def rows(tenant: Tenant) -> dict[str, int]:
    with transaction() as session:
        return {
            table.__tablename__: session.scalar(select(func.count()).where(table.tenant_id == tenant.id)) or 0
            for table in (File, Job, StoredObject)
        }


def upload(client: FlaskClient, content: Any, name: str = "items.jsonl") -> Any:
    return client.post("/v1/files", data={"purpose": "fine-tune", "file": (content, name)})


class Repeated(io.RawIOBase):
    """`size` bytes of one pattern, never in memory."""

    def __init__(self, pattern: bytes, size: int) -> None:
        self._pattern, self._left = pattern * (64 << 10), size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._pattern[: min(len(buffer), self._left)]
        buffer[: len(part)] = part
        self._left -= len(part)
        return len(part)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        (b"x", "line 1 is longer"),
        (b"[", "line 1 is longer"),
        (b"\xff\n", "line 1 is not UTF-8"),
        (b"\n", "line 10001 is blank"),
    ],
    ids=["one line", "deep", "no text", "blank lines"],
)
def test_a_hundred_megabytes_are_refused_and_leave_nothing(
    client: FlaskClient, tenant: Tenant, pattern: bytes, problem: str
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = upload(client, io.BufferedReader(Repeated(pattern, 100 * MEGABYTE), MEGABYTE))
    assert answer.status_code == 400 and problem in answer.json["error"]["message"]
    assert rows(tenant) == {"files": 0, "jobs": 0, "objects": 0}
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 60, f"{grown:.0f} MB"  # a line at a time


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_large_file_of_short_lines_is_taken(client: FlaskClient, newline: bytes) -> None:
    """Newlines could begin a boundary of the form, so its parser holds them back."""
    answer = upload(client, io.BufferedReader(Repeated(LINE.replace(b"\n", newline), len(LINE) << 15), MEGABYTE))
    assert answer.status_code in (200, 400) and "larger" not in answer.text


def job_request(file_id: str) -> dict[str, Any]:
    """A request that has every text field there is."""
    grader = {"type": "string_check", "name": "exact", "input": "{{ sample.output_text }}", "reference": "4"}
    return {
        "model": "tiny",
        "training_file": file_id,
        "validation_file": file_id,
        "suffix": "sums",
        "metadata": {"team": "night"},
        "method": {"type": "reinforcement", "reinforcement": {"grader": grader}},
    }


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every text in a document."""
    if isinstance(document, str):
        yield path
    elif isinstance(document, dict):
        for key, value in document.items():
            yield from places(value, (*path, key))


def with_text(document: Any, path: tuple[Any, ...], value: str) -> Any:
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


def texts_in(document: Any) -> Iterator[str]:
    if isinstance(document, str):
        yield document
    elif isinstance(document, dict):
        for value in document.values():
            yield from texts_in(value)


def test_hostile_text_in_every_field_of_a_job_is_refused_or_stays_text(client: FlaskClient, tenant: Tenant) -> None:
    file_id = upload(client, io.BytesIO(LINE)).json["id"]
    good = job_request(file_id)
    assert client.post("/v1/fine_tuning/jobs", json=good).status_code == 200
    accepted = 0
    for path in places(good):
        for value in HOSTILE:
            answer = client.post("/v1/fine_tuning/jobs", json=with_text(good, path, value))
            assert answer.status_code in (200, 400), (path, value[:40], answer.text)
            if answer.status_code == 400:
                assert answer.json["error"]["message"] and len(answer.text) < 10_000
                continue
            accepted += 1
            again = client.get(f"/v1/fine_tuning/jobs/{answer.json['id']}")
            assert again.mimetype == "application/json" and value in list(texts_in(again.json))
            client.post(f"/v1/fine_tuning/jobs/{answer.json['id']}/cancel")
    assert accepted >= 10  # metadata, the grader's name and templates take any text
    with transaction() as session:
        stored = session.scalars(select(Job).where(Job.tenant_id == tenant.id, Job.kind == JobKind.TRAIN)).all()
    assert len(stored) == 1 + accepted


@pytest.mark.parametrize("name", HOSTILE[:-2])
def test_a_hostile_file_name_is_refused_or_stays_text(client: FlaskClient, name: str) -> None:
    answer = upload(client, io.BytesIO(LINE), name)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 200:
        assert answer.json["filename"] == name.rpartition("/")[2]
        content = client.get(f"/v1/files/{answer.json['id']}/content")
        assert content.data == LINE and content.mimetype == "application/octet-stream"


@pytest.mark.parametrize("value", HOSTILE[:-1])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("fine_tuning/jobs", "after"),
        ("fine_tuning/jobs", "limit"),
        ("fine_tuning/jobs", "metadata[team]"),
        ("files", "purpose"),
        ("files", "order"),
        ("models", "after"),
        ("usage", "start_date"),
        ("usage", "group_by"),
    ],
)
def test_hostile_queries_find_nothing(client: FlaskClient, path: str, field: str, value: str) -> None:
    answer = client.get(f"/v1/{path}", query_string={field: value.encode("utf-8", "replace")})
    assert answer.status_code in (200, 400, 404), answer.text
    assert answer.status_code != 200 or answer.json["data"] == [] or field not in ("after", "metadata[team]")
