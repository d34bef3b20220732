"""A job, its events and its checkpoints as OpenAI shows them; what they have no word for is under `marlaas`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

import pydantic
from sqlalchemy.orm import Session

from app.api import ids
from app.api.auth import caller
from app.api.documents import asked_for, has_grader, hyperparameters_of, named_field, words_of_request
from app.api.pages import ListOf
from app.manager.adapters import AdapterVersion
from app.manager.metrics import trained_tokens
from app.manager.progress import JobProgress, job_progress
from app.models import Event, Job
from app.models.job import TERMINAL, JobState
from app.specs.job import JobSpec

INLINE = ("items", "eval_items")  # lines in a job's own document, which may be long: not shown in lists


class JobError(pydantic.BaseModel):
    code: str
    message: str
    param: str | None = pydantic.Field(description="the field of the request that is wrong, where one is")


class JobHyperparameters(pydantic.BaseModel):
    n_epochs: Literal["auto"]
    batch_size: int
    learning_rate_multiplier: float


class Progress(pydantic.BaseModel):
    wanted: str = pydantic.Field(description="what was asked for last: run, pause or cancel")
    phase: str = pydantic.Field(description="what the job does, or waits for")
    version: int = pydantic.Field(description="steps that are done")
    n_steps: int
    reward_mean: float | None = pydantic.Field(description="of the last step")
    episodes_done: int = pydantic.Field(description="of the round under way")
    episodes_total: int
    tokens_per_second: float = pydantic.Field(description="sampled of late")
    queue_place: int | None = pydantic.Field(description="from 1, among the tenant's own jobs that wait alike")
    time_to_first_step_seconds: float | None
    elapsed_seconds: float
    eta_seconds: float | None


class JobObject(pydantic.BaseModel):
    id: str
    object: Literal["fine_tuning.job"]
    created_at: int = pydantic.Field(description="Unix seconds, as are all times")
    finished_at: int | None
    estimated_finish: int | None
    status: JobState
    model: str
    fine_tuned_model: str | None = pydantic.Field(description="once the job has succeeded")
    organization_id: str
    training_file: str = pydantic.Field(description="empty where an environment has its data itself")
    validation_file: str | None
    hyperparameters: JobHyperparameters
    method: dict[str, Any] = pydantic.Field(description="with every default told: sent again, it makes the same job")
    result_files: list[str]
    trained_tokens: int | None = pydantic.Field(description="once the job is over")
    error: JobError | None
    seed: int
    suffix: str
    metadata: dict[str, str]
    marlaas: Progress


class JobList(ListOf[JobObject]):
    pass


class EventObject(pydantic.BaseModel):
    id: str
    object: Literal["fine_tuning.job.event"]
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any] = pydantic.Field(description="`code` tells what happened; further fields belong to it")


class EventList(ListOf[EventObject]):
    pass


class CheckpointObject(pydantic.BaseModel):
    id: str
    object: Literal["fine_tuning.job.checkpoint"]
    created_at: int
    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    step_number: int
    metrics: dict[str, float]
    available: bool = pydantic.Field(description="false: retention has removed its files")
    weights_digest: str


class CheckpointList(ListOf[CheckpointObject]):
    pass


def job_objects(
    session: Session, jobs: Sequence[Job], tenant_name: str, *, brief: bool = False
) -> list[dict[str, Any]]:
    """In their order. `brief` leaves out the lines that a job holds in its own document."""
    progress = {p.job_id: p for p in job_progress(session, [job.id for job in jobs], caller().tenant_id)}
    tokens = trained_tokens(session, [job.id for job in jobs if job.state in TERMINAL])
    return [_job(job, progress[job.id], tokens, tenant_name, brief) for job in jobs]


def _job(
    job: Job, progress: JobProgress, tokens: dict[uuid.UUID, int], tenant_name: str, brief: bool
) -> dict[str, Any]:
    spec = JobSpec.model_validate(job.spec)
    asked = asked_for(spec)
    if brief and (environment := asked.method["reinforcement"].get("environment")):
        environment["params"] = {k: v for k, v in environment["params"].items() if k not in INLINE}
    every = hyperparameters_of(spec)
    return {
        "id": ids.job_id(job.id),
        "object": "fine_tuning.job",
        "created_at": unix(job.created_at),
        "finished_at": unix(job.finished_at) if job.finished_at else None,
        "estimated_finish": None if progress.eta_seconds is None else int(time.time() + progress.eta_seconds),
        "status": job.state,
        "model": job.base_model,
        "fine_tuned_model": ids.model_id(job, tenant_name) if job.state == JobState.SUCCEEDED else None,
        "organization_id": tenant_name,
        "training_file": asked.training_file,
        "validation_file": asked.validation_file,
        "hyperparameters": {"n_epochs": "auto"} | {k: every[k] for k in ("batch_size", "learning_rate_multiplier")},
        "method": asked.method,
        "result_files": [],
        "trained_tokens": tokens.get(job.id, 0) if job.state in TERMINAL else None,
        "error": job_error(job, spec),
        "seed": spec.seed,
        "suffix": spec.name,
        "metadata": spec.metadata,
        "marlaas": {
            "wanted": progress.wanted,
            "phase": progress.phase,
            "version": progress.version,
            "n_steps": progress.n_steps,
            "reward_mean": progress.reward_mean,
            "episodes_done": progress.episodes_done,
            "episodes_total": progress.episodes_total,
            "tokens_per_second": progress.tokens_per_second,
            "queue_place": progress.queue_place,
            "time_to_first_step_seconds": progress.first_step_seconds,
            "elapsed_seconds": progress.elapsed_seconds,
            "eta_seconds": progress.eta_seconds,
        },
    }


def job_error(job: Job, spec: JobSpec) -> dict[str, Any] | None:
    """Why the job failed, its fields named as the request names them."""
    if not job.error_code:
        return None
    message, with_grader = job.error_message or "", has_grader(spec)
    return {
        "code": job.error_code,
        "message": words_of_request(message, with_grader),
        "param": named_field(message, with_grader),
    }


def event_object(event: Event, spec: JobSpec) -> dict[str, Any]:
    data = event.data or {}
    return {
        "id": ids.event_id(event.id),
        "object": "fine_tuning.job.event",
        "created_at": unix(event.created_at),
        "level": event.level,
        "message": words_of_request(event.message, has_grader(spec)),
        "type": "metrics" if "reward_mean" in data else "message",
        "data": data | {"code": event.code},
    }


METRICS = {
    "loss": "train_loss",
    "reward_mean": "train_mean_reward",
    "reward_std": "train_reward_std",
    "grad_norm": "train_grad_norm",
    "entropy": "train_entropy",
    "kl": "train_kl",
    "response_length": "train_response_length",
}


def checkpoint_object(
    job: Job, tenant_name: str, version: AdapterVersion, measured: dict[str, Any], evaluated: dict[str, Any] | None
) -> dict[str, Any]:
    """`measured`: of the step that made it. `evaluated`: the summary of the evaluation on it, if there was one."""
    metrics = {"step": version.version} | {METRICS[k]: v for k, v in measured.items() if k in METRICS and v is not None}
    if evaluated:
        metrics |= {"valid_mean_reward": evaluated["reward_mean"], "valid_pass_rate": evaluated["pass_rate"]}
    return {
        "id": ids.checkpoint_id(job.id, version.version),
        "object": "fine_tuning.job.checkpoint",
        "created_at": unix(version.created_at),
        "fine_tuning_job_id": ids.job_id(job.id),
        "fine_tuned_model_checkpoint": ids.model_id(job, tenant_name, version.version),
        "step_number": version.version,
        "metrics": metrics,
        "available": version.available,
        "weights_digest": version.weights_digest,
    }


def unix(time_: datetime) -> int:
    return int(time_.timestamp())
