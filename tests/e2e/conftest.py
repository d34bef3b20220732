"""Real workers on a tiny model: one set of workers a module, a clean database and empty queues before and after it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import text

from app import db
from app.db import transaction
from app.embedded import EmbeddedStack
from app.manager import base_models, jobs, tenants
from app.models import Base, Job, Tenant
from app.settings import get_settings
from tests.tiny import VOCAB_SIZE, tiny_model_folder
from tests.workers import STAGES, WorkerProcesses, wait_for

collect_ignore = [] if find_spec("vllm") else ["test_vllm_worker.py"]

SETTINGS = {
    "MARLAAS_ENVIRONMENT_MODULES": "tests.toy",
    "MARLAAS_ENGINE_SLOTS": "32",
    "MARLAAS_ENGINE_KV_TOKENS": str(32 * 256),
    "MARLAAS_SWEEP_SECONDS": "0.5",
    "MARLAAS_DOORBELL_SECONDS": "2",
    "MARLAAS_LEASE_SECONDS": "6",
    "MARLAAS_HEARTBEAT_SECONDS": "0.5",
    "MARLAAS_WORKER_DEAD_SECONDS": "3",
    "MARLAAS_LOG_JSON": "0",
    "OMP_NUM_THREADS": "1",
}


class Service:
    """The whole service: submits jobs as a tenant would and waits for what comes of them."""

    def __init__(self, stack: EmbeddedStack, workers: WorkerProcesses) -> None:
        self.stack, self.workers = stack, workers

    def tenant(self, name: str) -> Tenant:
        with transaction() as session:
            return tenants.create_tenant(session, f"{name}-{uuid.uuid4().hex[:6]}")

    def submit(self, tenant: Tenant, **changes: Any) -> uuid.UUID:
        """A job on the tiny model; `changes` go over the defaults field by field."""
        document: dict[str, Any] = {
            "name": "digits",
            "base_model": "tiny",
            "environment": {"type": "toy_digits"},
            "sampling": {"max_tokens": 8},
            "lora": {"rank": 8, "alpha": 32},
            "hyperparameters": {"n_steps": 3, "prompts_per_round": 2, "group_size": 4, "learning_rate": 1e-2},
        }
        for field, value in changes.items():
            document[field] = document.get(field, {}) | value if isinstance(value, dict) else value
        with transaction() as session:
            return jobs.submit(session, tenant, jobs.parse_spec(document)).id

    def job(self, job_id: uuid.UUID) -> Job:
        with transaction() as session:
            return session.get_one(Job, job_id)

    def wait(self, job_id: uuid.UUID, *states: str, seconds: float = 90) -> Job:
        def there() -> bool:
            return self.job(job_id).state in states

        wait_for(there, seconds, f"job {job_id} is to be {' or '.join(states)}", self.workers)
        return self.job(job_id)

    def wait_version(self, job_id: uuid.UUID, version: int, seconds: float = 60) -> None:
        wait_for(
            lambda: self.job(job_id).version >= version, seconds, f"job {job_id} is to reach {version}", self.workers
        )


def clean(stack: EmbeddedStack) -> None:
    """Empties the tables and the queues."""
    tables = ", ".join(table.name for table in Base.metadata.sorted_tables)
    with db.engine("owner").begin() as connection:
        connection.execute(text(f"TRUNCATE {tables} CASCADE"))
    redis.Redis.from_url(get_settings().redis_url.get_secret_value()).flushall()


@pytest.fixture(scope="module")
def service(
    stack: EmbeddedStack, database: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Service]:
    """Workers of all stages and beat. A module's SETTINGS go over the common ones, its MODEL over `tiny_config`."""
    clean(stack)
    settings = SETTINGS | getattr(request.module, "SETTINGS", {})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        get_settings.cache_clear()
        folder = get_settings().models_path / "tiny"
        if not folder.exists():
            tiny_model_folder(folder, **getattr(request.module, "MODEL", {}))
        with transaction() as session:
            config = {"context_length": 512, "vocab_size": VOCAB_SIZE}
            base_models.register(session, "tiny", "tiny", "float32", config)
        logs = Path(tmp_path_factory.mktemp("logs"))
        if os.geteuid() == 0:
            logs.chmod(0o755)
        workers = WorkerProcesses(logs, settings)
        workers.start(*STAGES, "beat")
        try:
            wait_for(lambda: live_stages() == set(STAGES), 120, "all workers are to be alive", workers)
            yield Service(stack, workers)
        finally:
            workers.stop()
            clean(stack)
    get_settings.cache_clear()


def live_stages() -> set[str]:
    from app.manager.workers import live_workers

    with transaction() as session:
        return {worker.kind for worker in live_workers(session)}
