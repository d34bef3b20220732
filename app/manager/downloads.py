"""A version's adapter as one zip of the PEFT folder: made when it is first asked for, then an object like any other."""

from __future__ import annotations

import hashlib
import tempfile
import uuid
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath
from typing import IO

from sqlalchemy import select
from sqlalchemy.orm import Session

from app import storage
from app.errors import NotFound
from app.manager import adapters
from app.manager.adapters import AdapterFile, Manifest
from app.manager.commit import make_live
from app.manager.objects import version_objects
from app.models import Job, StoredObject
from app.models.object import ObjectKind, ObjectState
from app.settings import get_settings

Transaction = Callable[[], AbstractContextManager[Session]]

# A zip cannot say an earlier time. With fixed times, and files stored as they are, the same files make the same zip.
FIXED_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Download:
    manifest: Manifest
    archive: AdapterFile
    expires_at: datetime  # of all its URLs


def download(transaction: Transaction, job_id: uuid.UUID, version: int | None = None) -> Download:
    """Presigned URLs of a version's zip, which is made if there is none yet, and of its single files.

    `transaction` opens one that sees the job; none stays open while the zip is made. Raises NotFound, AdapterExpired,
    ObjectMissing, InfrastructureFault. Two at once may both make it: the first to finish is kept, the other one is
    an orphan for the sweep, as is what a crash leaves.
    """
    expires_at = datetime.now(UTC) + timedelta(seconds=get_settings().presign_seconds)
    with transaction() as session:
        job = session.get(Job, job_id)
        if job is None:
            raise NotFound(f"no job {job_id}", param="job")
        manifest = adapters.manifest(session, job, version)
        weights = _weights(session, manifest)
        archive = _live_archive(session, weights)
    if archive is None:
        archive = _make(transaction, manifest, weights)
    return Download(manifest, _file(job, manifest, archive), expires_at)


def _weights(session: Session, manifest: Manifest) -> StoredObject:
    """The weights file, whose life the zip shares. Versions without signal share both with the version before them."""
    found = version_objects(session, manifest.job_id, manifest.version)
    assert found is not None  # the manifest is of it
    return found.adapter


def _live_archive(session: Session, weights: StoredObject) -> StoredObject | None:
    return session.scalars(
        select(StoredObject).where(
            StoredObject.kind == ObjectKind.ADAPTER_ZIP,
            StoredObject.job_id == weights.job_id,
            StoredObject.version == weights.version,
            StoredObject.state == ObjectState.LIVE,
        )
    ).first()


def _make(transaction: Transaction, manifest: Manifest, weights: StoredObject) -> StoredObject:
    with tempfile.TemporaryFile() as file:
        _write(file, manifest)
        archive = _describe(file, weights)
        with transaction() as session:
            session.add(archive)
        file.seek(0)
        storage.put_stream(archive.key, file, archive.sha256)
    with transaction() as session:
        # Under the lock that retention takes to expire the weights, and that makes the first of two win.
        held = session.get_one(StoredObject, weights.id, with_for_update=True, populate_existing=True)
        if held.state != ObjectState.LIVE:
            raise adapters.AdapterExpired(
                f"version {manifest.version} of job {manifest.job} was just removed by retention"
            )
        if known := _live_archive(session, weights):
            return known
        make_live(session, [archive.id])
    return archive


def _write(file: IO[bytes], manifest: Manifest) -> None:
    """Writes the zip chunk by chunk; each file's digest is checked on the way."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for part in sorted(manifest.files, key=lambda f: f.name):
            entry = zipfile.ZipInfo(part.name, FIXED_TIME)
            entry.external_attr = 0o644 << 16
            entry.file_size = part.size
            with archive.open(entry, "w") as sink:
                storage.copy_to(part.key, part.sha256, sink)


def _describe(file: IO[bytes], weights: StoredObject) -> StoredObject:
    """The pending row. Each making has a key of its own: one that was swept must not come back to life."""
    size = file.tell()
    file.seek(0)
    sha256 = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    id_ = uuid.uuid4()
    folder = PurePosixPath(weights.key).parent.parent  # beside `adapter/`, which stays a plain PEFT folder
    return StoredObject(
        id=id_,
        tenant_id=weights.tenant_id,
        job_id=weights.job_id,
        version=weights.version,
        kind=ObjectKind.ADAPTER_ZIP,
        key=str(folder / f"{id_.hex}.zip"),
        sha256=sha256,
        size=size,
    )


def _file(job: Job, manifest: Manifest, archive: StoredObject) -> AdapterFile:
    name = f"{job.name}-v{manifest.version}.zip"
    return AdapterFile(name, archive.key, archive.sha256, archive.size, storage.presign(archive.key, name))
