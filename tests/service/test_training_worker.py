"""The training stage against real Postgres and S3: isolation of updates, and faults in a process that lives on."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from app import db, storage
from app.db import transaction
from app.embedded import EmbeddedStack
from app.manager import buffer, commit
from app.manager.buffer import StoredTrajectory, TrainingClaim
from app.models import Job, PolicyVersion, StoredObject, Tenant
from app.settings import get_settings
from tests import by_hand
from tests.proxy import LossyProxy
from tests.trainers import new_worker, play_round, start_job, versions_and_steps
from workers.lora import weights_digest
from workers.training import worker as worker_module
from workers.training.optimizer import write_optimizer
from workers.training.trainer import UpdateResult
from workers.training.worker import TrainingWorker


@pytest.fixture
def worker(hand: None, tmp_path: Path) -> TrainingWorker:
    return new_worker(tmp_path / "cache")


def claimed(job_id: uuid.UUID) -> tuple[TrainingClaim, list[list[StoredTrajectory]]]:
    claim = by_hand.claim_training()
    assert claim is not None and claim.job_id == job_id
    with transaction() as session:
        return claim, buffer.trajectories(session, claim)


def update(worker: TrainingWorker, claim: TrainingClaim, groups: list[list[StoredTrajectory]]) -> UpdateResult:
    """The update of a claim, without its commit."""
    return worker.trainer.update(
        worker.load_adapter(claim),
        worker.load_optimizer(claim),
        [[worker_module._trajectory(t) for t in group] for group in groups],
        claim.spec.hyperparameters,
        claim.spec.sampling.temperature,
    )


def content(result: UpdateResult, folder: Path) -> tuple[str, bytes]:
    """All bits of an update: the float32 masters and the optimizer's state."""
    write_optimizer(folder / "state", result.optimizer)
    return weights_digest(result.adapter.tensors, torch.float32), (folder / "state").read_bytes()


def test_an_update_is_the_same_bits_alone_between_others_from_cache_and_from_s3(
    worker: TrainingWorker, tenant: Tenant, tmp_path: Path
) -> None:
    mine = start_job(worker, tenant, name="mine", seed=1)
    play_round(mine, seed=1)
    worker.train(claimed(mine)[0])  # so that the optimizer has moments
    play_round(mine, seed=2)
    claim, groups = claimed(mine)
    alone = content(update(worker, claim, groups), tmp_path)

    other = start_job(worker, tenant, name="other", seed=2, lora={"rank": 16})
    play_round(other, seed=3)
    worker.train(claimed(other)[0])
    assert by_hand.job(other).version == 1
    after_other = content(update(worker, claim, groups), tmp_path)

    from_s3 = content(update(new_worker(tmp_path / "empty"), claim, groups), tmp_path)

    assert after_other == alone
    assert from_s3 == alone


def test_swapped_adapters_give_another_update(worker: TrainingWorker, tenant: Tenant, tmp_path: Path) -> None:
    """The comparison above can fail."""
    mine = start_job(worker, tenant, name="mine", seed=1)
    other = start_job(worker, tenant, name="other", seed=2)
    play_round(mine)
    claim, groups = claimed(mine)
    right = content(update(worker, claim, groups), tmp_path)
    with transaction() as session:
        wrong_version = session.get_one(PolicyVersion, (other, 0))
        wrong_adapter = session.get_one(StoredObject, wrong_version.adapter_object_id)
    swapped = TrainingClaim(
        **(vars(claim) | {"adapter": wrong_adapter, "weights_digest": wrong_version.weights_digest})
    )
    assert content(update(worker, swapped, groups), tmp_path) != right


def test_an_adapter_that_is_not_the_published_one_is_refused(worker: TrainingWorker, tenant: Tenant) -> None:
    job_id = start_job(worker, tenant, name="mine", seed=1)
    other = start_job(worker, tenant, name="other", seed=2)
    play_round(job_id)
    claim, _ = claimed(job_id)
    with transaction() as session:
        adapter = session.get_one(StoredObject, session.get_one(PolicyVersion, (other, 0)).adapter_object_id)
    worker.train(TrainingClaim(**(vars(claim) | {"adapter": adapter})))
    assert by_hand.job(job_id).error_code == "object_missing"


