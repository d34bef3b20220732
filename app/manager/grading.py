"""Runs of graders outside of jobs, done by a tools worker while the caller waits: tenants' code never runs here."""

from __future__ import annotations

import uuid
from typing import Any

from app import broker
from app.calls import Call
from app.db import transaction
from app.errors import InfrastructureFault, InvalidRequest, RateLimited
from app.manager.workers import live_workers
from app.models.worker import WorkerKind
from app.specs.grader import GraderSpec

QUEUE = WorkerKind.TOOLS.value
SECONDS = 30.0  # of a run, waiting included


def run_grader(tenant_id: uuid.UUID, grader: GraderSpec, item: dict[str, Any], text: str) -> dict[str, Any]:
    """{"value": {"reward", "scores", "failure"}, "seconds"}, or {"failed": {"type", "message"}} where the run took too
    long or took its process down. Raises RateLimited, InfrastructureFault."""
    return _ask(tenant_id, {"do": "grade", "grader": grader.model_dump(mode="json"), "item": item, "text": text})


def check_grader(tenant_id: uuid.UUID, grader: GraderSpec) -> None:
    """Checks what only running the grader's source shows. Raises InvalidRequest, RateLimited, InfrastructureFault."""
    answer = _ask(tenant_id, {"do": "check", "grader": grader.model_dump(mode="json")})
    if "failed" in answer:
        raise InvalidRequest(f"grader: {answer['failed']['message']}", param="grader")


def _ask(tenant_id: uuid.UUID, request: dict[str, Any]) -> dict[str, Any]:
    with transaction("service") as session:
        alive = any(w.slots and not w.draining for w in live_workers(session, WorkerKind.TOOLS))
    if not alive:
        raise InfrastructureFault("no tools worker is alive", code="no_tools_worker")
    with Call(broker.GRADE, QUEUE, {"tenant": str(tenant_id), "request": request}, SECONDS) as messages:
        answer = next(iter(messages))
    if "busy" in answer:
        raise RateLimited("Too many graders are run at once. Wait for the answers of some.", retry_after=1)
    if "invalid" in answer:
        raise InvalidRequest(answer["invalid"]["message"], param=answer["invalid"]["param"])
    return answer
