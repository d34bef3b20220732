"""A job's health in words: what its last updates, evaluations and episodes say, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, linear_regression, median
from typing import Literal

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from app.manager import workers
from app.manager.progress import JobProgress, Phase
from app.models import Job, Round, StepMetrics, Tenant
from app.models.job import JobKind, JobState, Wanted
from app.models.round import RoundKind, RoundState
from app.models.worker import WorkerKind

RECENT = 5  # what is said of "the last updates" speaks of so many
WINDOW = 40  # a trend is judged over so many
EARLY = 4  # fewer updates than this say nothing about a trend
FLAG_ROUNDS = 2  # flags are counted over the episodes of so many rounds

GAP_WARN = 0.1  # mean |logprob gap|; bfloat16's own noise is 0.03 to 0.04
ZERO_VARIANCE_WARN = 0.8
SOLVED_REWARD = 0.95
TRUNCATED_WARN = 0.3
TOOL_WARN = 0.3
COLLAPSE_SHARE = 0.5  # of the best reward that is left
COLLAPSE_NOISE = 3.0  # a fall is more than so many usual steps between updates
TREND_T = 2.0  # slope over its standard error

TOOL_FLAGS = {
    "malformed_call": "calls that are not valid",
    "tool_error": "calls that the tool refused",
    "no_call": "answers without the call that was asked for",
    "no_answer": "episodes that ran out of turns before an answer",
    "environment_timeout": "calls that ran past their deadline",
    "grader_error": "answers on which the grader failed",
    "unscorable": "answers that the scorer cannot read",
}


class Verdict(StrEnum):
    LEARNING = "learning"
    STEADY = "steady"  # trains, without a clear trend
    EARLY = "early"  # too few updates to tell
    SOLVED = "solved"
    NO_SIGNAL = "no_signal"
    COLLAPSED = "collapsed"
    TRUNCATED = "truncated"
    TOOL_ERRORS = "tool_errors"
    LOGPROB_GAP = "logprob_gap"
    WAITING = "waiting"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


Tone = Literal["good", "info", "warn", "bad"]


@dataclass(frozen=True)
class Health:
    verdict: Verdict
    tone: Tone
    title: str
    reason: str  # with the numbers
    advice: str = ""  # what to do; empty where nothing is


@dataclass(frozen=True)
class EvalPoint:
    version: int
    pass_rate: float
    reward_mean: float


@dataclass(frozen=True)
class Facts:
    """All that a verdict rests on. `steps` are the metrics of the last updates, oldest first."""

    state: str
    wanted: str = Wanted.RUN
    phase: str = Phase.ROLLOUT
    version: int = 0
    n_steps: int = 1
    steps: Sequence[Mapping[str, float]] = ()
    first_reward: float | None = None  # of the first update
    evals: Sequence[EvalPoint] = ()
    flags: Mapping[str, float] = field(default_factory=dict)  # share of the last rounds' episodes with this flag
    error_code: str | None = None
    error_message: str | None = None
    workers: frozenset[str] = frozenset(WorkerKind)  # kinds that are alive for this job
    queue_place: int | None = None
    running_jobs: int = 0
    max_running_jobs: int = 1
    suspended: bool = False


def diagnose(facts: Facts) -> Health:
    """The verdict: an end first, then what keeps the job from running, then what its updates say."""
    return _ended(facts) or _held_up(facts) or _trained(facts) or _waits(facts)


def health(session: Session, job: Job, progress: JobProgress) -> Health:
    """The verdict on a job as it stands."""
    return diagnose(gather(session, job, progress))


def gather(session: Session, job: Job, progress: JobProgress) -> Facts:
    """A few small reads, each by an index."""
    tenant = session.get_one(Tenant, job.tenant_id)
    newest = session.scalars(
        select(StepMetrics.metrics)
        .where(StepMetrics.job_id == job.id)
        .order_by(StepMetrics.version.desc())
        .limit(WINDOW)
    ).all()
    alive = {
        worker.kind
        for worker in workers.live_workers(session)
        if worker.base_model in (None, job.base_model) and not worker.draining
    }
    running = select(func.count()).where(
        Job.tenant_id == job.tenant_id, Job.state == JobState.RUNNING, Job.kind == JobKind.TRAIN
    )
    return Facts(
        state=job.state,
        wanted=job.wanted,
        phase=progress.phase,
        version=job.version,
        n_steps=progress.n_steps,
        steps=newest[::-1],
        first_reward=session.scalars(
            select(StepMetrics.metrics["reward_mean"].as_float()).where(
                StepMetrics.job_id == job.id, StepMetrics.version == 1
            )
        ).first(),
        evals=eval_points(session, job),
        flags=_flag_shares(session, job),
        error_code=job.error_code,
        error_message=job.error_message,
        workers=frozenset(alive),
        queue_place=progress.queue_place,
        running_jobs=(session.scalar(running) or 0) if job.state == JobState.QUEUED else 0,
        max_running_jobs=tenant.max_running_jobs,
        suspended=tenant.suspended,
    )


def eval_points(session: Session, job: Job, limit: int = 1000) -> list[EvalPoint]:
    """What the finished evaluations said, the last `limit` of them, in order of version."""
    rows = session.execute(
        select(Round.policy_version, Round.summary)
        .where(Round.job_id == job.id, Round.kind == RoundKind.EVAL, Round.state == RoundState.COMMITTED)
        .order_by(Round.id.desc())
        .limit(limit)
    ).all()
    return sorted(
        (EvalPoint(version, s["pass_rate"], s["reward_mean"]) for version, s in rows if s), key=lambda p: p.version
    )


def _flag_shares(session: Session, job: Job) -> dict[str, float]:
    """Over the finished training episodes of the last rounds; an episode counts once a flag."""
    rows = session.execute(
        text(
            "WITH last AS (SELECT id FROM rounds WHERE job_id = :job AND kind = 'train' AND policy_version >= :since"
            "  ORDER BY id DESC LIMIT :rounds),"
            " done AS (SELECT e.id, e.flags FROM episodes e JOIN last ON last.id = e.round_id"
            "  WHERE e.state = 'finished')"
            " SELECT flag, count(DISTINCT id)::float8 / (SELECT count(*) FROM done) AS share FROM done,"
            " jsonb_array_elements_text(CASE jsonb_typeof(flags) WHEN 'array' THEN flags ELSE '[]' END) AS flag"
            " GROUP BY flag"
        ),
        {"job": job.id, "since": job.version - FLAG_ROUNDS, "rounds": FLAG_ROUNDS},
    )
    return {row.flag: row.share for row in rows}


# --- the end, and what holds a job up


FAILED_ADVICE = {
    "no_signal": "Choose easier or more varied prompts, raise group_size or temperature, or check the grader; then"
    " clone the job.",
    "environment_error": "The environment or grader raised on the job's own data. Try the grader on that item, mend"
    " it, then clone the job.",
    "environment_timeout": "Make the environment quicker or raise environment.call_timeout_seconds, then clone the"
    " job.",
    "non_finite": "Lower hyperparameters.learning_rate or max_grad_norm, or check the grader's rewards, then clone the"
    " job.",
    "prompt_too_long": "Shorten the prompts or lower sampling.max_tokens or environment.max_turns, then clone the job.",
    "object_missing": "A file that the job needs is gone from storage. Upload it again and clone the job.",
    "adapter_invalid": "The adapter does not load. Clone the job; if it comes again, tell the operator.",
    "worker_lost": "The work ended its worker's process each time: it may need more memory than there is. Lower"
    " sampling.max_tokens or the round's size, then clone the job.",
    "not_started": "No worker took the job. See Workers for what is alive, then clone the job.",
    "infrastructure": "Something of the service failed again and again. See Workers and the events, then clone the"
    " job.",
}


def _ended(f: Facts) -> Health | None:
    if f.state == JobState.FAILED:
        advice = FAILED_ADVICE.get(f.error_code or "", "Mend what the message names, then clone the job.")
        return Health(Verdict.FAILED, "bad", f"Failed: {f.error_code}", f.error_message or "", advice)
    if f.state == JobState.CANCELLED:
        reason = f"Cancelled at version {f.version} of {f.n_steps}; the versions that were committed stay."
        return Health(Verdict.CANCELLED, "info", "Cancelled", reason)
    if f.state == JobState.SUCCEEDED:
        told = _trained(f)
        good = told is None or told.tone in ("good", "info")
        reason = f"All {f.n_steps} updates are committed. {_course(f)}"
        if good or told is None:
            return Health(Verdict.SUCCEEDED, "good", "Finished", reason)
        return Health(Verdict.SUCCEEDED, "warn", f"Finished, but: {told.title.lower()}", told.reason, told.advice)
    if f.state == JobState.PAUSED:
        reason = f"Paused at version {f.version} of {f.n_steps}."
        return Health(Verdict.PAUSED, "info", "Paused", reason, "Resume goes on from there.")
    if f.wanted == Wanted.PAUSE:
        reason = "What has started still finishes; an update under way still commits."
        return Health(Verdict.PAUSED, "info", "Pausing", reason)
    return None


NEEDED = {
    Phase.VALIDATING: (WorkerKind.TOOLS,),
    Phase.STARTING: (WorkerKind.TRAINING,),
    Phase.BUFFERED: (WorkerKind.TRAINING,),
    Phase.TRAINING: (WorkerKind.TRAINING,),
}


def _held_up(f: Facts) -> Health | None:
    """What an operator has to lift: a suspended tenant, a stage without a worker."""
    if f.suspended:
        return Health(
            Verdict.WAITING, "warn", "Waiting: its tenant is suspended", "Nothing of a suspended tenant is admitted.",
            "Lift the suspension on the tenant's page.",
        )  # fmt: skip
    if f.phase == Phase.QUEUED:
        return None
    missing = [
        kind for kind in NEEDED.get(Phase(f.phase), (WorkerKind.ROLLOUT, WorkerKind.TOOLS)) if kind not in f.workers
    ]
    if not missing:
        return None
    kinds = " and ".join(missing)
    return Health(
        Verdict.WAITING, "bad", f"Waiting: no {kinds} worker is alive",
        f"The job is {f.phase}; no worker that serves its base model takes that stage.",
        f"Start a {kinds} worker, or end the draining of one. Nothing is lost meanwhile.",
    )  # fmt: skip


def _waits(f: Facts) -> Health:
    """Before the first update: what it waits for."""
    place = f" It is number {f.queue_place} in line." if f.queue_place else ""
    if f.phase == Phase.VALIDATING:
        return Health(Verdict.WAITING, "info", "Checking files and prompts", "A tools worker tries the environment.")
    if f.phase == Phase.QUEUED:
        full = f"Its tenant runs {f.running_jobs} of at most {f.max_running_jobs} jobs."
        advice = "Raise the tenant's max_running_jobs, or wait for a job to end."
        if f.running_jobs < f.max_running_jobs:
            full, advice = "It starts at the next admission.", ""
        return Health(Verdict.WAITING, "info", "Waiting in its tenant's queue", full + place, advice)
    if f.phase == Phase.STARTING:
        reason = "A training worker makes version 0, the fresh adapter."
        return Health(Verdict.WAITING, "info", "Waiting for its first adapter", reason)
    if f.phase == Phase.WAITING:
        reason = "Other jobs have the engine's slots or its places for adapters; they are shared fairly."
        return Health(Verdict.WAITING, "info", "Waiting for engine slots", reason)
    if f.phase == Phase.BUFFERED:
        reason = f"The round's trajectories are complete; the trainer is with another job.{place}"
        return Health(Verdict.WAITING, "info", "Waiting for training", reason)
    reason = f"The first update is being made; a trend shows after {EARLY}."
    return Health(Verdict.EARLY, "info", "Just started", reason)


# --- what the updates say


def _trained(f: Facts) -> Health | None:
    """None before the first update."""
    if not f.steps:
        return None
    found = _gap(f) or _collapsed(f)
    if found is None and _rising(f):
        return Health(Verdict.LEARNING, "good", "Learning", _course(f), _remark(f))
    return found or _silent(f) or _truncated(f) or _tool_errors(f) or _unclear(f)


def _gap(f: Facts) -> Health | None:
    gap = _recent(f, "logprob_gap")
    if gap is None or gap < GAP_WARN:
        return None
    return Health(
        Verdict.LOGPROB_GAP, "bad", "Engine and trainer disagree",
        f"Their logprobs of the same tokens lie {gap:.3f} apart on average over the last updates; rounding alone makes"
        " 0.03 to 0.04.",
        "Check that engine and trainer serve the same base model in the same dtype. Until then keep tis_cap at 2 or"
        " below; do not trust the curve.",
    )  # fmt: skip


def _collapsed(f: Facts) -> Health | None:
    """The mean of three updates fell under half of its best, by more than the reward's usual steps."""
    rewards = _values(f, "reward_mean")
    if len(rewards) < 6:
        return None
    means = [fmean(rewards[i : i + 3]) for i in range(len(rewards) - 2)]
    best, last = max(means), means[-1]
    noise = median(abs(b - a) for a, b in pairwise(rewards))
    if best <= 0 or last > best * COLLAPSE_SHARE or best - last <= COLLAPSE_NOISE * noise:
        return None
    at = f.version - len(rewards) + 1 + means.index(best) + 1
    reason = f"The reward was {best:.3f} around version {at} and is {last:.3f} now."
    entropies = _values(f, "entropy")
    if len(entropies) > 1 and entropies[-1] < 0.2 * max(entropies):
        reason += (
            f" Entropy fell from {max(entropies):.2f} to {entropies[-1]:.2f}: the policy says the same every time."
        )
    return Health(
        Verdict.COLLAPSED, "bad", "The reward collapsed", reason,
        f"Use the adapter of version {at}. To go on, clone the job with a lower learning_rate, a kl_coefficient above 0"
        " or more prompts a round.",
    )  # fmt: skip