def test_a_committed_version_is_what_was_uploaded(worker: TrainingWorker, tenant: Tenant) -> None:
    job_id = start_job(worker, tenant)
    play_round(job_id)
    worker.train(claimed(job_id)[0])
    with transaction() as session:
        version = session.get_one(PolicyVersion, (job_id, 1))
        objects = [
            session.get_one(StoredObject, i)
            for i in (version.adapter_object_id, version.config_object_id, version.optimizer_object_id)
        ]
    assert {o.state for o in objects} == {"live"}
    assert all(len(storage.get(o.key, o.sha256)) == o.size for o in objects)
    assert version.optimizer_steps == 1


@pytest.fixture
def lossy_s3(stack: EmbeddedStack, worker: TrainingWorker, monkeypatch: pytest.MonkeyPatch) -> Iterator[LossyProxy]:
    """S3 behind a proxy; `worker` comes first, so that it starts on the direct way."""
    real = urlsplit(get_settings().s3_endpoint_url or "")
    proxy = LossyProxy((real.hostname or "", real.port or 0))
    monkeypatch.setattr(get_settings(), "s3_endpoint_url", f"http://127.0.0.1:{proxy.port}")
    storage.client.cache_clear()
    yield proxy
    storage.client.cache_clear()
    proxy.close()


def test_an_upload_that_times_out_after_the_update_is_one_step(
    worker: TrainingWorker, tenant: Tenant, lossy_s3: LossyProxy
) -> None:
    job_id = start_job(worker, tenant)
    play_round(job_id)
    claim, _ = claimed(job_id)
    # Every first answer to a PUT is lost: the object is there, the client does not know.
    seen: set[bytes] = set()

    def first_put(sent: bytes) -> bool:
        line = sent.split(b"\r\n", 1)[0]
        if not line.startswith(b"PUT") or line in seen:
            return False
        seen.add(line)
        return True

    lossy_s3.loses = first_put
    worker.train(claim)
    assert lossy_s3.lost >= 3  # weights, config, optimizer state
    assert versions_and_steps(job_id) == [(0, 0), (1, 1)]


@pytest.fixture
def lossy_postgres(
    stack: EmbeddedStack, worker: TrainingWorker, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LossyProxy]:
    url = db.engine("service").url
    proxy = LossyProxy((url.host or "", url.port or 0))
    lossy = db.create_engine(url.set(host="127.0.0.1", port=proxy.port), pool_pre_ping=True)
    real = db.engine
    monkeypatch.setattr(db, "engine", lambda role: lossy if role == "service" else real(role))
    yield proxy
    lossy.dispose()
    proxy.close()


def test_a_commit_whose_answer_is_lost_is_one_step(
    worker: TrainingWorker, tenant: Tenant, lossy_postgres: LossyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = start_job(worker, tenant)
    play_round(job_id)
    claim, _ = claimed(job_id)
    real = commit.commit_round
    calls = []

    def then_lose_the_answer(*args: object) -> int:
        version = real(*args)  # type: ignore[arg-type]
        calls.append(version)
        lossy_postgres.loses = lambda sent: b"COMMIT" in sent and lossy_postgres.lost == 0
        return version

    monkeypatch.setattr(commit, "commit_round", then_lose_the_answer)
    worker.train(claim)
    assert lossy_postgres.lost == 1
    assert calls == [1]  # the second try found it committed
    assert versions_and_steps(job_id) == [(0, 0), (1, 1)]
    with transaction() as session:
        assert session.get_one(Job, job_id).state == "running"


def test_a_connection_lost_before_the_commit_arrives_is_one_step(
    worker: TrainingWorker, tenant: Tenant, lossy_postgres: LossyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative of the test above: here the first try did not commit, so the second must."""
    job_id = start_job(worker, tenant)
    play_round(job_id)
    claim, _ = claimed(job_id)
    real = commit.commit_round
    calls = []

    def lose_the_connection(session: object, *args: object) -> int:
        version = real(session, *args)  # type: ignore[arg-type]
        calls.append(version)
        if len(calls) == 1:
            session.connection().connection.driver_connection.close()  # type: ignore[attr-defined]
        return version

    monkeypatch.setattr(commit, "commit_round", lose_the_connection)
    worker.train(claim)
    assert calls == [1, 1]
    assert versions_and_steps(job_id) == [(0, 0), (1, 1)]
