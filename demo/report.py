"""The report: what the database and the held-out prompts say of a run, for people and as JSON."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.cli.output import duration, out, plain, table
from app.manager.metrics import step_metrics
from app.models import Job, PhaseSpan, Round, Tenant
from app.models.job import JobState
from demo.figures import Stretch, length, overlap_share, plot

WANTED_RISE = 0.15

HeldOut = dict[str, Any]  # as `demo.held_out` gives it


@dataclass(frozen=True)
class JobReport:
    tenant: str
    job: str
    state: str
    error: str | None
    versions: int
    rewards: list[float]  # by round
    first_step_seconds: float | None  # from submission
    steps_per_hour: float
    before: HeldOut
    after: HeldOut | None
    adapter: Path | None  # where it was downloaded

    @property
    def rise(self) -> float | None:
        return None if self.after is None else self.after["pass_rate"] - self.before["pass_rate"]


@dataclass(frozen=True)
class Report:
    jobs: list[JobReport]
    seconds: float  # from the first admission to the end of the last job
    steps_per_hour: float
    overlap_share: float  # of training time, in which other jobs were generating
    rollout_busy_share: float
    training_busy_share: float

    def shortcomings(self, rise_wanted: bool) -> list[str]:
        """Why the demo did not succeed; empty when it did."""
        failed = [f"{j.job} is {j.state}: {j.error}" for j in self.jobs if j.state != JobState.SUCCEEDED]
        flat = [
            f"{j.job}: the pass rate rose by {j.rise:.3f}, less than {WANTED_RISE}"
            for j in self.jobs
            if rise_wanted and j.rise is not None and j.rise < WANTED_RISE
        ]
        return failed + flat

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = plain(self)
        for job, entry in zip(self.jobs, document["jobs"], strict=True):
            entry |= {"rise": job.rise, "adapter": str(job.adapter) if job.adapter else None}
        return document


def make_report(
    session: Session,
    job_ids: Sequence[uuid.UUID],
    before: Mapping[str, HeldOut],
    after: Mapping[str, HeldOut],
    folders: Mapping[str, Path],
) -> Report:
    """Reads the jobs, which are over, and the spans of time that the workers stored; the mappings are by job name."""
    rows = session.execute(
        select(Job, Tenant.name)
        .join(Tenant, Tenant.id == Job.tenant_id)
        .where(Job.id.in_(job_ids))
        .order_by(Job.created_at, Job.id)
    ).all()
    spans = _spans(session, job_ids)
    start, end = _window(session, job_ids)
    seconds = end - start

    def busy(phase: str) -> float:
        return length(s for stretches in spans[phase].values() for s in stretches) / seconds if seconds else 0.0

    return Report(
        jobs=[
            JobReport(
                tenant=tenant,
                job=job.name,
                state=job.state,
                error=f"{job.error_code}: {job.error_message}" if job.error_code else None,
                versions=job.version,
                rewards=[m.metrics.get("reward_mean", 0.0) for m in step_metrics(session, job)],
                first_step_seconds=_seconds(job.created_at, job.first_step_at),
                steps_per_hour=_per_hour(job.version, _seconds(job.started_at, job.finished_at)),
                before=before[job.name],
                after=after.get(job.name),
                adapter=folders.get(job.name),
            )
            for job, tenant in rows
        ],
        seconds=seconds,
        steps_per_hour=_per_hour(sum(job.version for job, _ in rows), seconds),
        overlap_share=overlap_share(spans["training"], spans["rollout"]),
        rollout_busy_share=busy("rollout"),
        training_busy_share=busy("training"),
    )


def show(report: Report) -> None:
    out.print(_pass_rates(report.jobs))
    out.print()
    out.print(_speeds(report.jobs))
    out.print(
        f"\nall jobs: {duration(report.seconds)} from the first admission to the end, "
        f"{report.steps_per_hour:.0f} steps an hour\n"
        f"training time in which other jobs were generating: {report.overlap_share:.0%}\n"
        f"busy: rollout worker {report.rollout_busy_share:.0%}, training worker {report.training_busy_share:.0%}\n"
    )
    for job in report.jobs:
        if job.adapter is not None:
            out.print(f"adapter of {job.job}: {job.adapter}", soft_wrap=True)


def _pass_rates(jobs: Sequence[JobReport]) -> Table:
    cells = {
        "TENANT": lambda j: j.tenant,
        "JOB": lambda j: j.job,
        "STATE": lambda j: j.state,
        "BEFORE": lambda j: f"{j.before['pass_rate']:.3f}",
        "AFTER": lambda j: j.after and f"{j.after['pass_rate']:.3f}",
        "RISE": lambda j: None if j.rise is None else f"{j.rise:+.3f}",
        "SAME ANSWER": lambda j: j.after and f"{j.after['most_frequent_share']:.0%}",
    }
    prompts = jobs[0].before["prompts"]
    return table(jobs, cells, title=f"Pass rate on {prompts} held-out prompts, by transformers and PEFT")


def _speeds(jobs: Sequence[JobReport]) -> Table:
    cells = {
        "JOB": lambda j: j.job,
        "REWARD BY ROUND": lambda j: plot(j.rewards),
        "FIRST": lambda j: f"{j.rewards[0]:.2f}" if j.rewards else None,
        "LAST": lambda j: f"{j.rewards[-1]:.2f}" if j.rewards else None,
        "FIRST STEP AFTER": lambda j: duration(j.first_step_seconds),
        "STEPS/HOUR": lambda j: f"{j.steps_per_hour:.0f}",
    }
    return table(jobs, cells)


def _spans(session: Session, job_ids: Sequence[uuid.UUID]) -> dict[str, dict[str, list[Stretch]]]:
    """Stretches by phase and job."""
    rows = session.execute(
        select(PhaseSpan.phase, Round.job_id, PhaseSpan.started_at, PhaseSpan.ended_at)
        .join(Round, Round.id == PhaseSpan.round_id)
        .where(Round.job_id.in_(job_ids))
    )
    spans: dict[str, dict[str, list[Stretch]]] = defaultdict(lambda: defaultdict(list))
    for phase, job_id, started, ended in rows:
        spans[phase][str(job_id)].append((started.timestamp(), ended.timestamp()))
    return spans


def _window(session: Session, job_ids: Sequence[uuid.UUID]) -> Stretch:
    first = session.scalar(select(func.min(Round.admitted_at)).where(Round.job_id.in_(job_ids)))
    last = session.scalar(select(func.max(Job.finished_at)).where(Job.id.in_(job_ids)))
    return (first.timestamp(), last.timestamp()) if first and last else (0.0, 0.0)


def _seconds(start: datetime | None, end: datetime | None) -> float | None:
    return (end - start).total_seconds() if start and end else None


def _per_hour(steps: int, seconds: float | None) -> float:
    return 3600 * steps / seconds if seconds else 0.0
