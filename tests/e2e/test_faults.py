"""Processes die, messages are lost, servers restart: each version is there once, nothing is lost or doubled."""

from __future__ import annotations

import random
import shutil
import uuid
from pathlib import Path

import redis
import torch
from sqlalchemy import func, select

from app import storage
from app.db import transaction
from app.manager import base_models, buffer
from app.manager.buffer import TrainingClaim
from app.models import Episode, Job, PolicyVersion, Round, StoredObject, Tenant, Turn, UsageEntry
from app.settings import get_settings
from app.specs.job import JobSpec
from tests.e2e.conftest import Service, live_stages
from tests.workers import STAGES, wait_for
from workers.lora import weights_digest
from workers.training.worker import TrainingWorker

DIALOGUE = {
    "environment": {"type": "toy_dialogue", "max_turns": 3, "params": {"latency": 0.1}},
    "sampling": {"max_tokens": 8},
    "hyperparameters": {"n_steps": 8, "prompts_per_round": 2, "group_size": 4},
}


def assert_whole(job_id: uuid.UUID, steps: int, episodes: int, turns: int) -> None:
    """Every version, round, trajectory and turn is there exactly once, and of its round's weights."""
    with transaction() as session:
        versions = session.scalars(
            select(PolicyVersion).where(PolicyVersion.job_id == job_id).order_by(PolicyVersion.version)
        ).all()
        assert [v.version for v in versions] == list(range(steps + 1))
        assert [v.optimizer_steps for v in versions if v.signal] == list(range(sum(v.signal for v in versions)))
        rounds = session.scalars(select(Round).where(Round.job_id == job_id).order_by(Round.policy_version)).all()
        assert [(r.policy_version, r.state) for r in rounds] == [(v, "committed") for v in range(steps)]
        ids = [r.id for r in rounds]
        counts = session.execute(
            select(Episode.round_id, func.count())
            .where(Episode.round_id.in_(ids), Episode.state == "finished")
            .group_by(Episode.round_id)
        ).all()
        assert sorted(tuple(c) for c in counts) == [(i, episodes) for i in ids]
        indexes = session.execute(
            select(Turn.episode_id, func.array_agg(Turn.index).label("all"))
            .where(Turn.round_id.in_(ids))
            .group_by(Turn.episode_id)
        ).all()
        assert len(indexes) == steps * episodes
        assert {tuple(sorted(row.all)) for row in indexes} == {tuple(range(turns))}
        trained = session.scalar(select(func.count()).where(UsageEntry.round_id.in_(ids), UsageEntry.episode_id == 0))
        assert trained == steps


def test_every_stage_is_killed_and_every_server_restarts(service: Service) -> None:
    tenants = [service.tenant("one"), service.tenant("two")]
    ids = [service.submit(t, **DIALOGUE, seed=i) for i, t in enumerate(tenants)]
    chosen = random.Random(20)
    disturbances = [*STAGES, "redis", "postgres", "s3", "redis"]
    chosen.shuffle(disturbances)
    for version, disturbance in enumerate(disturbances):
        wait_for(
            lambda least=version: min(service.job(i).version for i in ids) >= min(least, 7),
            60,
            f"both jobs are to reach version {version} before {disturbance} is disturbed",
            service.workers,
        )
        if disturbance in STAGES:
            service.workers.kill(disturbance)
            service.workers.start(disturbance)
        elif disturbance == "redis":
            redis.Redis.from_url(get_settings().redis_url.get_secret_value()).flushall()
        elif disturbance == "postgres":
            service.stack.kill("postgres")
            service.stack.start("postgres")
        else:
            service.stack.restart("seaweedfs")
    for job_id in ids:
        job = service.wait(job_id, "succeeded", "failed", seconds=90)
        assert (job.state, job.error_message) == ("succeeded", None)
        assert_whole(job_id, steps=8, episodes=8, turns=5)


