"""A job's adapters for its tenant: which versions there are, their files, and a download as a ready PEFT folder."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from app import storage
from app.db import transaction
from app.errors import Conflict, InvalidRequest, NotFound
from app.manager.objects import version_objects
from app.models import Job, PolicyVersion, StepMetrics, StoredObject
from app.models.object import ObjectState

FILE_NAMES = {"adapter_config.json", "adapter_model.safetensors"}


class AdapterExpired(NotFound):
    """The version was committed, and retention has removed its files since."""

    code = "adapter_expired"


@dataclass(frozen=True)
class AdapterFile:
    name: str  # in the PEFT folder
    key: str
    sha256: str
    size: int  # bytes
    url: str  # presigned, for `presign_seconds`


@dataclass(frozen=True)
class Manifest:
    """What is needed to download a version's adapter and to know that it is the one."""

    job_id: uuid.UUID
    job: str
    base_model: str
    version: int
    weights_digest: str
    files: tuple[AdapterFile, ...]


@dataclass(frozen=True)
class AdapterVersion:
    version: int
    created_at: datetime
    size: int  # bytes of the weights file
    available: bool  # false: expired by retention
    signal: bool  # false: same weights as the version before
    reward_mean: float | None  # of the round that made it
    weights_digest: str


def versions(session: Session, job: Job) -> list[AdapterVersion]:
    """All committed versions of a job, from 0."""
    rows = session.execute(_of_job(job).order_by(PolicyVersion.version))
    return [_version(*row) for row in rows]


def checkpoints(session: Session, job: Job, limit: int, before: int | None = None) -> tuple[list[AdapterVersion], bool]:
    """(up to `limit` versions that steps made, newest first, all older than `before`; whether there are older ones)."""
    statement = _of_job(job).where(PolicyVersion.version >= 1)
    if before is not None:
        statement = statement.where(PolicyVersion.version < before)
    rows = session.execute(statement.order_by(PolicyVersion.version.desc()).limit(limit + 1)).all()
    return [_version(*row) for row in rows[:limit]], len(rows) > limit


def _of_job(job: Job) -> Select[Any]:
    return (
        select(PolicyVersion, StoredObject, StepMetrics.metrics["reward_mean"].as_float())
        .join(StoredObject, StoredObject.id == PolicyVersion.adapter_object_id)
        .outerjoin(
            StepMetrics, (StepMetrics.job_id == PolicyVersion.job_id) & (StepMetrics.version == PolicyVersion.version)
        )
        .where(PolicyVersion.job_id == job.id)
    )


def _version(row: PolicyVersion, stored: StoredObject, reward: float | None) -> AdapterVersion:
    return AdapterVersion(
        version=row.version,
        created_at=row.created_at,
        size=stored.size,
        available=stored.state == ObjectState.LIVE,
        signal=row.signal,
        reward_mean=reward,
        weights_digest=row.weights_digest,
    )


def manifest(session: Session, job: Job, version: int | None = None) -> Manifest:
    """The files of a version's adapter, by default the latest one's.

    Raises NotFound naming the versions that exist, AdapterExpired naming those that are kept.
    """
    wanted = job.version if version is None else version
    found = version_objects(session, job.id, wanted)
    if found is None:
        last = session.get(PolicyVersion, (job.id, job.version))
        known = f"it has versions 0 to {job.version}" if last else f"it has none yet, being {job.state}"
        raise NotFound(f"job {job.name} has no version {wanted}; {known}", param="version")
    stored = (found.adapter, found.config)
    if any(file.state != ObjectState.LIVE for file in stored):
        kept = [v.version for v in versions(session, job) if v.available]
        raise AdapterExpired(
            f"version {wanted} of job {job.name} was removed by retention; kept: {_ranges(kept)}", param="version"
        )
    return Manifest(
        job_id=job.id,
        job=job.name,
        base_model=job.base_model,
        version=wanted,
        weights_digest=found.version.weights_digest,
        files=tuple(_file(job, wanted, file) for file in stored),
    )


def download(job_id: uuid.UUID, version: int | None, to: Path, *, force: bool = False) -> Manifest:
    """Makes `to` a PEFT folder with a version's adapter, whole or not at all; every file's digest is checked.

    Raises Conflict when `to` is in use: an empty folder is filled, and with `force` one that holds only an adapter is
    replaced. Raises NotFound, AdapterExpired, ObjectMissing, InfrastructureFault. Opens its own transaction.
    """
    check_target(to, force)
    with transaction() as session:
        job = session.get(Job, job_id)
        if job is None:
            raise NotFound(f"no job {job_id}", param="job")
        wanted = manifest(session, job, version)
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.with_name(f".{to.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        for file in wanted.files:
            (partial / file.name).write_bytes(storage.get(file.key, file.sha256))
        _replace(partial, to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return wanted


def check_target(to: Path, force: bool) -> None:
    """Raises InvalidRequest or Conflict when a download may not make `to`."""
    if not to.name:
        raise InvalidRequest(f"{str(to)!r} cannot be made; name a folder that does not exist", param="to")
    if to.is_symlink() or (to.exists() and not to.is_dir()):
        raise Conflict(f"{to} is not a folder", param="to")
    present = {path.name for path in to.iterdir()} if to.exists() else set()
    if present - FILE_NAMES:
        some = ", ".join(sorted(present - FILE_NAMES)[:3])
        raise Conflict(f"{to} holds other files ({some}); name another folder", param="to")
    if present and not force:
        raise Conflict(f"{to} holds an adapter already; --force replaces it", param="to")


def _replace(partial: Path, to: Path) -> None:
    """Puts the finished folder in place; an adapter that is there already stays until then, or comes back."""
    if not (to.exists() and any(to.iterdir())):
        partial.rename(to)  # also over an empty folder
        return
    old = to.with_name(partial.name + ".old")
    to.rename(old)
    try:
        partial.rename(to)
    except OSError:
        old.rename(to)
        raise
    shutil.rmtree(old)


def _file(job: Job, version: int, stored: StoredObject) -> AdapterFile:
    name = PurePosixPath(stored.key).name
    return AdapterFile(
        name=name,
        key=stored.key,
        sha256=stored.sha256,
        size=stored.size,
        url=storage.presign(stored.key, f"{job.name}-v{version}-{name}"),
    )


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 6` for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs) or "none"
