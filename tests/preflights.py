"""Preflights worked by hand, as `tests.by_hand` does jobs."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import select

from app.db import transaction
from app.manager import jobs, preflight
from app.manager.preflight import PreflightReport
from app.models import Job, Round, Tenant
from app.models.round import EpisodeState
from tests import by_hand
from tests.by_hand import ids

SMALL = {"prompts": 2, "samples": 2}
GENERATING, ACTING = EpisodeState.GENERATING, EpisodeState.ACTING


def submit(tenant: Tenant, **changes: Any) -> uuid.UUID:
    """A preflight of 2 prompts × 2 answers that waits for its validation."""
    spec = jobs.parse_spec(by_hand.document(**{"preflight": SMALL} | changes))
    with transaction() as session:
        return preflight.submit(session, tenant, spec).id


def start(tenant: Tenant, **changes: Any) -> uuid.UUID:
    """One with its round, of which nothing is admitted yet."""
    job_id = submit(tenant, **changes)
    with transaction() as session:
        jobs.validated(session, job_id)
    by_hand.admit()
    by_hand.publish_initial(job_id)
    return job_id


def rounds_of(job_id: uuid.UUID) -> Sequence[Round]:
    with transaction() as session:
        return session.scalars(select(Round).where(Round.job_id == job_id).order_by(Round.id)).all()


def to_acting(job_id: uuid.UUID, **said: Any) -> list[int]:
    """Every episode has said something, and waits for its environment; in order of (group, index)."""
    (round_,) = rounds_of(job_id)
    by_hand.to_state(round_.id, GENERATING)
    found = ids(by_hand.episodes_of(round_.id))
    by_hand.record_turns([by_hand.turn(c, **said) for c in by_hand.claim(found, GENERATING)])
    return found


def answer(episode_ids: Sequence[int], rewards: Sequence[float], **changes: Any) -> None:
    claims = {c.episode_id: c for c in by_hand.claim(episode_ids, ACTING, by_hand.TOOLS)}
    by_hand.record_answers(
        [
            replace(by_hand.answer(claims[episode_id], reward), **changes)
            for episode_id, reward in zip(episode_ids, rewards, strict=True)
        ]
    )


def finish(job_id: uuid.UUID, rewards: Sequence[float] = (1, 0, 0, 0), **said: Any) -> None:
    """Plays the round, and lets admission end the preflight."""
    answer(to_acting(job_id, **said), rewards)
    by_hand.admit()


def report_of(job_id: uuid.UUID) -> PreflightReport:
    with transaction() as session:
        found = preflight.report(session, session.get_one(Job, job_id))
    assert found is not None
    return found