def _rising(f: Facts) -> bool:
    """The reward's slope over the window is clearly above zero, or evaluations improved beyond their own steps."""
    rewards = _values(f, "reward_mean")
    return (len(rewards) >= EARLY and slope_t(rewards) > TREND_T) or _evals_rose(f.evals)


def slope_t(values: Sequence[float]) -> float:
    """The least-squares slope of a series over its standard error; infinite for an exact line that rises."""
    x = range(len(values))
    slope, intercept = linear_regression(x, values)
    residual = sum((y - intercept - slope * i) ** 2 for i, y in zip(x, values, strict=True))
    spread = sum((i - fmean(x)) ** 2 for i in x)
    error = (residual / (len(values) - 2) / spread) ** 0.5
    if error < 1e-12:
        return 0.0 if abs(slope) < 1e-12 else float("inf") if slope > 0 else float("-inf")
    return slope / error


def _evals_rose(evals: Sequence[EvalPoint]) -> bool:
    if len(evals) < EARLY:
        return False
    return slope_t([p.reward_mean for p in evals[-WINDOW:]]) > TREND_T


def _silent(f: Facts) -> Health | None:
    """Most groups have no contrast, so nothing to learn from: all right, cut off, failing at the tool, or too hard."""
    share = _recent(f, "zero_variance_share")
    if share is None or share < ZERO_VARIANCE_WARN:
        return None
    reward = _recent(f, "reward_mean")
    all_equal = f"In {share:.0%} of the groups of the last updates all answers had the same reward"
    if reward is not None and reward >= SOLVED_REWARD:
        return Health(
            Verdict.SOLVED, "good", "Solved: there is nothing left to learn",
            f"{all_equal}, and the mean reward is {reward:.3f}.",
            "Give it harder prompts, or stop here.",
        )  # fmt: skip
    cause = _truncated(f) or _tool_errors(f)
    if cause is not None:
        return cause
    told = "" if reward is None else f"; the mean reward is {reward:.3f}"
    return Health(
        Verdict.NO_SIGNAL, "bad", "No signal: the groups' rewards do not differ", f"{all_equal}{told}.",
        "Choose easier or more varied prompts, show solved examples, raise group_size or temperature, or check the"
        " grader.",
    )  # fmt: skip


