"""A tenant's data files: checked line by line, stored once, named by id in a job's `environment.params.file_id`."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from typing import BinaryIO

from sqlalchemy import Text, cast, func, or_, select
from sqlalchemy.orm import Session

from app import storage
from app.db import transaction
from app.errors import Conflict, InvalidRequest, NotFound
from app.manager.commit import make_live
from app.models import File, Job, StoredObject, Tenant
from app.models.job import LIVE
from app.models.object import ObjectKind, ObjectState
from app.specs.dataset import read_items


def upload(tenant_id: uuid.UUID, name: str, stream: BinaryIO, *, purpose: str = "fine-tune") -> File:
    """Checks and stores a JSONL file from a seekable stream, holding no more than a line in memory.

    Raises InvalidRequest naming the line and field that is wrong, InfrastructureFault when storage does not answer.
    A file that is refused, or whose upload fails, never appears; what it left in storage is swept as an orphan.
    Opens its own transactions: none stays open during the upload.
    """
    if not 1 <= len(name) <= 255 or not name.isprintable():
        raise InvalidRequest("a file's name has 1 to 255 printable characters", param="name")
    lines = sum(1 for _ in read_items(stream))
    sha256, size = _digest(stream)
    file = File(id=uuid.uuid4(), tenant_id=tenant_id, name=name, purpose=purpose, lines=lines, object_id=uuid.uuid4())
    key = storage.file_key(tenant_id, file.id)
    with transaction() as session:
        session.add(
            StoredObject(
                id=file.object_id, tenant_id=tenant_id, kind=ObjectKind.FILE, key=key, sha256=sha256, size=size
            )
        )
    stream.seek(0)
    storage.put_stream(key, stream, sha256)
    with transaction() as session:
        make_live(session, [file.object_id])
        session.add(file)
        session.flush()
        session.refresh(file)
    return file


def _digest(stream: BinaryIO) -> tuple[str, int]:
    """SHA-256 and size of the whole stream."""
    stream.seek(0)
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest(), stream.tell()


def list_files(session: Session, tenant: Tenant) -> Sequence[tuple[File, StoredObject]]:
    """The tenant's files that are not deleted, newest first, with their objects."""
    return session.execute(
        select(File, StoredObject)
        .join(StoredObject, StoredObject.id == File.object_id)
        .where(File.tenant_id == tenant.id, File.deleted_at.is_(None))
        .order_by(File.created_at.desc(), File.id)
    ).all()


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
