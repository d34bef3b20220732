"""The versions of a job: its checkpoints in OpenAI's shape, what was measured, and adapters to download."""

from __future__ import annotations

import uuid
from typing import Any, Literal

import pydantic

from app.api import ids
from app.api.auth import caller, requires, tenant_transaction
from app.api.blueprint import api
from app.api.job_objects import CheckpointList, checkpoint_object, unix
from app.api.jobs import find_job
from app.api.pages import PageQuery, page
from app.manager import adapters, downloads
from app.manager.adapters import AdapterFile
from app.manager.metrics import evaluations_of, metrics_of
from app.manager.series import series


class FileLink(pydantic.BaseModel):
    name: str = pydantic.Field(description="in the PEFT folder")
    url: str
    size: int = pydantic.Field(description="bytes")
    sha256: str


class AdapterObject(pydantic.BaseModel):
    object: Literal["fine_tuning.job.checkpoint.adapter"]
    checkpoint_id: str
    fine_tuning_job_id: str
    base_model: str
    step_number: int
    weights_digest: str = pydantic.Field(description="of the weights as engines hold them")
    filename: str
    url: str = pydantic.Field(description="of a zip of the PEFT folder; needs no key, ends at expires_at")
    size: int = pydantic.Field(description="bytes of the zip")
    sha256: str = pydantic.Field(description="of the zip")
    expires_at: int = pydantic.Field(description="Unix seconds; the files' URLs end then as well")
    files: list[FileLink] = pydantic.Field(description="what is in the zip, one by one")


class MetricsQuery(pydantic.BaseModel):
    after: int = pydantic.Field(0, ge=0, le=ids.MAX_INTEGER, description="steps behind this one")


class EvaluationSeries(pydantic.BaseModel):
    steps: list[int]
    reward_mean: list[float]
    pass_rate: list[float]


class MetricsObject(pydantic.BaseModel):
    object: Literal["fine_tuning.job.metrics"]
    fine_tuning_job_id: str
    step_number: int = pydantic.Field(description="the last step there is")
    steps: list[int] = pydantic.Field(description="long series are thinned evenly")
    series: dict[str, list[float | None]] = pydantic.Field(description="each along `steps`; null: not measured")
    evaluations: EvaluationSeries


@api.get("/fine_tuning/jobs/<fine_tuning_job_id>/checkpoints")
@requires("read")
@api.input(PageQuery, location="query", arg_name="query")
@api.output(CheckpointList)
def list_checkpoints(fine_tuning_job_id: str, query: PageQuery) -> dict[str, Any]:
    """List a job's checkpoints, newest first

    Every step makes one.
    """
    with tenant_transaction() as session:
        job = find_job(session, fine_tuning_job_id)
        before = None if query.after is None else _version(job.id, query.after, "after")
        found, more = adapters.checkpoints(session, job, query.limit, before)
        versions = [v.version for v in found]
        measured, evaluated = metrics_of(session, job, versions), evaluations_of(session, job, versions)
    name = caller().tenant_name
    data = [checkpoint_object(job, name, v, measured.get(v.version, {}), evaluated.get(v.version)) for v in found]
    return page(data, more)


@api.get("/fine_tuning/jobs/<fine_tuning_job_id>/checkpoints/<fine_tuning_checkpoint_id>/adapter")
@requires("read")
@api.output(AdapterObject)
def download_checkpoint(fine_tuning_job_id: str, fine_tuning_checkpoint_id: str) -> dict[str, Any]:
    """Download a checkpoint's adapter

    Answers short-lived URLs of a zip of the PEFT folder and of its files. Where retention has removed them, 404 with
    the code `adapter_expired` and the steps that are kept.
    """
    with tenant_transaction() as session:
        job = find_job(session, fine_tuning_job_id)
        version = _version(job.id, fine_tuning_checkpoint_id, "fine_tuning_checkpoint_id")
    return _adapter(job.id, version)


@api.get("/fine_tuning/jobs/<fine_tuning_job_id>/adapter")
@requires("read")
@api.output(AdapterObject)
def download_adapter(fine_tuning_job_id: str) -> dict[str, Any]:
    """Download the adapter of a job's latest step"""
    with tenant_transaction() as session:
        job = find_job(session, fine_tuning_job_id)
    return _adapter(job.id, None)


@api.get("/fine_tuning/jobs/<fine_tuning_job_id>/metrics")
@requires("read")
@api.input(MetricsQuery, location="query", arg_name="query")
@api.output(MetricsObject)
def retrieve_metrics(fine_tuning_job_id: str, query: MetricsQuery) -> dict[str, Any]:
    """Retrieve what a job's steps measured, as series"""
    with tenant_transaction() as session:
        job = find_job(session, fine_tuning_job_id)
        (curves,) = series(session, [job.id], query.after)
    return {
        "object": "fine_tuning.job.metrics",
        "fine_tuning_job_id": ids.job_id(job.id),
        "step_number": curves.version,
        "steps": curves.versions,
        "series": curves.metrics,
        "evaluations": {
            "steps": [p.version for p in curves.evals],
            "reward_mean": [p.reward_mean for p in curves.evals],
            "pass_rate": [p.pass_rate for p in curves.evals],
        },
    }


def _version(job_id: uuid.UUID, text: str, param: str) -> int:
    """Of a checkpoint of this job. Raises NotFound for anything else."""
    of, version = ids.parse_checkpoint(text, param)
    if of != job_id:
        raise ids.not_found("checkpoint of this job", text, param)
    return version


def _adapter(job_id: uuid.UUID, version: int | None) -> dict[str, Any]:
    found = downloads.download(tenant_transaction, job_id, version)
    manifest, archive = found.manifest, found.archive
    return {
        "object": "fine_tuning.job.checkpoint.adapter",
        "checkpoint_id": ids.checkpoint_id(job_id, manifest.version),
        "fine_tuning_job_id": ids.job_id(job_id),
        "base_model": manifest.base_model,
        "step_number": manifest.version,
        "weights_digest": manifest.weights_digest,
        "filename": archive.name,
        "url": archive.url,
        "size": archive.size,
        "sha256": archive.sha256,
        "expires_at": unix(found.expires_at),
        "files": [_link(file) for file in manifest.files],
    }


def _link(file: AdapterFile) -> dict[str, Any]:
    return {"name": file.name, "url": file.url, "size": file.size, "sha256": file.sha256}
