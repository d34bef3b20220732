"""Stretches of time in which this worker served a round, merged, for the phase timeline and the busy shares."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from app.models import PhaseSpan, Round

# Stretches of one round that lie closer than this are one.
MERGE_SECONDS = 0.25


@dataclass
class Span:
    tenant_id: uuid.UUID
    round_id: int
    phase: str
    start: float
    end: float


class SpanRecorder:
    """Thread-safe; keeps at most what happened since the last heartbeat."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    def add(self, tenant_id: uuid.UUID, round_id: int, phase: str, start: float, end: float) -> None:
        """Times are of the wall clock, seconds since the epoch."""
        with self._lock:
            for span in self._spans:
                near = start <= span.end + MERGE_SECONDS and end >= span.start - MERGE_SECONDS
                if span.round_id == round_id and span.phase == phase and near:
                    span.start, span.end = min(span.start, start), max(span.end, end)
                    return
            self._spans.append(Span(tenant_id, round_id, phase, start, end))

    def flush(self, session: Session, worker: str) -> None:
        """Stores the spans in the caller's transaction. One that fails loses them, which only a picture misses."""
        with self._lock:
            spans, self._spans = self._spans, []
        if not spans:
            return
        known = set(session.scalars(select(Round.id).where(Round.id.in_({s.round_id for s in spans}))))
        rows = [
            {
                "tenant_id": s.tenant_id,
                "round_id": s.round_id,
                "phase": s.phase,
                "worker": worker,
                "started_at": datetime.fromtimestamp(s.start, UTC),
                "ended_at": datetime.fromtimestamp(max(s.end, s.start), UTC),
            }
            for s in spans
            if s.round_id in known
        ]
        if rows:
            session.execute(insert(PhaseSpan), rows)
