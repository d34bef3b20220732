"""Rows of stored objects: pending before the upload, so that nothing in the bucket is unknown (rule 4)."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import cached_property

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.models import PolicyVersion, StoredObject
from app.models.object import ObjectKind
from app.storage import sha256_of


@dataclass(frozen=True)
class Upload:
    kind: ObjectKind
    key: str
    data: bytes

    @cached_property
    def sha256(self) -> str:
        return sha256_of(self.data)


def announce(
    session: Session, tenant_id: uuid.UUID, job_id: uuid.UUID | None, version: int | None, uploads: list[Upload]
) -> list[uuid.UUID]:
    """Pending rows for uploads that follow, in their order. A key that is announced already keeps its row."""
    keys = [u.key for u in uploads]
    known = {o.key: o for o in session.scalars(select(StoredObject).where(StoredObject.key.in_(keys)))}
    for upload in uploads:
        if upload.key in known:
            known[upload.key].state_at = func.now()  # the orphan sweep waits anew
            continue
        known[upload.key] = StoredObject(
            id=uuid.uuid4(),
            tenant_id=tenant_id,
            job_id=job_id,
            version=version,
            kind=upload.kind,
            key=upload.key,
            sha256=upload.sha256,
            size=len(upload.data),
        )
        session.add(known[upload.key])
    return [known[key].id for key in keys]


@dataclass(frozen=True)
class VersionObjects:
    version: PolicyVersion
    adapter: StoredObject
    config: StoredObject


def version_objects(session: Session, job_id: uuid.UUID, version: int) -> VersionObjects | None:
    """The files of a version's adapter, or None where there is no such version."""
    row = session.get(PolicyVersion, (job_id, version))
    if row is None:
        return None
    return VersionObjects(
        row,
        session.get_one(StoredObject, row.adapter_object_id),
        session.get_one(StoredObject, row.config_object_id),
    )
