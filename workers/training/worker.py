"""The training stage: one round at a time from the buffer, an update on a copy, upload, commit."""

from __future__ import annotations

import json
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog
import torch
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from app import storage
from app.db import transaction
from app.errors import InfrastructureFault, InvalidRequest, JobFault, ObjectMissing
from app.manager import base_models, buffer, commit, jobs, objects
from app.manager.buffer import StoredTrajectory, TrainingClaim
from app.manager.commit import LostClaim, NewVersion
from app.manager.objects import Upload
from app.models.job import JobState
from app.models.object import ObjectKind
from app.settings import get_settings
from app.specs.job import JobSpec
from workers.cache import ObjectCache
from workers.lora import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoraWeights,
    fresh_adapter,
    read_adapter,
    weights_digest,
    write_adapter,
)
from workers.once import once
from workers.retry import retried
from workers.runtime import Runtime, Watchdog, runtime
from workers.training.grpo import Trajectory
from workers.training.optimizer import OPTIMIZER_FILE, OptimizerState, initial_state, read_optimizer, write_optimizer
from workers.training.trainer import Trainer

log = structlog.get_logger(__name__)

STUCK_SECONDS = 300.0


class TrainingWorker:
    def __init__(self, this: Runtime) -> None:
        settings = get_settings()
        assert this.base_model is not None
        self.runtime = this
        self.model = this.base_model
        self.model_path = base_models.folder(self.model)
        self.dtype: torch.dtype = getattr(torch, self.model.dtype)
        self.trainer = Trainer(
            self.model_path,
            self.dtype,
            threads=settings.training_threads,
            microbatch_tokens=settings.train_microbatch_tokens,
        )
        self.cache = ObjectCache()
        self.ticks = 0  # progress: micro-batches, uploads, commits
        self.claim: TrainingClaim | None = None
        self.claimed_at = 0.0
        self.updates = 0
        self.busy_seconds = 0.0
        this.slots = 1
        this.load = self.load
        threading.Thread(target=self._renew_on, name="leases", daemon=True).start()
        Watchdog(lambda: self.claim is not None, lambda: self.ticks, STUCK_SECONDS)

    def load(self) -> dict[str, Any]:
        claim = self.claim
        return {
            "round": claim.round_id if claim else None,
            "job": str(claim.job_id) if claim else None,
            "updates": self.updates,
            "busy_seconds": round(self.busy_seconds, 3),
        }

    # --- version 0

    def start(self, job_id: uuid.UUID) -> None:
        """Publishes the fresh adapter of a job that has none. Twice does nothing the second time."""
        with transaction() as session:
            job = jobs.begin(session, job_id, JobState.RUNNING)
            if job is None or jobs.has_version(session, job_id):
                return
        spec = JobSpec.model_validate(job.spec)
        try:
            adapter = fresh_adapter(self.model_path, spec.lora, spec.seed)
            # Which attempt this is does not matter, only that two never write the same key.
            prefix = storage.version_prefix(job.tenant_id, job.id, 0, uuid.uuid4().int % 2**31)
            new = self._upload(job.tenant_id, job.id, 0, prefix, adapter, initial_state(adapter.tensors))
            with transaction() as session:
                commit.commit_initial(session, job_id, new)
        except JobFault as error:
            with transaction() as session:
                jobs.fail_by_id(session, job_id, error.code, error.message)

    # --- updates

    def train_next(self) -> None:
        """Trains rounds until the buffer is empty."""
        while not self.runtime.draining:
            with transaction() as session:
                claim = buffer.claim_next(session, self.model.name, self.runtime.claimant, get_settings().lease_seconds)
            if claim is None:
                return
            self.train(claim)

    def train(self, claim: TrainingClaim) -> None:
        """One update of one round, committed once or not at all."""
        started = time.time()
        self.claim, self.claimed_at = claim, time.monotonic()
        bound = log.bind(tenant=str(claim.tenant_id), job=str(claim.job_id), round=claim.round_id)
        try:
            with transaction() as session:
                groups = buffer.trajectories(session, claim)
            version = self._update_and_commit(claim, groups)
            bound.info("committed", version=version, seconds=round(time.time() - started, 3))
            self.updates += 1
        except LostClaim as error:
            bound.warning("update_dropped", error=error.message)
        except (JobFault, InvalidRequest) as error:
            bound.warning("job_fault", code=error.code, error=error.message)
            with transaction() as session:
                buffer.fail_job(session, claim, error.code, error.message)
        except InfrastructureFault as error:
            bound.warning("update_given_back", error=error.message)
            with transaction() as session:
                buffer.give_back(session, claim, error.message)
        finally:
            self.claim = None
            self.busy_seconds += time.time() - started
            self.runtime.spans.add(claim.tenant_id, claim.round_id, "training", started, time.time())

    def _update_and_commit(self, claim: TrainingClaim, groups: list[list[StoredTrajectory]]) -> int:
        adapter = self.load_adapter(claim)
        optimizer = self.load_optimizer(claim)
        result = self.trainer.update(
            adapter,
            optimizer,
            [[_trajectory(t) for t in group] for group in groups],
            claim.spec.hyperparameters,
            claim.spec.sampling.temperature,
            progress=self._tick,
        )
        if result.signal:
            prefix = storage.version_prefix(claim.tenant_id, claim.job_id, claim.policy_version + 1, claim.attempt)
            new = self._upload(
                claim.tenant_id,
                claim.job_id,
                claim.policy_version + 1,
                prefix,
                result.adapter,
                result.optimizer,
            )
        else:  # the very objects of the version before
            new = NewVersion(
                weights_digest=claim.weights_digest,
                adapter_object_id=claim.adapter.id,
                config_object_id=claim.config.id,
                optimizer_object_id=claim.optimizer.id if claim.optimizer else None,
                optimizer_steps=result.optimizer.step,
                signal=False,
            )
        return self._commit(claim, new, result.metrics)

    def _tick(self, done: int = 0, total: int = 0) -> None:
        self.ticks += 1

    def load_adapter(self, claim: TrainingClaim) -> LoraWeights:
        """The float32 masters of the round's version, from the cache or from S3: the same bytes."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / WEIGHTS_FILE).write_bytes(self.cache.read(claim.adapter))
            (Path(folder) / CONFIG_FILE).write_bytes(self.cache.read(claim.config))
            adapter = read_adapter(Path(folder))
        if weights_digest(adapter.tensors, self.dtype) != claim.weights_digest:
            raise ObjectMissing(f"adapter of version {claim.policy_version} is not the one that was published")
        return adapter

    def load_optimizer(self, claim: TrainingClaim) -> OptimizerState:
        if claim.optimizer is None:
            raise ObjectMissing(f"optimizer state of version {claim.policy_version} is gone")
        self.cache.read(claim.optimizer)
        return read_optimizer(self.cache.path(claim.optimizer.sha256))

    def _upload(
        self,
        tenant_id: uuid.UUID,
        job_id: uuid.UUID,
        version: int,
        prefix: str,
        adapter: LoraWeights,
        optimizer: OptimizerState,
    ) -> NewVersion:
        """Announces and uploads a version's files; they stay pending until the commit."""
        with tempfile.TemporaryDirectory() as folder:
            write_adapter(Path(folder), adapter, self.model.name)
            weights = (Path(folder) / WEIGHTS_FILE).read_bytes()
            config = (Path(folder) / CONFIG_FILE).read_bytes()
            write_optimizer(Path(folder) / OPTIMIZER_FILE, optimizer)
            state = (Path(folder) / OPTIMIZER_FILE).read_bytes()
        uploads = [
            Upload(ObjectKind.ADAPTER_MODEL, f"{prefix}adapter/{WEIGHTS_FILE}", weights),
            Upload(ObjectKind.ADAPTER_CONFIG, f"{prefix}adapter/{CONFIG_FILE}", config),
            Upload(ObjectKind.OPTIMIZER, f"{prefix}{OPTIMIZER_FILE}", state),
        ]
        with transaction() as session:
            ids = objects.announce(session, tenant_id, job_id, version, uploads)

        def upload(one: Upload) -> None:
            retried(lambda: storage.put(one.key, one.data), InfrastructureFault)
            self.cache.put(one.data)
            self._tick()

        with ThreadPoolExecutor(len(uploads)) as pool:  # hashing and sending leave Python's lock
            list(pool.map(upload, uploads))
        return NewVersion(
            weights_digest=weights_digest(adapter.tensors, self.dtype),
            adapter_object_id=ids[0],
            config_object_id=ids[1],
            optimizer_object_id=ids[2],
            optimizer_steps=optimizer.step,
            signal=True,
        )

    def _commit(self, claim: TrainingClaim, new: NewVersion, metrics: dict[str, float]) -> int:
        """Commits once: when the answer is lost, the round is read again before anything is tried again (rule 3)."""
        metrics = json.loads(json.dumps(metrics, allow_nan=False))

        def once() -> int:
            with transaction() as session:
                if commit.is_committed(session, claim):
                    return claim.policy_version + 1
                return commit.commit_round(session, claim, new, metrics)

        try:
            return retried(once, DBAPIError)
        except DBAPIError as error:
            raise InfrastructureFault(str(error).splitlines()[0]) from error

    def _renew_on(self) -> None:
        """Renews the training lease while micro-batches go on, up to the deadline of an update."""
        ticks = -1
        while True:
            time.sleep(get_settings().lease_seconds / 3)
            claim, now = self.claim, self.ticks
            late = time.monotonic() - self.claimed_at > get_settings().training_deadline_seconds
            if claim is None or now == ticks or late:
                continue
            ticks = now
            try:
                with transaction() as session:
                    buffer.renew(session, claim, get_settings().lease_seconds)
            except SQLAlchemyError as error:
                log.warning("renewal_failed", error=str(error).splitlines()[0])


def _trajectory(stored: StoredTrajectory) -> Trajectory:
    return Trajectory(
        token_ids=stored.token_ids,
        loss_mask=stored.loss_mask,
        engine_logprobs=stored.logprobs,
        reward=stored.reward,
        index=stored.index,
        truncated=stored.truncated,
    )


@once
def training_worker() -> TrainingWorker:
    """This process's training stage, made at its first use."""
    return TrainingWorker(runtime())
