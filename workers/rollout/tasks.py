"""Celery tasks of the rollout queue."""

from __future__ import annotations

from app import broker
from app.broker import celery


@celery.task(name=broker.GENERATE)
def generate(episode_ids: list[int]) -> None:
    from workers.rollout.worker import rollout_worker

    rollout_worker().generate(episode_ids)


@celery.task(name=broker.CHAT)
def chat(call_id: str) -> None:
    from workers.rollout.worker import rollout_worker

    rollout_worker().serving.answer(call_id)
