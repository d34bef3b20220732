"""`/v1/models`: the base models, and every adapter that a finished job of the tenant made."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.api import ids
from app.api.auth import caller, requires, tenant_transaction
from app.api.blueprint import api
from app.api.pages import ListOf, PageQuery, page, select_page
from app.manager.base_models import list_base_models
from app.models import BaseModel, Job, PolicyVersion, StoredObject
from app.models.job import JobKind, JobState
from app.models.object import ObjectState

OWNER = "marlaas"  # of base models
MOST = 1000


class ModelObject(pydantic.BaseModel):
    id: str
    object: Literal["model"]
    created: int = pydantic.Field(description="Unix seconds")
    owned_by: str


class ModelList(ListOf[ModelObject]):
    pass


class ModelQuery(PageQuery):
    limit: int = pydantic.Field(MOST, ge=1, le=MOST, description="OpenAI's client reads the first page alone")


@api.get("/models")
@requires("read")
@api.input(ModelQuery, location="query", arg_name="query")
@api.output(ModelList)
def list_models(query: ModelQuery) -> dict[str, Any]:
    """List base models and finished adapters

    The base models come first, before the first page of adapters, newest first.
    """
    with tenant_transaction() as session:
        base = [] if query.after else [_base(model) for model in list_base_models(session)]
        if query.after is not None and ids.parse_adapter(query.after) is None:
            raise ids.not_found("model", query.after, "after")
        after = find_adapter(session, query.after)[0].id if query.after else None
        finished = select(Job).where(
            Job.tenant_id == caller().tenant_id,
            Job.kind == JobKind.TRAIN,
            Job.state == JobState.SUCCEEDED,
            Job.version >= 1,
        )
        rows, more = select_page(session, finished, Job.created_at, Job.id, after, query.limit)
    return page(base + [_adapter(job, None) for (job,) in rows], more)


@api.get("/models/<path:model>")
@requires("read")
@api.output(ModelObject)
def retrieve_model(model: str) -> dict[str, Any]:
    """Retrieve a model

    Base models, finished adapters, and `…:ckpt-step-N` for any checkpoint of a job that is kept.
    """
    with tenant_transaction() as session:
        if ids.parse_adapter(model) is not None:
            return _adapter(*find_adapter(session, model))
        found = session.get(BaseModel, model) if model.isprintable() else None
        if found is None:
            raise ids.not_found("model", model, "model")
        return _base(found)


def find_adapter(session: Session, name: str) -> tuple[Job, int | None]:
    """The caller's job that made the adapter `ft:…`, and the version where the name is of a checkpoint.

    Raises NotFound: no such job or version of this tenant, or the job has not succeeded and no version is named.
    """
    wanted, who = ids.parse_adapter(name), caller()
    job = None
    if wanted is not None:
        job = session.scalars(
            select(Job).where(Job.tenant_id == who.tenant_id, Job.id == wanted.job, Job.kind == JobKind.TRAIN)
        ).first()
    if wanted is None or job is None or ids.model_id(job, who.tenant_name, wanted.version) != name:
        raise ids.not_found("model", name, "model")
    if wanted.version is None:
        exists = job.state == JobState.SUCCEEDED and job.version >= 1
    else:
        exists = wanted.version >= 1 and _is_kept(session, job, wanted.version)
    if not exists:
        raise ids.not_found("model", name, "model")
    return job, wanted.version


def _is_kept(session: Session, job: Job, version: int) -> bool:
    kept = (
        select(PolicyVersion.version)
        .join(StoredObject, StoredObject.id == PolicyVersion.adapter_object_id)
        .where(PolicyVersion.job_id == job.id, PolicyVersion.version == version, StoredObject.state == ObjectState.LIVE)
    )
    return session.scalars(kept).first() is not None


def _base(model: BaseModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": int(model.created_at.timestamp()), "owned_by": OWNER}


def _adapter(job: Job, version: int | None) -> dict[str, Any]:
    who = caller()
    return {
        "id": ids.model_id(job, who.tenant_name, version),
        "object": "model",
        "created": int((job.finished_at or job.created_at).timestamp()),
        "owned_by": who.tenant_name,
    }
