"""Remote commands: `celery -A workers inspect engine`, `… control drain -d rollout@host`, `… control undrain`."""

from __future__ import annotations

from typing import Any

from celery.worker.control import control_command, inspect_command

from app.db import transaction
from app.manager import workers
from app.manager.doorbells import ring_admission


@inspect_command()
def engine(state: Any) -> dict[str, Any]:
    """What this worker does: resident adapters, batch, tokens/s (rollout), and the other stages' own load."""
    from workers.runtime import runtime

    this = runtime()
    return {"kind": str(this.kind), "draining": this.draining, **this.load()}


@control_command()
def drain(state: Any) -> dict[str, str]:
    """Finish what has started and take no more."""
    return _set_draining(True)


@control_command()
def undrain(state: Any) -> dict[str, str]:
    """Take work again."""
    return _set_draining(False)


def _set_draining(draining: bool) -> dict[str, str]:
    from workers.runtime import runtime

    this = runtime()
    with transaction() as session:
        workers.set_draining(session, this.name, draining)
        ring_admission(session)
    if draining:
        this.drain()
    else:
        this.undrain()
    return {"ok": f"{this.name} {'drains' if draining else 'takes work again'}"}
