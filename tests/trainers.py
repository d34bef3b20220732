"""A training stage in the test's own process, and rounds played by hand with made-up trajectories."""

from __future__ import annotations

import random
import uuid
from collections.abc import Collection
from pathlib import Path

from sqlalchemy import select

from app.db import transaction
from app.manager import base_models
from app.models import PolicyVersion, StoredObject, Tenant
from app.models.round import EpisodeState
from app.models.worker import WorkerKind
from app.settings import get_settings
from tests import by_hand
from tests.tiny import VOCAB_SIZE, tiny_model_folder
from workers.cache import ObjectCache
from workers.runtime import Runtime
from workers.training.worker import TrainingWorker


def new_worker(cache: Path) -> TrainingWorker:
    """A training stage with a cache of its own."""
    folder = get_settings().models_path / by_hand.MODEL
    if not folder.exists():
        tiny_model_folder(folder)
    with transaction() as session:
        model = base_models.served_model(session, by_hand.MODEL)
    made = TrainingWorker(
        Runtime(WorkerKind.TRAINING, by_hand.TRAINING.name, boot=by_hand.TRAINING.boot, base_model=model)
    )
    made.cache = made.publisher.cache = ObjectCache(cache)
    return made


def start_job(worker: TrainingWorker, tenant: Tenant, **changes: object) -> uuid.UUID:
    """A running job whose version 0 the training stage made and uploaded."""
    job_id = by_hand.queue_job(tenant, **changes)
    by_hand.admit()
    worker.start(job_id)
    return job_id


def play_round(job_id: uuid.UUID, seed: int = 0, groups: Collection[int] = range(1000)) -> list[int]:
    """Finishes those groups of the job's round, given by index, with random token ids and rewards that depend on
    nothing but the seed and the episode's place. Returns all groups' ids."""
    round_id = by_hand.live_round(job_id).id
    by_hand.admit()
    by_hand.reset(round_id)
    found = by_hand.episodes_of(round_id)
    group_ids = sorted({e.group_id for e in found})
    chosen = {e.id: e for e in found if group_ids.index(e.group_id) in groups}

    def dice(episode_id: int) -> random.Random:
        episode = chosen[episode_id]
        return random.Random(f"{seed}:{group_ids.index(episode.group_id)}:{episode.index}")

    turns = []
    for claim in by_hand.claim(list(chosen), EpisodeState.GENERATING):
        own = dice(claim.episode_id)
        context = [own.randrange(4, VOCAB_SIZE) for _ in range(5)]
        sampled = [own.randrange(4, VOCAB_SIZE) for _ in range(own.randint(2, 8))]
        turns.append(by_hand.turn(claim, context_ids=context, sampled_ids=sampled, logprobs=[-4.0] * len(sampled)))
    by_hand.record_turns(turns)
    claims = by_hand.claim(list(chosen), EpisodeState.ACTING, by_hand.TOOLS)
    by_hand.record_answers([by_hand.answer(claim, dice(claim.episode_id).random()) for claim in claims])
    return group_ids


def versions_and_steps(job_id: uuid.UUID) -> list[tuple[int, int]]:
    with transaction() as session:
        rows = session.execute(
            select(PolicyVersion.version, PolicyVersion.optimizer_steps)
            .where(PolicyVersion.job_id == job_id)
            .order_by(PolicyVersion.version)
        )
        return [tuple(row) for row in rows]  # type: ignore[misc]


def published_bits(job_id: uuid.UUID, version: int) -> tuple[str, str]:
    """Digests of the files of a version: the float32 masters, and the optimizer's state."""
    with transaction() as session:
        row = session.get_one(PolicyVersion, (job_id, version))
        assert row.optimizer_object_id is not None
        adapter = session.get_one(StoredObject, row.adapter_object_id)
        return adapter.sha256, session.get_one(StoredObject, row.optimizer_object_id).sha256
