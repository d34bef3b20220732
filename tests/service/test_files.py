"""Data files are checked, stored once, and deleted only when nobody reads them."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Sequence

import pytest
from sqlalchemy import select

from app import storage
from app.db import transaction
from app.errors import Conflict, InfrastructureFault, InvalidRequest, NotFound
from app.manager import files
from app.models import File, StoredObject, Tenant
from app.settings import Settings
from tests import by_hand


def line(question: str = "2+2?") -> str:
    return json.dumps({"messages": [{"role": "user", "content": question}], "answer": "4"})


def upload(tenant: Tenant, *lines: str, name: str = "sums.jsonl") -> File:
    return files.upload(tenant.id, name, io.BytesIO("\n".join(lines).encode()))


def objects_of(tenant: Tenant) -> Sequence[StoredObject]:
    with transaction() as session:
        return session.scalars(select(StoredObject).where(StoredObject.tenant_id == tenant.id)).all()


def listed(tenant: Tenant) -> list[uuid.UUID]:
    with transaction() as session:
        return [file.id for file, _ in files.list_files(session, tenant)]


def delete(tenant: Tenant, name: str) -> None:
    with transaction() as session:
        files.delete(session, files.find_file(session, tenant, name))


def dataset_job(tenant: Tenant, file_id: object) -> uuid.UUID:
    grader = {"type": "string_check", "reference": "{{ item.answer }}"}
    environment = {"type": "dataset", "params": {"file_id": str(file_id), "grader": grader}}
    return by_hand.submit(tenant, environment=environment)


def test_a_file_is_stored_with_its_digest(tenant: Tenant) -> None:
    file = upload(tenant, line(), line("3+1?"))
    assert file.lines == 2
    (stored,) = objects_of(tenant)
    assert stored.state == "live"
    content = f"{line()}\n{line('3+1?')}".encode()
    assert storage.get(stored.key, stored.sha256) == content
    assert stored.size == len(content)
    assert stored.key == f"tenants/{tenant.id}/files/{file.id}.jsonl"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "no items"),
        ([line(), "{"], "line 2 is not JSON"),
        ([json.dumps({"answer": 4})], "line 1: messages must be a list"),
        (
            [json.dumps({"messages": [{"role": "assistant", "content": "4"}]})],
            r"line 1: messages\[0\].role must be user",
        ),
    ],
    ids=["empty", "not json", "no messages", "no question"],
)
def test_a_broken_file_is_refused_by_line_and_leaves_nothing(tenant: Tenant, lines: list[str], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        upload(tenant, *lines)
    assert listed(tenant) == []
    assert objects_of(tenant) == []


def test_an_upload_that_fails_never_appears(
    tenant: Tenant, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "s3_bucket", "not a bucket")
    with pytest.raises(InfrastructureFault):
        upload(tenant, line())
    assert listed(tenant) == []
    assert [stored.state for stored in objects_of(tenant)] == ["pending"]  # an orphan, for the sweep


def test_storage_refuses_bytes_of_another_digest() -> None:
    with pytest.raises(InfrastructureFault):
        storage.put_stream(f"test/{uuid.uuid4()}", io.BytesIO(b"other"), storage.sha256_of(b"announced"))


def test_files_of_another_tenant_are_not_found(tenant: Tenant) -> None:
    file = upload(tenant, line())
    other = by_hand.make_tenant("other")
    assert listed(other) == []
    with pytest.raises(NotFound):
        delete(other, str(file.id))


def test_a_job_cannot_name_a_file_of_another_tenant(tenant: Tenant) -> None:
    file = upload(tenant, line())
    with pytest.raises(InvalidRequest) as caught:
        dataset_job(by_hand.make_tenant("other"), file.id)
    assert caught.value.param == "environment.params.file_id"


def test_a_deleted_file_is_gone_and_its_object_expires(tenant: Tenant) -> None:
    file = upload(tenant, line())
    delete(tenant, str(file.id)[:8])
    assert listed(tenant) == []
    assert [stored.state for stored in objects_of(tenant)] == ["expired"]
    with pytest.raises(InvalidRequest, match="no file"):
        dataset_job(tenant, file.id)


def test_a_file_that_a_live_job_reads_stays(tenant: Tenant) -> None:
    file = upload(tenant, line())
    dataset_job(tenant, file.id)
    with pytest.raises(Conflict, match="is read by digits"):
        delete(tenant, file.name)
    assert listed(tenant) == [file.id]


def test_a_name_of_two_files_is_not_enough(tenant: Tenant) -> None:
    upload(tenant, line())
    upload(tenant, line())
    with pytest.raises(InvalidRequest, match="2 files match"):
        delete(tenant, "sums.jsonl")
