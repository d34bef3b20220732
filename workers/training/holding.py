"""What this worker has in hand: a round that it computes, or a group ahead of its round, and rounds that it publishes.

Each round keeps its lease by progress of its own, under a deadline of its own; the process ends when one is stuck.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError

from app.db import transaction
from app.manager import buffer
from app.manager.buffer import TrainingClaim
from app.settings import get_settings
from workers.runtime import Watchdog

log = structlog.get_logger(__name__)

STUCK_SECONDS = 300.0


@dataclass(eq=False)
class Work:
    """Something that must make progress: micro-batches, uploads, a commit."""

    since: float = field(default_factory=time.monotonic)
    progress_at: int = field(default_factory=time.monotonic_ns)

    def tick(self, done: int = 0, total: int = 0) -> None:
        self.progress_at = time.monotonic_ns()


@dataclass(eq=False, kw_only=True)
class Held(Work):
    """A claimed round, from its claim to its end here."""

    claim: TrainingClaim
    started: float = field(default_factory=time.time)
    publishing: bool = False
    committed: bool = False
    renewed_at: int = 0  # the progress for which the lease was renewed last

    @property
    def late(self) -> bool:
        return time.monotonic() - self.since > get_settings().training_deadline_seconds


@dataclass(eq=False, kw_only=True)
class Ahead(Work):
    """A group that is computed before its round is ready: no claim, so nothing to lose."""

    round_id: int


class Hand:
    """Thread-safe. Holds at most `room` rounds; whoever claims waits for room first, so that memory is bounded."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._changed = threading.Condition()
        self._work: list[Work] = []
        self._updates = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        threading.Thread(target=self._renew_on, name="leases", daemon=True).start()
        Watchdog(lambda: bool(self._work), self._least_progress, STUCK_SECONDS)

    def held(self) -> list[Held]:
        with self._changed:
            return [work for work in self._work if isinstance(work, Held)]

    def wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._work) < self._room)

    def wait_until_empty(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._work)

    def wait_until_alone(self, work: Work) -> None:
        """Returns when nothing but this is at work; until then it goes on as the others do."""
        with self._changed:
            while self._work != [work]:
                self._changed.wait(timeout=1.0)
                work.tick()

    def add(self, work: Work) -> None:
        with self._changed:
            if not self._work:
                self._busy_since = time.monotonic()
            self._work.append(work)

    def remove(self, work: Work) -> None:
        with self._changed:
            self._work.remove(work)
            self._updates += isinstance(work, Held) and work.committed
            if not self._work:
                self._busy_seconds += time.monotonic() - self._busy_since
            self._changed.notify_all()

    def load(self) -> dict[str, Any]:
        """What is computed, what is published, and since the start: commits, seconds in which there was any work."""
        held = self.held()
        computing = next((h.claim for h in held if not h.publishing), None)
        with self._changed:
            ahead = next((work.round_id for work in self._work if isinstance(work, Ahead)), None)
            updates = self._updates
            busy = self._busy_seconds + (time.monotonic() - self._busy_since if self._work else 0.0)
        return {
            "round": computing and computing.round_id,
            "job": computing and str(computing.job_id),
            "publishing": [{"round": h.claim.round_id, "job": str(h.claim.job_id)} for h in held if h.publishing],
            "streaming": ahead,
            "updates": updates,
            "busy_seconds": round(busy, 3),
        }

    def _least_progress(self) -> int:
        """Moves only when the one that is silent for longest does."""
        with self._changed:
            return min((work.progress_at for work in self._work), default=0)

    def _renew_on(self) -> None:
        while True:
            time.sleep(get_settings().lease_seconds / 3)
            self.renew()

    def renew(self) -> None:
        """Renews the lease of each round that made progress since the last time and is not past its deadline."""
        for held in self.held():
            progress = held.progress_at
            if progress == held.renewed_at or held.late:
                continue
            try:
                with transaction() as session:
                    buffer.renew(session, held.claim, get_settings().lease_seconds)
            except SQLAlchemyError as error:
                log.warning("renewal_failed", error=str(error).splitlines()[0])
                continue
            held.renewed_at = progress
