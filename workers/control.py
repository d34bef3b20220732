"""Remote commands: `celery -A workers inspect engine`, `celery -A workers control drain`."""

from __future__ import annotations

from typing import Any

from celery.worker.control import control_command, inspect_command

from app.db import transaction
from app.errors import NotFound
from app.manager import workers


@inspect_command()
def engine(state: Any) -> dict[str, Any]:
    """What this worker's engine does: resident adapters, batch, tokens/s (other stages: their own load)."""
    from workers.runtime import runtime

    this = runtime()
    return {"kind": str(this.kind), "draining": this.draining, **this.load()}


@control_command()
def drain(state: Any) -> dict[str, str]:
    """Finish what has started and take no more."""
    from workers.runtime import runtime

    this = runtime()
    for queue in list(state.consumer.task_consumer.queues):
        state.consumer.cancel_task_queue(queue.name)
    this.draining = True
    try:
        with transaction() as session:
            workers.set_draining(session, this.name, True)
    except NotFound as error:
        return {"error": error.message}
    return {"ok": f"{this.name} drains"}
