"""What comes after an update: its files go to storage, then one commit makes them the next version."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from sqlalchemy.exc import DBAPIError

from app import storage
from app.db import transaction
from app.errors import InfrastructureFault
from app.manager import commit, objects
from app.manager.buffer import TrainingClaim
from app.manager.commit import NewVersion
from app.manager.objects import Upload
from app.models.object import ObjectKind
from workers.cache import ObjectCache
from workers.lora import CONFIG_FILE, WEIGHTS_FILE, LoraWeights, adapter_files, weights_digest
from workers.retry import retried
from workers.training.optimizer import OPTIMIZER_FILE, OptimizerState, initial_state, optimizer_file
from workers.training.trainer import UpdateResult

Tick = Callable[[], None]


class Publisher:
    """Thread-safe; keeps nothing but the cache."""

    def __init__(self, base_model: str, dtype: torch.dtype, cache: ObjectCache) -> None:
        self.base_model, self.dtype, self.cache = base_model, dtype, cache

    def publish(self, claim: TrainingClaim, result: UpdateResult, tick: Tick) -> int:
        """Uploads and commits the result; returns the new version. Raises LostClaim, InfrastructureFault, JobFault."""
        if result.signal:
            version = claim.policy_version + 1
            prefix = storage.version_prefix(claim.tenant_id, claim.job_id, version, claim.attempt)
            new = self.upload(claim.tenant_id, claim.job_id, version, prefix, result.adapter, result.optimizer, tick)
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

    def publish_initial(self, tenant_id: uuid.UUID, job_id: uuid.UUID, adapter: LoraWeights) -> bool:
        """Publishes version 0, a fresh adapter; False where there is one, or it is not wanted any more."""
        # Which attempt this is does not matter, only that two never write the same key.
        prefix = storage.version_prefix(tenant_id, job_id, 0, uuid.uuid4().int % 2**31)
        new = self.upload(tenant_id, job_id, 0, prefix, adapter, initial_state(adapter.tensors))
        with transaction() as session:
            return commit.commit_initial(session, job_id, new)

    def upload(
        self,
        tenant_id: uuid.UUID,
        job_id: uuid.UUID,
        version: int,
        prefix: str,
        adapter: LoraWeights,
        optimizer: OptimizerState,
        tick: Tick = lambda: None,
    ) -> NewVersion:
        """Announces and uploads a version's files; they stay pending until the commit."""
        files = adapter_files(adapter, self.base_model)
        uploads = [
            Upload(ObjectKind.ADAPTER_MODEL, f"{prefix}adapter/{WEIGHTS_FILE}", files[WEIGHTS_FILE]),
            Upload(ObjectKind.ADAPTER_CONFIG, f"{prefix}adapter/{CONFIG_FILE}", files[CONFIG_FILE]),
            Upload(ObjectKind.OPTIMIZER, f"{prefix}{OPTIMIZER_FILE}", optimizer_file(optimizer)),
        ]
        with transaction() as session:
            ids = objects.announce(session, tenant_id, job_id, version, uploads)
        tick()

        def upload(one: Upload) -> None:
            def put() -> None:
                tick()  # a try that failed is progress: there are only so many
                storage.put(one.key, one.data, one.sha256)

            retried(put, InfrastructureFault)
            self.cache.put(one.data, one.sha256)
            tick()

        with ThreadPoolExecutor(len(uploads)) as pool:  # sending leaves Python's lock
            sent = pool.map(upload, uploads)
            digest = weights_digest(adapter.tensors, self.dtype)
            list(sent)
        return NewVersion(
            weights_digest=digest,
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
