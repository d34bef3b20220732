"""The phase timeline: what each job did over the last minutes, from the spans of the workers and the live rounds."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from app.models import Job, Tenant

MOST_LANES = 60
MERGE_SECONDS = 0.3  # stretches of a round and phase that lie closer are one
PIXELS = 800  # no picture shows more: over a long time, wider gaps are closed
LONGEST_SPAN_SECONDS = 900.0  # of rollout or environment; an update's time is on its round


class LanePhase(StrEnum):
    ROLLOUT = "rollout"
    ENVIRONMENT = "environment"
    TRAINING = "training"
    WAITING = "waiting"  # a live round on which nobody worked


@dataclass(frozen=True)
class Stretch:
    phase: LanePhase
    version: int  # of the policy that acted, or was trained on
    kind: str  # of the round: train | eval | preflight
    start: float  # seconds from the start of the timeline
    end: float


@dataclass
class Lane:
    job_id: uuid.UUID
    name: str
    tenant: str
    state: str
    kind: str  # of the job: train | preflight
    stretches: list[Stretch] = field(default_factory=list)


@dataclass(frozen=True)
class Timeline:
    start: datetime
    end: datetime
    lanes: list[Lane]

    @property
    def seconds(self) -> float:
        return (self.end - self.start).total_seconds()

    def document(self) -> dict[str, Any]:
        """Stretches as [phase, version, kind, start, end], times in seconds from the start to a hundredth."""
        return {
            "start": self.start.timestamp(),
            "end": self.end.timestamp(),
            "lanes": [
                {
                    "id": str(lane.job_id),
                    "name": lane.name,
                    "tenant": lane.tenant,
                    "state": lane.state,
                    "kind": lane.kind,
                    "spans": [
                        [s.phase.value, s.version, s.kind, round(s.start, 2), round(s.end, 2)] for s in lane.stretches
                    ],
                }
                for lane in self.lanes
            ],
        }


# Spans are written when a generation or call is over; what is under way is read from the leases, since its doorbell.
_SPANS = """
WITH ids AS (
    SELECT id FROM rounds WHERE state IN ('rolling_out', 'ready', 'training') AND created_at < :end
    UNION SELECT id FROM rounds WHERE kind = 'train' AND state = 'committed' AND finished_at > :start
    UNION SELECT id FROM rounds WHERE job_id = ANY(CAST(:jobs AS uuid[])) AND created_at < :end AND finished_at > :start
    UNION SELECT round_id FROM phase_spans
        WHERE CAST(:jobs AS uuid[]) IS NULL AND started_at > :floor AND started_at < :end AND ended_at > :start
), shown AS (
    SELECT r.id, r.job_id, r.kind, r.policy_version, r.state,
        r.created_at AS opened_at, r.training_at, coalesce(r.finished_at, :end) AS closed_at
    FROM rounds r JOIN ids USING (id)
    WHERE (CAST(:jobs AS uuid[]) IS NULL OR r.job_id = ANY(CAST(:jobs AS uuid[])))
        AND r.created_at < :end AND coalesce(r.finished_at, :end) > :start
), spans AS (
    SELECT s.round_id, s.phase, s.started_at, s.ended_at FROM phase_spans s JOIN shown ON shown.id = s.round_id
    WHERE s.phase <> 'training' AND s.started_at > :floor AND s.started_at < :end AND s.ended_at > :start
    UNION ALL
    SELECT e.round_id, CASE e.state WHEN 'generating' THEN 'rollout' ELSE 'environment' END,
        least(min(e.doorbell_at), :end), :end
    FROM episodes e JOIN shown ON shown.id = e.round_id
    WHERE e.state IN ('resetting', 'generating', 'acting') AND e.lease_until IS NOT NULL
        AND shown.state = 'rolling_out'
    GROUP BY 1, 2
), merged AS (
    SELECT round_id, phase, unnest(range_agg(tstzrange(started_at, ended_at + :gap, '[]'))) AS at
    FROM spans GROUP BY round_id, phase
)
SELECT job_id, kind, policy_version, phase, lower(at) AS began, upper(at) - :gap AS ended
FROM merged JOIN shown ON shown.id = merged.round_id
UNION ALL SELECT job_id, kind, policy_version, 'training', training_at, closed_at
FROM shown WHERE training_at IS NOT NULL AND state IN ('training', 'committed')
UNION ALL SELECT job_id, kind, policy_version, 'live', opened_at, closed_at FROM shown
ORDER BY 1, 5, 6
"""


def timeline(
    session: Session,
    minutes: float,
    job_ids: Sequence[uuid.UUID] | None = None,
    until: datetime | None = None,
) -> Timeline:
    """The lanes of these jobs, or of all that were at work, over the `minutes` before `until` (default: now).

    Rollout and environment of one job may overlap: some episodes generate while others are with a tool. Waiting is the
    time of a live round in which nobody worked on it. Jobs come in order of creation, the newest MOST_LANES of them.
    """
    end = until or session.execute(text("SELECT clock_timestamp()")).scalar_one()
    start = end - timedelta(minutes=minutes)
    gap = timedelta(seconds=max(MERGE_SECONDS, minutes * 60 / PIXELS))
    rows = session.execute(
        text(_SPANS),
        {
            "jobs": None if job_ids is None else [str(i) for i in job_ids],
            "start": start,
            "end": end,
            "floor": start - timedelta(seconds=LONGEST_SPAN_SECONDS),
            "gap": gap,
        },
    )
    worked: dict[uuid.UUID, list[Stretch]] = defaultdict(list)
    live: dict[uuid.UUID, list[Stretch]] = defaultdict(list)
    for row in rows:
        began, ended = ((max(start, min(end, t)) - start).total_seconds() for t in (row.began, row.ended))
        if row.phase == "live":
            live[row.job_id].append(Stretch(LanePhase.WAITING, row.policy_version, row.kind, began, ended))
        elif ended > began:
            worked[row.job_id].append(Stretch(LanePhase(row.phase), row.policy_version, row.kind, began, ended))
    lanes = _lanes(session, worked.keys() | live.keys() if job_ids is None else set(job_ids))
    for lane in lanes:
        done = worked[lane.job_id]
        idle = waiting(live[lane.job_id], done, gap.total_seconds())
        lane.stretches = sorted([*done, *idle], key=lambda s: (s.start, s.end))
    return Timeline(start, end, lanes)


def waiting(live: Sequence[Stretch], worked: Sequence[Stretch], shortest: float) -> list[Stretch]:
    """The parts of live rounds, longer than `shortest` seconds, in which no stage worked on any round of the job."""
    busy = sorted((s.start, s.end) for s in worked)
    found = []
    covered = 0.0  # told already by an earlier round
    for round_ in sorted(live, key=lambda s: (s.start, s.end)):
        here = max(round_.start, covered)
        for start, end in [*busy, (round_.end, round_.end)]:
            until = min(start, round_.end)
            if until - here > shortest:
                found.append(Stretch(LanePhase.WAITING, round_.version, round_.kind, here, until))
            here = max(here, end)
        covered = max(covered, round_.end)
    return found


def _lanes(session: Session, job_ids: set[uuid.UUID]) -> list[Lane]:
    rows = session.execute(
        select(Job.id, Job.name, Tenant.name, Job.state, Job.kind)
        .join(Tenant, Tenant.id == Job.tenant_id)
        .where(Job.id.in_(job_ids))
        .order_by(Job.created_at.desc(), Job.id)
        .limit(MOST_LANES)
    ).all()
    return [Lane(*row) for row in reversed(rows)]
