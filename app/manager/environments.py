"""What can be known of a job's environment when the job is made."""

from __future__ import annotations

import uuid

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.errors import InvalidRequest
from app.models import File
from app.settings import get_settings
from app.specs.environment import check_environment
from app.specs.job import EnvironmentSpec


def checked(session: Session, tenant_id: uuid.UUID, spec: EnvironmentSpec) -> EnvironmentSpec:
    """The environment with ids of files as they are stored; its files cannot be deleted before this transaction ends.

    Raises InvalidRequest naming the field that is wrong: name, parameters, inline lines, or a file not there.

    An operator's own environments check their parameters in the tools worker, where they run.
    """
    settings = get_settings()
    source = check_environment(spec, settings.tool_deadline_seconds, plugins=bool(settings.environment_modules))
    if source is None:
        return spec
    read = {"file_id": source.file_id, "eval_file_id": source.eval_file_id}
    for name, file_id in read.items():
        if file_id is not None and not _hold_file(session, tenant_id, file_id):
            field = f"environment.params.{name}"
            raise InvalidRequest(f"{field}: no file {file_id}; `marlaas file list` shows the tenant's", param=field)
    ids = {name: str(file_id) for name, file_id in read.items() if file_id is not None}
    return spec.model_copy(update={"params": spec.params | ids})


def _hold_file(session: Session, tenant_id: uuid.UUID, file_id: uuid.UUID) -> bool:
    mine = select(File.id).where(File.id == file_id, File.tenant_id == tenant_id, File.deleted_at.is_(None))
    return session.scalars(mine.with_for_update(read=True)).first() is not None
