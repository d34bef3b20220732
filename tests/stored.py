"""Jobs by hand whose adapters really lie in S3."""

from __future__ import annotations

import uuid

from app import storage
from app.db import transaction
from app.manager import commit, objects
from app.manager.commit import NewVersion
from app.manager.objects import Upload
from app.models import Tenant
from app.models.object import ObjectKind
from tests import by_hand

CONFIG = b'{"peft_type": "LORA", "r": 8}'


def weights(version: int) -> bytes:
    return b"weights of version %d" % version


def start_job(tenant: Tenant, *, config: bytes = CONFIG, model: bytes | None = None, **changes: object) -> uuid.UUID:
    """A running job whose version 0 is stored."""
    job_id = by_hand.queue_job(tenant, **changes)
    with transaction() as session:
        by_hand.jobs.start_queued(session)
    new = _upload(tenant.id, job_id, 0, 0, model or weights(0), config)
    with transaction() as session:
        assert commit.commit_initial(session, job_id, new)
    return job_id


def step(job_id: uuid.UUID, metrics: dict[str, float] | None = None) -> int:
    """One round to its end, with a stored version; returns the version."""
    by_hand.finish_round(job_id)
    held = by_hand.claim_training()
    assert held is not None and held.job_id == job_id
    version = held.policy_version + 1
    new = _upload(held.tenant_id, job_id, version, held.attempt, weights(version), CONFIG)
    with transaction() as session:
        return commit.commit_round(session, held, new, metrics or {"reward_mean": 0.5})


def _upload(
    tenant_id: uuid.UUID, job_id: uuid.UUID, version: int, attempt: int, model: bytes, config: bytes
) -> NewVersion:
    prefix = storage.version_prefix(tenant_id, job_id, version, attempt)
    uploads = [
        Upload(ObjectKind.ADAPTER_MODEL, f"{prefix}adapter/adapter_model.safetensors", model),
        Upload(ObjectKind.ADAPTER_CONFIG, f"{prefix}adapter/adapter_config.json", config),
        Upload(ObjectKind.OPTIMIZER, f"{prefix}optimizer.safetensors", b"optimizer"),
    ]
    with transaction() as session:
        ids = objects.announce(session, tenant_id, job_id, version, uploads)
    for upload in uploads:
        storage.put(upload.key, upload.data)
    return NewVersion(by_hand.digest(job_id, version), ids[0], ids[1], ids[2], optimizer_steps=version, signal=True)
