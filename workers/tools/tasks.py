"""Celery tasks of the tools queue."""

from __future__ import annotations

import uuid

from app import broker
from app.broker import celery


@celery.task(name=broker.RESET)
def reset(group_ids: list[int]) -> None:
    from workers.tools.worker import tools_worker

    tools_worker().reset(group_ids)


@celery.task(name=broker.STEP)
def step(episode_ids: list[int]) -> None:
    from workers.tools.worker import tools_worker

    tools_worker().step(episode_ids)


@celery.task(name=broker.VALIDATE)
def validate(job_id: str) -> None:
    from workers.tools.worker import tools_worker

    tools_worker().validate(uuid.UUID(job_id))


@celery.task(name=broker.GRADE)
def grade(call_id: str) -> None:
    from workers.tools.worker import tools_worker

    tools_worker().grader_runs.answer(call_id)
