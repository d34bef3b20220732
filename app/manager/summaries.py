"""What a round that never trains says of itself: reckoned once, as it closes, and kept with it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Integer, cast, func, select, text
from sqlalchemy.orm import Session

from app.manager.workers import live_workers
from app.models import Episode, Job, Round, Tenant
from app.models.round import EpisodeState, RoundKind
from app.models.worker import WorkerKind

# The speed of training is the median over this many of the base model's last updates.
PACE_UPDATES = 50


def summarise(session: Session, job: Job, round_: Round) -> dict[str, Any]:
    """Pass rate, mean reward and their like over the finished episodes of a round; of a preflight far more."""
    row = session.execute(
        select(
            func.count(),
            func.coalesce(func.avg(cast(Episode.passed, Integer)), 0),
            func.coalesce(func.avg(Episode.reward), 0),
            func.coalesce(func.avg(cast(Episode.truncated, Integer)), 0),
        ).where(Episode.round_id == round_.id, Episode.state == EpisodeState.FINISHED)
    ).one()
    summary: dict[str, Any] = {
        "episodes": int(row[0]),
        "pass_rate": float(row[1]),
        "reward_mean": float(row[2]),
        "truncated_share": float(row[3]),
    }
    if round_.kind == RoundKind.PREFLIGHT:
        summary |= _rewards(session, round_) | _tokens(session, round_) | _errors(session, round_)
        summary |= _pace(session, job)
    return summary


def _rewards(session: Session, round_: Round) -> dict[str, Any]:
    """Spread of the rewards, and the share of groups from which GRPO would learn nothing."""
    row = session.execute(
        text(
            "SELECT (SELECT coalesce(stddev_samp(reward), 0) FROM episodes"
            "  WHERE round_id = :round AND state = 'finished') AS spread,"
            " count(*) AS groups, count(*) FILTER (WHERE different < 2) AS flat FROM ("
            "  SELECT count(DISTINCT e.reward) FILTER (WHERE e.state = 'finished') AS different"
            "  FROM episodes e WHERE e.round_id = :round GROUP BY e.group_id) g"
        ),
        {"round": round_.id},
    ).one()
    return {"reward_std": float(row.spread), "groups": row.groups, "zero_variance_share": row.flat / row.groups}


# A turn of the policy reads all ids before it.
_TOKENS = r"""
WITH said AS (
    SELECT t.episode_id, t.index, t.kind, t.seconds, octet_length(t.context_ids) / 4 AS context,
        octet_length(t.sampled_ids) / 4 AS sampled, (t.messages #>> '{0,content}') !~ '\S' AS silent,
        sum((octet_length(t.context_ids) + octet_length(t.sampled_ids)) / 4)
            OVER (PARTITION BY t.episode_id ORDER BY t.index) AS so_far
    FROM turns t WHERE t.round_id = :round
), each AS (
    SELECT e.id,
        coalesce(sum(s.context) FILTER (WHERE s.index = 0), 0) AS prompt,
        coalesce(sum(s.sampled), 0) AS generated,
        coalesce(max(s.so_far), 0) AS length,
        coalesce(sum(s.so_far - s.sampled) FILTER (WHERE s.kind = 'policy'), 0) AS read,
        coalesce(sum(s.seconds) FILTER (WHERE s.kind = 'policy'), 0) AS seconds,
        coalesce(bool_and(s.silent) FILTER (WHERE s.kind = 'policy'), true) AS empty
    FROM episodes e LEFT JOIN said s ON s.episode_id = e.id
    WHERE e.round_id = :round AND e.state = 'finished' GROUP BY e.id
)
SELECT coalesce(avg(prompt), 0) AS prompt, coalesce(avg(generated), 0) AS generated, coalesce(avg(length), 0) AS length,
    coalesce(avg(read), 0) AS read, coalesce(avg(empty::int), 0) AS empty, coalesce(sum(generated), 0) AS tokens,
    coalesce(avg(seconds), 0) AS engine_seconds, coalesce(max(seconds), 0) AS longest_seconds,
    (SELECT extract(epoch FROM r.ready_at - coalesce(r.admitted_at, r.ready_at)) FROM rounds r WHERE r.id = :round)
        AS elapsed
FROM each
"""


def _tokens(session: Session, round_: Round) -> dict[str, Any]:
    """Means an episode in tokens, and seconds: in which an episode held an engine slot (`engine_seconds` the mean,
    `longest_seconds` the most), and from the round's first admission to its end (`elapsed_seconds`)."""
    session.flush()  # its end is in the statement
    row = session.execute(text(_TOKENS), {"round": round_.id}).one()
    return {
        "prompt_tokens": float(row.prompt),
        "generated_tokens": float(row.generated),
        "episode_tokens": float(row.length),
        "read_tokens": float(row.read),
        "empty_share": float(row.empty),
        "engine_seconds": float(row.engine_seconds),
        "longest_seconds": float(row.longest_seconds),
        "elapsed_seconds": float(row.elapsed),
        "tokens_per_second": float(row.tokens / row.elapsed) if row.elapsed else None,
    }


def _errors(session: Session, round_: Round) -> dict[str, Any]:
    """How often each flag was put on a finished episode, and why others were dropped."""
    flags = session.execute(
        text(
            "SELECT flag, count(*) FROM episodes e,"
            " jsonb_array_elements_text(CASE jsonb_typeof(e.flags) WHEN 'array' THEN e.flags END) AS flag"
            " WHERE e.round_id = :round AND e.state = 'finished' GROUP BY flag ORDER BY flag"
        ),
        {"round": round_.id},
    ).all()
    dropped = session.execute(
        select(Episode.error_code, func.count())
        .where(Episode.round_id == round_.id, Episode.state == EpisodeState.FAILED)
        .group_by(Episode.error_code)
        .order_by(Episode.error_code)
    ).all()
    return {"flags": {row[0]: row[1] for row in flags}, "dropped": {row[0]: row[1] for row in dropped}}


# An update's own seconds grow with its tokens; loading, upload and commit around it do not.
_UPDATES = """
SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds / tokens) AS seconds_per_token,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY greatest(0, whole - seconds)) AS around
FROM (
    SELECT (m.metrics ->> 'seconds')::float8 AS seconds, (m.metrics ->> 'total_tokens')::float8 AS tokens,
        extract(epoch FROM r.finished_at - r.training_at)::float8 AS whole
    FROM rounds r JOIN jobs j ON j.id = r.job_id
    JOIN policy_versions v ON v.round_id = r.id AND v.signal
    JOIN step_metrics m ON m.job_id = v.job_id AND m.version = v.version
    WHERE r.kind = 'train' AND r.state = 'committed' AND j.base_model = :model
    ORDER BY r.finished_at DESC LIMIT :updates
) latest WHERE tokens > 0
"""


def _pace(session: Session, job: Job) -> dict[str, Any]:
    """What a prediction needs to know of the service now: engine slots that the job may use, seconds of training a
    token and seconds around an update (None where no update on this base model is known)."""
    engines = [
        w for w in live_workers(session, WorkerKind.ROLLOUT) if w.base_model == job.base_model and not w.draining
    ]
    quota = session.get_one(Tenant, job.tenant_id).max_inflight_episodes
    updates = session.execute(text(_UPDATES), {"model": job.base_model, "updates": PACE_UPDATES}).one()
    return {
        "slots": min(quota, sum(w.slots for w in engines)),
        "training_seconds_per_token": _maybe(updates.seconds_per_token),
        "commit_seconds": _maybe(updates.around),
    }


def _maybe(number: Any) -> float | None:
    return None if number is None else float(number)