def test_a_killed_update_is_done_again_to_the_same_bits(service: Service, tmp_path: Path) -> None:
    """The update of the same trajectories, once undisturbed in this process, once by a worker that was killed in it."""
    service.workers.kill("training")
    job_id = service.submit(
        service.tenant("acme"),
        sampling={"max_tokens": 48},
        hyperparameters={"n_steps": 1, "prompts_per_round": 16, "group_size": 16},
    )
    service.workers.start("training")
    service.wait(job_id, "running")
    wait_for(lambda: has_initial(job_id), 60, "version 0", service.workers)
    service.workers.kill("training")
    wait_for(lambda: round_state(job_id) == "ready", 60, "the round is to be ready", service.workers)
    undisturbed = reference_digest(job_id, tmp_path)

    service.workers.start("training")
    wait_for(lambda: round_state(job_id) == "training", 60, "the update is to begin", service.workers)
    service.workers.kill("training")
    assert round_state(job_id) == "training"  # killed in the midst of it
    service.workers.start("training")
    service.wait(job_id, "succeeded")
    with transaction() as session:
        version = session.get_one(PolicyVersion, (job_id, 1))
        adapter = session.get_one(StoredObject, version.adapter_object_id)
    assert version.attempt == 2
    assert version.weights_digest == undisturbed
    storage.get(adapter.key, adapter.sha256)


def has_initial(job_id: uuid.UUID) -> bool:
    with transaction() as session:
        return session.get(PolicyVersion, (job_id, 0)) is not None


def round_state(job_id: uuid.UUID) -> str | None:
    with transaction() as session:
        return session.scalars(select(Round.state).where(Round.job_id == job_id)).first()


def reference_digest(job_id: uuid.UUID, folder: Path) -> str:
    """The update of the job's ready round, computed here and not committed."""
    with transaction() as session:
        job = session.get_one(Job, job_id)
        round_ = session.scalars(select(Round).where(Round.job_id == job_id)).one()
        version = session.get_one(PolicyVersion, (job_id, 0))
        objects = [
            session.get_one(StoredObject, i)
            for i in (version.adapter_object_id, version.config_object_id, version.optimizer_object_id)
        ]
        claim = TrainingClaim(
            round_id=round_.id,
            attempt=0,
            losses=0,
            tenant_id=job.tenant_id,
            job_id=job_id,
            policy_version=0,
            weights_digest=version.weights_digest,
            spec=JobSpec.model_validate(job.spec),
            adapter=objects[0],
            config=objects[1],
            optimizer=objects[2],
        )
        groups = buffer.trajectories(session, claim)
        model = base_models.served_model(session, "tiny")
    from workers.runtime import Runtime
    from workers.training.worker import _trajectory

    worker = TrainingWorker(Runtime("training", "reference", base_model=model))  # type: ignore[arg-type]
    result = worker.trainer.update(
        worker.load_adapter(claim),
        worker.load_optimizer(claim),
        [[_trajectory(t) for t in group] for group in groups],
        claim.spec.hyperparameters,
        claim.spec.sampling.temperature,
    )
    return weights_digest(result.adapter.tensors, torch.float32)


def test_one_tenants_faults_fail_its_own_jobs_by_name(service: Service) -> None:
    """Grader raises, environment hangs, adapter is NaN: typed failures, while a neighbour runs on undisturbed."""
    bad, good = service.tenant("bad"), service.tenant("good")
    neighbour = service.submit(good, name="neighbour", hyperparameters={"n_steps": 40})
    raising = service.submit(bad, name="raising", environment={"type": "toy_raising"})
    hanging = service.submit(bad, name="hanging", environment={"type": "toy_hanging", "call_timeout_seconds": 1.0})
    poisoned = service.submit(bad, name="poisoned", hyperparameters={"n_steps": 100})
    poison(service, poisoned)
    lost = service.submit(bad, name="lost", hyperparameters={"n_steps": 100})
    lose(service, lost)

    failed = {job_id: service.wait(job_id, "failed", "succeeded") for job_id in (raising, hanging, poisoned, lost)}
    assert {job.name: job.error_code for job in failed.values()} == {
        "raising": "environment_error",
        "hanging": "environment_timeout",
        "poisoned": "adapter_invalid",
        "lost": "object_missing",
    }
    assert "the grader is broken" in (failed[raising].error_message or "")
    assert service.wait(neighbour, "succeeded", "failed").state == "succeeded"
    assert_whole(neighbour, steps=40, episodes=8, turns=1)


