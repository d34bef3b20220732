"""The `dataset` environment's lines: given inline, or in a tenant's uploaded file."""

from __future__ import annotations

import json
import uuid
from functools import lru_cache
from typing import Any

from sqlalchemy import select

from app.db import transaction
from app.errors import InvalidRequest
from app.models import File, StoredObject
from app.specs.job import EnvironmentSpec
from workers.cache import ObjectCache

FILE_FIELDS = {"file_id": "items", "eval_file_id": "eval_items"}


def with_items(tenant_id: uuid.UUID, spec: EnvironmentSpec) -> EnvironmentSpec:
    """The environment with the lines of its files in place of their ids. Raises InvalidRequest, ObjectMissing."""
    if not FILE_FIELDS.keys() & spec.params.keys():
        return spec
    params: dict[str, Any] = dict(spec.params)
    for field, items in FILE_FIELDS.items():
        if field in params:
            params[items] = _lines(tenant_id, str(params.pop(field)), field)
    return spec.model_copy(update={"params": params})


@lru_cache(maxsize=32)
def _lines(tenant_id: uuid.UUID, file_id: str, field: str) -> list[dict[str, Any]]:
    """A file never changes, so its lines are read once."""
    try:
        wanted = uuid.UUID(file_id)
    except ValueError:
        raise InvalidRequest(f"{file_id!r} is not a file's id", param=f"environment.params.{field}") from None
    with transaction() as session:
        stored = session.scalars(
            select(StoredObject)
            .join(File, File.object_id == StoredObject.id)
            .where(File.id == wanted, File.tenant_id == tenant_id, File.deleted_at.is_(None))
        ).first()
    if stored is None:
        raise InvalidRequest(f"no file {file_id}", param=f"environment.params.{field}")
    return [json.loads(line) for line in ObjectCache().read(stored).splitlines() if line.strip()]
