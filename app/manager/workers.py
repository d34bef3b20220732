"""Workers announce themselves by heartbeat; a worker that is silent has lost its leases."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app.errors import NotFound
from app.models import Worker
from app.models.worker import WorkerKind
from app.settings import get_settings


@dataclass
class Announcement:
    """What a worker says of itself at each heartbeat."""

    name: str
    boot: uuid.UUID
    kind: WorkerKind
    base_model: str | None = None
    slots: int = 0
    adapter_slots: int = 0
    load: dict[str, Any] = field(default_factory=dict)

    @property
    def claimant(self) -> str:
        """Who a lease belongs to: this process, not its successor of the same name."""
        return f"{self.name}/{self.boot}"


def heartbeat(session: Session, said: Announcement) -> bool:
    """Upserts the worker's row; returns whether an operator wants it to drain. A new boot starts undrained."""
    values = {
        "boot": said.boot,
        "kind": said.kind,
        "base_model": said.base_model,
        "slots": said.slots,
        "adapter_slots": said.adapter_slots,
        "load": said.load,
    }
    new = insert(Worker).values(name=said.name, **values)
    statement = new.on_conflict_do_update(
        index_elements=[Worker.name],
        set_={
            **values,
            "seen_at": func.clock_timestamp(),
            "started_at": func.coalesce(
                select(Worker.started_at)
                .where(Worker.name == said.name, Worker.boot == said.boot)
                .correlate(None)
                .scalar_subquery(),
                func.clock_timestamp(),
            ),
            "draining": Worker.draining & (Worker.boot == new.excluded.boot),
        },
    ).returning(Worker.draining)
    return bool(session.execute(statement).scalar_one())


def retire(session: Session, said: Announcement) -> None:
    """A worker that stops on purpose takes itself off at once."""
    session.execute(
        update(Worker)
        .where(Worker.name == said.name, Worker.boot == said.boot)
        .values(seen_at=func.now() - timedelta(days=1), slots=0, load={})
    )


def live_workers(session: Session, kind: WorkerKind | None = None) -> Sequence[Worker]:
    statement = select(Worker).where(
        Worker.seen_at > func.now() - timedelta(seconds=get_settings().worker_dead_seconds)
    )
    if kind is not None:
        statement = statement.where(Worker.kind == kind)
    return session.scalars(statement.order_by(Worker.name)).all()


def list_workers(session: Session) -> list[Worker]:
    """All that were seen within the last day, and those that were stopped since."""
    return list(
        session.scalars(
            select(Worker).where(Worker.seen_at > func.now() - timedelta(days=2)).order_by(Worker.kind, Worker.name)
        )
    )


def set_draining(session: Session, name: str, draining: bool) -> None:
    """A draining worker finishes what it holds and is given nothing more."""
    found = session.execute(update(Worker).where(Worker.name == name).values(draining=draining)).rowcount  # type: ignore[attr-defined]
    if not found:
        raise NotFound(f"no worker is named {name!r}; `marlaas worker list` shows them", param="worker")
