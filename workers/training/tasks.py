"""Celery tasks of the training queue."""

from __future__ import annotations

import uuid

from app import broker
from app.broker import celery


@celery.task(name=broker.TRAIN)
def train() -> None:
    """Trains the next ready round, if there is one; the bell carries no choice."""
    from workers.training.worker import training_worker

    training_worker().train_next()


@celery.task(name=broker.STREAM)
def stream(group_id: int) -> None:
    """Computes ahead what a closed group adds to its unfinished round, when no round is ready."""
    from workers.training.worker import training_worker

    training_worker().stream(group_id)


@celery.task(name=broker.START)
def start(job_id: str) -> None:
    """Publishes a job's version 0, the fresh adapter."""
    from workers.training.worker import training_worker

    training_worker().start(uuid.UUID(job_id))
