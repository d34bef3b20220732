"""The whole service for a benchmark: the embedded stack in a directory of its own, and workers as processes."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app import base_models as files
from app import db, migrate
from app.db import transaction
from app.embedded import EmbeddedStack, processes
from app.embedded.home import remove_state
from app.manager import base_models, jobs, tenants
from app.manager.workers import live_workers
from app.models import Job, Tenant
from app.models.job import LIVE, JobState
from app.settings import get_settings

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("manager", "tools", "rollout", "training")
READY_SECONDS = 180


@contextmanager
def running_stack() -> Iterator[Path]:
    """Empty servers and the base model; this process's settings point at them. Yields their directory."""
    model = files.pull(files.DEFAULT_MODEL, get_settings().models_path.resolve())
    state_dir = Path(tempfile.mkdtemp(prefix="marlaas-bench-"))
    state_dir.chmod(0o711)  # the servers of root run as another user
    try:
        with EmbeddedStack(state_dir, usual_ports=False) as stack:
            os.environ.update(
                stack.environment(),
                MARLAAS_MODELS_DIR=str(model.parent),
                MARLAAS_ENVIRONMENT_MODULES="bench.environments",
            )
            get_settings.cache_clear()
            db.engine.cache_clear()
            migrate.upgrade(get_settings().database_url.get_secret_value())
            stack.create_logins()
            with transaction() as session:
                description = files.describe(model)
                dtype = files.compute_dtype(description)
                base_models.register(session, files.DEFAULT_MODEL, model.name, dtype, description)
            yield state_dir
    finally:
        remove_state(state_dir)


@dataclass
class Setup:
    """How the workers of a benchmark run: settings for all, settings by stage, modules that a stage also includes,
    and whether the web server runs as well."""

    settings: Mapping[str, str] = field(default_factory=dict)
    by_stage: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    include: Mapping[str, Sequence[str]] = field(default_factory=dict)
    web: bool = False


@contextmanager
def running_workers(setup: Setup, logs: Path) -> Iterator[None]:
    """Workers of all stages and beat, ready to take work; stopped at the end."""
    running = {}
    try:
        for stage in (*STAGES, "beat", *(("web",) if setup.web else ())):
            command = [sys.executable, "-m", "celery", "-A", "workers", "--quiet"]
            if stage == "web":
                command = [sys.executable, "-m", "gunicorn", "app.web:create_app()"]
                command += ["--config", "python:app.gunicorn_config"]
            elif stage == "beat":
                command += ["beat", "--scheduler", "celery.beat.Scheduler"]
            else:
                command += ["worker", "-Q", stage, "-n", f"{stage}@bench", "--without-gossip", "--without-mingle"]
                if modules := setup.include.get(stage):
                    command += ["-I", ",".join(modules)]  # of several such options the last one alone would count
            environment = {**os.environ, **setup.settings, **setup.by_stage.get(stage, {})}
            with (logs / f"{stage}.log").open("ab") as log:
                running[stage] = processes.spawn(command, env=environment, cwd=ROOT, output=log)
        processes.wait_until(lambda: _alive() == set(STAGES), READY_SECONDS, f"the workers (logs in {logs})")
        yield
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            processes.stop(process, signal.SIGTERM, timeout=15)


def _alive() -> set[str]:
    with transaction() as session:
        return {worker.kind for worker in live_workers(session)}


def tenant() -> Tenant:
    """A tenant of its own, without quotas that matter."""
    with transaction() as session:
        return tenants.create_tenant(
            session, f"bench-{uuid.uuid4().hex[:8]}", max_running_jobs=64, max_inflight_episodes=4096
        )


def submit(owner: Tenant, document: dict[str, Any]) -> uuid.UUID:
    """Submits a job on the base model."""
    spec = jobs.parse_spec({"base_model": files.DEFAULT_MODEL, **document})
    with transaction() as session:
        return jobs.submit(session, owner, spec).id


def wait_for(job_ids: Sequence[uuid.UUID], seconds: float) -> None:
    """Waits for the jobs to succeed. Raises RuntimeError when one ends otherwise, TimeoutError past the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        with transaction() as session:
            found = [session.get_one(Job, job_id) for job_id in job_ids]
        bad = [job for job in found if job.state in (JobState.FAILED, JobState.CANCELLED)]
        if bad:
            raise RuntimeError(f"job {bad[0].name} {bad[0].state}: {bad[0].error_message}")
        if not any(job.state in LIVE for job in found):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s: {[(job.name, job.state, job.version) for job in found]}")
        time.sleep(0.2)