def test_text_that_makes_a_working_environment_hang_is_worth_nothing_and_trains(service: Service) -> None:
    job_id = service.submit(
        service.tenant("acme"),
        environment={"type": "toy_sometimes_hanging", "call_timeout_seconds": 0.5},
        hyperparameters={"n_steps": 1, "prompts_per_round": 4, "group_size": 8},
        seed=4,
    )
    assert service.wait(job_id, "succeeded", "failed").state == "succeeded"
    with transaction() as session:
        flagged = session.scalars(
            select(Episode)
            .join(Round, Round.id == Episode.round_id)
            .where(Round.job_id == job_id, Episode.flags.is_not(None))
        ).all()
    assert {(e.state, e.reward, tuple(e.flags or ())) for e in flagged} == {("finished", 0.0, ("environment_timeout",))}


def paused_at(service: Service, job_id: uuid.UUID) -> int:
    """Pauses a job between rounds; returns its version."""
    from app.manager import jobs

    service.wait_version(job_id, 1)
    with transaction() as session:
        jobs.pause(session, job_id)
    service.wait(job_id, "paused")
    return service.job(job_id).version


def resume(job_id: uuid.UUID) -> None:
    from app.manager import jobs

    with transaction() as session:
        jobs.resume(session, job_id)


def poison(service: Service, job_id: uuid.UUID) -> None:
    """Puts NaN into the adapter of the job's version while it is paused."""
    from safetensors.torch import load, save

    version = paused_at(service, job_id)
    with transaction() as session:
        row = session.get_one(StoredObject, session.get_one(PolicyVersion, (job_id, version)).adapter_object_id)
        tensors = load(storage.get(row.key, row.sha256))
        next(iter(tensors.values())).view(-1)[0] = float("nan")
        data = save(tensors)
        row.key, row.sha256, row.size = f"{row.key}-nan", storage.sha256_of(data), len(data)
        storage.put(row.key, data)
    resume(job_id)


def lose(service: Service, job_id: uuid.UUID) -> None:
    """Deletes the optimizer state of the job's version from S3 and from the disk."""
    version = paused_at(service, job_id)
    with transaction() as session:
        object_id = session.get_one(PolicyVersion, (job_id, version)).optimizer_object_id
        row = session.get_one(StoredObject, object_id)
    storage.delete(row.key)
    (get_settings().cache_path / "objects" / row.sha256).unlink()
    resume(job_id)


def test_files_deleted_from_disk_come_back_from_s3(service: Service) -> None:
    job_id = service.submit(service.tenant("acme"), hyperparameters={"n_steps": 30})
    service.wait_version(job_id, 2)
    for entry in (get_settings().cache_path / "objects").iterdir():
        entry.unlink(missing_ok=True)
    for folder in get_settings().cache_path.glob("adapters-*/*"):
        shutil.rmtree(folder, ignore_errors=True)
    assert service.wait(job_id, "succeeded", "failed").state == "succeeded"
    assert_whole(job_id, steps=30, episodes=8, turns=1)


def test_a_cancelled_job_stops_and_frees_its_slots(service: Service) -> None:
    from app.manager import jobs

    tenant: Tenant = service.tenant("acme")
    job_id = service.submit(
        tenant,
        environment={"type": "toy_dialogue", "max_turns": 8, "params": {"latency": 0.3}},
        hyperparameters={"n_steps": 100},
    )
    wait_for(lambda: turns_of(job_id) > 3, 60, "the job is to be amid its dialogues", service.workers)
    with transaction() as session:
        jobs.cancel(session, job_id)
    after = service.submit(tenant, hyperparameters={"n_steps": 2})
    assert service.wait(after, "succeeded", "failed").state == "succeeded"
    counted = turns_of(job_id)
    assert service.job(job_id).state == "cancelled"
    wait_for(lambda: live_stages() == set(STAGES), 30, "all workers are alive", service.workers)
    assert turns_of(job_id) == counted


def turns_of(job_id: uuid.UUID) -> int:
    with transaction() as session:
        of_job = select(func.count()).select_from(Turn).join(Round, Round.id == Turn.round_id)
        return session.scalar(of_job.where(Round.job_id == job_id)) or 0