def _truncated(f: Facts) -> Health | None:
    share = _recent(f, "truncated_share")
    if share is None or share < TRUNCATED_WARN:
        return None
    return Health(
        Verdict.TRUNCATED, "warn", "Answers are cut off",
        f"{share:.0%} of the last updates' answers reached sampling.max_tokens before they ended.",
        "Raise sampling.max_tokens, or ask for shorter answers in the prompt.",
    )  # fmt: skip


def _tool_errors(f: Facts) -> Health | None:
    shares = {flag: share for flag, share in f.flags.items() if flag in TOOL_FLAGS}
    if not shares or max(shares.values()) < TOOL_WARN:
        return None
    worst = max(shares, key=lambda flag: shares[flag])
    told = ", ".join(f"{share:.0%} {TOOL_FLAGS[flag]}" for flag, share in sorted(shares.items(), key=lambda s: -s[1]))
    return Health(
        Verdict.TOOL_ERRORS, "warn", f"Tool errors: {TOOL_FLAGS[worst]}", f"Of the last rounds' episodes: {told}.",
        "Read some trajectories with this flag. Show the call in worked examples, or allow more turns.",
    )  # fmt: skip


def _unclear(f: Facts) -> Health:
    if len(f.steps) < EARLY:
        reason = f"{len(f.steps)} of the {EARLY} updates that a trend takes. {_course(f)}"
        return Health(Verdict.EARLY, "info", "Too early to tell", reason)
    return Health(
        Verdict.STEADY, "info", "Training, without a clear trend", _course(f),
        "Give it more updates. If it stays level: a higher learning_rate, more prompts a round or a larger group_size.",
    )  # fmt: skip


def _course(f: Facts) -> str:
    """From where to where reward and evaluations went."""
    rewards = _values(f, "reward_mean")
    if not rewards:
        return "No update has measured a reward."
    first = rewards[0] if f.first_reward is None else f.first_reward
    last = fmean(rewards[-min(3, len(rewards)) :])
    told = f"Reward {first:.3f} at the first update, {last:.3f} over the last {min(3, len(rewards))}."
    if len(f.evals) > 1:
        a, b = f.evals[0], f.evals[-1]
        told += (
            f" Held-out pass rate {a.pass_rate:.0%} at version {a.version}, {b.pass_rate:.0%} at version {b.version}."
        )
    return told


def _remark(f: Facts) -> str:
    """While the reward rises, what else could be better."""
    for found in (_truncated(f), _tool_errors(f)):
        if found is not None:
            return f"Still: {found.reason}"
    return ""


def _values(f: Facts, name: str) -> list[float]:
    return [float(step[name]) for step in f.steps if step.get(name) is not None]


def _recent(f: Facts, name: str) -> float | None:
    values = _values(f, name)[-RECENT:]
    return fmean(values) if values else None
