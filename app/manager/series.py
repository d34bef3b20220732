"""Curves of jobs by policy version: what charts, the comparison and the CSV export draw from."""

from __future__ import annotations

import csv
import io
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from app.manager.health import EvalPoint
from app.models import Job, Tenant
from app.models.job import TERMINAL

MOST_POINTS = 1500  # a job; longer curves are thinned evenly
MOST_JOBS = 12


@dataclass(frozen=True)
class Metric:
    name: str
    label: str
    help: str


METRICS = (
    Metric("reward_mean", "Reward", "mean over the round's episodes, with the spread of one standard deviation"),
    Metric("loss", "Loss", "token-level GRPO loss, mean over all loss tokens"),
    Metric("grad_norm", "Gradient norm", "before clipping"),
    Metric("entropy", "Entropy", "of the policy's next-token distribution, nats"),
    Metric("kl", "KL to the base model", "mean over loss tokens; only with a kl_coefficient above 0"),
    Metric("clip_fraction", "Clipped share", "of tokens whose ratio left the trust region"),
    Metric("response_length", "Response length", "sampled tokens an episode"),
    Metric("logprob_gap", "Engine/trainer logprob gap", "mean |difference| on the sampled tokens"),
    Metric("zero_variance_share", "Groups without variance", "share of prompts whose answers all had one reward"),
    Metric("truncated_share", "Truncated share", "of answers that reached max_tokens"),
    Metric("tokens_per_second", "Tokens/s", "sampled tokens over the time of the round's rollout"),
    Metric("seconds", "Update time", "seconds that the trainer took"),
)
MEASURED = tuple(m.name for m in METRICS) + ("reward_std",)


@dataclass
class Series:
    """One job's curves; the lists of `metrics` run along `versions`, None where an update has no such figure."""

    job_id: uuid.UUID
    name: str
    tenant: str
    over: bool
    version: int
    versions: list[int] = field(default_factory=list)
    metrics: dict[str, list[float | None]] = field(default_factory=lambda: {name: [] for name in MEASURED})
    evals: list[EvalPoint] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return {
            "id": str(self.job_id),
            "name": self.name,
            "tenant": self.tenant,
            "over": self.over,
            "version": self.version,
            "versions": self.versions,
            "metrics": self.metrics,
            "evals": {
                "versions": [p.version for p in self.evals],
                "reward_mean": [p.reward_mean for p in self.evals],
                "pass_rate": [p.pass_rate for p in self.evals],
            },
        }


def series(session: Session, job_ids: Sequence[uuid.UUID], after: int = 0) -> list[Series]:
    """The curves of these jobs past the version `after`, in the order asked for; unknown jobs are left out.

    Evaluations are those that ended since that version was made: one may end after many a later version. So whoever
    asks again and again with the last version that it knows misses none.
    """
    rows = session.execute(
        select(Job.id, Job.name, Tenant.name.label("tenant"), Job.state, Job.version)
        .join(Tenant, Tenant.id == Job.tenant_id)
        .where(Job.id.in_(job_ids))
    ).all()
    found = {r.id: Series(r.id, r.name, r.tenant, r.state in TERMINAL, r.version) for r in rows}
    for one in found.values():
        _add_updates(session, one, after)
        _add_evals(session, one, after)
    return [found[job_id] for job_id in dict.fromkeys(job_ids) if job_id in found]


def _add_updates(session: Session, one: Series, after: int) -> None:
    every = max(1, -(-(one.version - after) // MOST_POINTS))
    rows = session.execute(
        text(
            "SELECT m.version, m.metrics, CAST(m.metrics ->> 'loss_tokens' AS float8)"
            " / nullif(CAST(extract(epoch FROM r.ready_at - r.admitted_at) AS float8), 0) AS speed"
            " FROM step_metrics m JOIN policy_versions v USING (job_id, version) JOIN rounds r ON r.id = v.round_id"
            " WHERE m.job_id = :job AND m.version > :after AND (m.version % :every = 0 OR m.version = :last)"
            " ORDER BY m.version"
        ),
        {"job": one.job_id, "after": after, "every": every, "last": one.version},
    )
    for version, metrics, speed in rows:
        one.versions.append(version)
        for name, values in one.metrics.items():
            values.append(metrics.get(name) if name != "tokens_per_second" else speed)


# A minute more, as an end is seen only once its transaction has committed. The newest one is among those told.
_EVALS = """
WITH told AS (
    SELECT policy_version AS version, CAST(summary ->> 'pass_rate' AS float8) AS pass_rate,
        CAST(summary ->> 'reward_mean' AS float8) AS reward_mean,
        row_number() OVER (ORDER BY policy_version DESC, id DESC) - 1 AS place, count(*) OVER () AS total
    FROM rounds
    WHERE job_id = :job AND kind = 'eval' AND state = 'committed' AND (:after = 0 OR finished_at > (
        SELECT created_at - interval '1 minute' FROM policy_versions WHERE job_id = :job AND version = :after))
)
SELECT version, pass_rate, reward_mean FROM told
WHERE place % greatest(1, CAST(ceil(total / CAST(:most AS float8)) AS bigint)) = 0 ORDER BY place DESC
"""


def _add_evals(session: Session, one: Series, after: int) -> None:
    rows = session.execute(text(_EVALS), {"job": one.job_id, "after": after, "most": MOST_POINTS})
    one.evals.extend(EvalPoint(*row) for row in rows)


def csv_lines(found: Iterable[Series]) -> Iterator[str]:
    """A header, then a line a job and version; evaluations stand at the version that they pin."""
    yield _line(["job_id", "job", "tenant", "version", *MEASURED, "eval_pass_rate", "eval_reward_mean"])
    for one in found:
        evals = {p.version: p for p in one.evals}
        at = {version: i for i, version in enumerate(one.versions)}
        for version in sorted(at.keys() | evals.keys()):
            values = [one.metrics[name][at[version]] if version in at else None for name in MEASURED]
            point = evals.get(version)
            told = [point.pass_rate, point.reward_mean] if point else [None, None]
            yield _line([str(one.job_id), _plain(one.name), _plain(one.tenant), version, *values, *told])


def _line(values: Sequence[Any]) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(values)
    return out.getvalue()


def _plain(name: str) -> str:
    """A name that a spreadsheet takes for a formula is quoted as text."""
    return f"'{name}" if name[:1] in ("=", "+", "-", "@", "\t", "\r") else name
