"""The base models that jobs may train on, and whether a job fits one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.errors import InvalidRequest, NotFound
from app.models import BaseModel
from app.settings import get_settings
from app.specs.job import JobSpec

DTYPES = ("bfloat16", "float32")


def register(session: Session, name: str, path: str, dtype: str, config: dict[str, Any]) -> BaseModel:
    """Makes a base model known; the first one has the plain queues. Registering a name again updates where it lies."""
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype is one of {', '.join(DTYPES)}, not {dtype!r}", param="dtype")
    model = session.get(BaseModel, name)
    if model is None:
        first = session.scalars(select(BaseModel.name).limit(1)).first() is None
        suffix = "" if first else "." + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        model = BaseModel(name=name, queue_suffix=suffix)
        session.add(model)
    model.path, model.dtype, model.config = path, dtype, config
    session.flush()
    return model


def list_base_models(session: Session) -> Sequence[BaseModel]:
    return session.scalars(select(BaseModel).order_by(BaseModel.created_at)).all()


def served_model(session: Session, name: str | None) -> BaseModel:
    """The base model that a worker serves: the one named in its settings, else the first one registered."""
    if name is None:
        model = session.scalars(select(BaseModel).where(BaseModel.queue_suffix == "")).first()
        if model is None:
            raise NotFound("no base model is registered; run `marlaas model pull smollm2-135m-instruct`")
        return model
    model = session.get(BaseModel, name)
    if model is None:
        known = ", ".join(m.name for m in list_base_models(session)) or "none"
        raise NotFound(f"base model {name!r} is not registered (known: {known})", param="base_model")
    return model


def folder(model: BaseModel) -> Path:
    """Where this machine has the model's files."""
    return get_settings().models_path / model.path


def check_fits(session: Session, spec: JobSpec) -> None:
    """Raises InvalidRequest where a job cannot run on its base model or in this service, with the numbers."""
    settings = get_settings()
    _check_rounds(spec, settings.max_round_episodes)
    model = session.get(BaseModel, spec.base_model)
    if model is None:
        known = ", ".join(m.name for m in list_base_models(session)) or "none yet: `marlaas model pull`"
        raise InvalidRequest(f"base_model: unknown {spec.base_model!r}; known: {known}", param="base_model")
    if spec.lora.rank > settings.max_lora_rank:
        raise InvalidRequest(
            f"lora.rank: {spec.lora.rank} is over the engines' maximum of {settings.max_lora_rank}; lower it",
            param="lora.rank",
        )
    length = sampled_tokens(spec)
    limit = context_limit(model)
    if length >= limit:
        raise InvalidRequest(
            f"sampling.max_tokens: {spec.environment.max_turns} turns of {spec.sampling.max_tokens} tokens are"
            f" {length}, which leaves no room for a prompt in {limit} tokens; lower it or environment.max_turns",
            param="sampling.max_tokens",
        )


def _check_rounds(spec: JobSpec, most: int) -> None:
    """A round is trained on in one piece, so its episodes must fit the trainer's memory."""
    h, e = spec.hyperparameters, spec.evaluation
    rounds = [("hyperparameters.prompts_per_round", h.prompts_per_round, h.group_size, "hyperparameters.group_size")]
    if e.every:
        rounds.append(("evaluation.prompts", e.prompts, e.samples, "evaluation.samples"))
    for field, prompts, samples, other in rounds:
        if prompts * samples > most:
            raise InvalidRequest(
                f"{field}: {prompts} prompts of {samples} episodes are {prompts * samples}, over the most a round may"
                f" hold, {most}; lower it or {other}",
                param=field,
            )


def sampled_tokens(spec: JobSpec) -> int:
    """The most tokens that the policy may sample in one episode."""
    return spec.environment.max_turns * spec.sampling.max_tokens


def context_limit(model: BaseModel) -> int:
    """The longest episode, in tokens: it must fit the model's context, a row of the engine and one micro-batch."""
    settings = get_settings()
    row = settings.engine_kv_tokens // settings.engine_slots
    return min(int(model.config["context_length"]), row, settings.train_microbatch_tokens)
