"""A tenant's data files: checked line by line, stored once, named by id in a job's `environment.params.file_id`."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from sqlalchemy import Row, Select, Text, cast, func, or_, select
from sqlalchemy.orm import Session

from app import storage
from app.db import transaction
from app.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from app.manager.commit import make_live
from app.models import File, Job, StoredObject, Tenant
from app.models.job import LIVE
from app.models.object import ObjectKind, ObjectState
from app.specs.dataset import read_items


@dataclass(frozen=True)
class Content:
    """What is in a file that passed the check."""

    lines: int
    sha256: str
    size: int


def upload(tenant_id: uuid.UUID, name: str, stream: IO[bytes], *, purpose: str = "fine-tune") -> File:
    """Checks and stores a JSONL file from a seekable stream, holding no more than a line in memory.

    Raises InvalidRequest naming the line and field that is wrong, QuotaExceeded, InfrastructureFault when storage does
    not answer. A file that is refused, or whose upload fails, never appears; what it left in storage is swept as an
    orphan. Opens its own transactions: none stays open during the upload.
    """
    content = check(name, stream)
    with transaction() as session:
        file = announce(session, tenant_id, name, content, purpose)
    put(file, stream, content)
    with transaction() as session:
        publish(session, file)
    return file


def check(name: str, stream: IO[bytes]) -> Content:
    """Reads the file once for its lines, once for its digest. Raises InvalidRequest."""
    if not 1 <= len(name) <= 255 or not name.isprintable():
        raise InvalidRequest("a file's name has 1 to 255 printable characters", param="name")
    lines = sum(1 for _ in read_items(stream))
    return Content(lines, *_digest(stream))


def announce(session: Session, tenant_id: uuid.UUID, name: str, content: Content, purpose: str) -> File:
    """The pending object that the upload fills (rule 4), and the file that `publish` makes known afterwards."""
    _check_quota(session, tenant_id, content.size)
    file = File(
        id=uuid.uuid4(),
        tenant_id=tenant_id,
        name=name,
        purpose=purpose,
        lines=content.lines,
        object_id=uuid.uuid4(),
    )
    session.add(
        StoredObject(
            id=file.object_id,
            tenant_id=tenant_id,
            kind=ObjectKind.FILE,
            key=storage.file_key(tenant_id, file.id),
            sha256=content.sha256,
            size=content.size,
        )
    )
    return file


def put(file: File, stream: IO[bytes], content: Content) -> None:
    stream.seek(0)
    storage.put_stream(storage.file_key(file.tenant_id, file.id), stream, content.sha256)


def publish(session: Session, file: File) -> None:
    make_live(session, [file.object_id])
    session.add(file)
    session.flush()
    session.refresh(file)


def _check_quota(session: Session, tenant_id: uuid.UUID, size: int) -> None:
    """Under a lock of the tenant's uploads, which counts those under way as well."""
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"files:{tenant_id}", 0))))
    quota = session.get_one(Tenant, tenant_id).max_file_bytes
    stored = select(func.coalesce(func.sum(StoredObject.size), 0))
    live = stored.join(File, File.object_id == StoredObject.id).where(
        File.tenant_id == tenant_id, File.deleted_at.is_(None)
    )
    pending = stored.where(
        StoredObject.tenant_id == tenant_id,
        StoredObject.kind == ObjectKind.FILE,
        StoredObject.state == ObjectState.PENDING,
    )
    taken = session.scalars(live).one() + session.scalars(pending).one()
    if taken + size > quota:
        raise QuotaExceeded(
            f"{size} more bytes are over the tenant's {quota} bytes of files, of which {taken} are taken;"
            " delete files that no job needs",
            param="file",
        )


def _digest(stream: IO[bytes]) -> tuple[str, int]:
    """SHA-256 and size of the whole stream."""
    stream.seek(0)
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest(), stream.tell()


def of_tenant(tenant_id: uuid.UUID) -> Select[File, StoredObject]:
    """The tenant's files that are not deleted, with their objects."""
    return (
        select(File, StoredObject)
        .join(StoredObject, StoredObject.id == File.object_id)
        .where(File.tenant_id == tenant_id, File.deleted_at.is_(None))
    )


def list_files(session: Session, tenant: Tenant) -> Sequence[Row[File, StoredObject]]:
    """The tenant's files that are not deleted, newest first, with their objects."""
    return session.execute(of_tenant(tenant.id).order_by(File.created_at.desc(), File.id)).all()


def find_file(session: Session, tenant: Tenant, text: str) -> File:
    """A file by its id, the start of its id (4 characters or more), or its name if only one file has it."""
    mine = select(File).where(File.tenant_id == tenant.id, File.deleted_at.is_(None))
    wanted = text.strip().lower()
    rows: Sequence[File] = []
    if len(wanted) >= 4:
        rows = session.scalars(mine.where(func.starts_with(cast(File.id, Text), wanted))).all()
    rows = rows or session.scalars(mine.where(File.name == text)).all()
    if not rows:
        raise NotFound(f"tenant {tenant.name!r} has no file {text!r}; `marlaas file list` shows them", param="file")
    if len(rows) > 1:
        raise InvalidRequest(f"{len(rows)} files match {text!r}; give more of the id", param="file")
    return rows[0]


def delete(session: Session, file: File) -> None:
    """Marks a file and its object; retention deletes the bytes later. Raises Conflict while a live job reads it."""
    session.refresh(file, with_for_update=True)  # against a job that is being made with it
    params = Job.spec["environment"]["params"]
    readers = session.scalars(
        select(Job.name)
        .where(
            Job.tenant_id == file.tenant_id,
            Job.state.in_(LIVE),
            or_(*(params[field].as_string() == str(file.id) for field in ("file_id", "eval_file_id"))),
        )
        .order_by(Job.name)
    ).all()
    if readers:
        raise Conflict(f"file {file.id} is read by {', '.join(readers)}; cancel them first", param="file")
    file.deleted_at = func.now()
    stored = session.get_one(StoredObject, file.object_id)
    stored.state = ObjectState.EXPIRED
    stored.state_at = func.now()
