"""Preflights: one round with the base model before hours are spent, and what it says of the job to come.

A preflight is a job of a kind of its own, so that validation, admission, leases and the sweep are those of all jobs.
Its adapter is a fresh one, which is the base model exactly (B = 0); its round never trains.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.db import transaction
from app.errors import NotFound, QuotaExceeded
from app.manager import jobs
from app.manager.trajectories import EpisodeView, Messages, trajectories
from app.models import Job, Round, Tenant
from app.models.job import LIVE, JobKind
from app.models.round import RoundKind, RoundState
from app.specs.job import JobSpec

MOST_LIVE = 2  # of one tenant
DEADLINE_SECONDS = 3600.0  # one that is not over by then fails, so that none holds a tenant's place for ever
SAMPLED_PROMPTS = 4  # of these the report shows the best and the worst answer

GRADER_FAULTS = ("grader_error", "environment_timeout")  # flags that tell of a failed grading, not of a wrong answer

# Shares of the episodes from which on they decide the verdict.
GRADER_ERRORS = 0.1
TRUNCATED = 0.5
DROPPED = 0.5
MOSTLY_FLAT = 0.75  # of the prompts


@dataclass(frozen=True)
class Measured:
    """Of the preflight's finished episodes; shares are 0 to 1, tokens are means an episode."""

    prompts: int
    episodes: int
    pass_rate: float
    reward_mean: float
    reward_std: float
    zero_variance_share: float  # of the prompts: all answers of equal worth, so nothing to learn from
    truncated_share: float
    empty_share: float  # nothing was said
    flags: dict[str, int]  # by code: what environment, tools and grader remarked
    dropped: dict[str, int]  # episodes that could not be finished, by the code of their error
    prompt_tokens: float
    generated_tokens: float
    tokens_per_second: float | None  # generated, all episodes together


@dataclass(frozen=True)
class Cost:
    """Of the whole job with its evaluations, in the units of the usage ledger."""

    prompt_tokens: int
    generated_tokens: int
    trained_tokens: int
    busy_seconds: float | None  # of engine slots and of the trainer


@dataclass(frozen=True)
class Prediction:
    """What the job will take, on a service as busy as it was. Null figures are explained in `unknown`.

    Seconds are those of one step: `rollout` in the engine, from the preflight's seconds a token and the engines'
    slots; `environment` around it (prompts, tools, grading, waiting), as long as the preflight's; `training` from the
    last updates of any job on this base model, by tokens; `commit` around these, as long as it was there.
    """

    steps: int
    rollout_seconds: float | None
    environment_seconds: float
    training_seconds: float | None
    commit_seconds: float | None
    total_seconds: float | None
    cost: Cost
    unknown: list[str]


@dataclass(frozen=True)
class Verdict:
    code: str  # good | too_easy | too_hard | no_signal | truncated | grader_errors | incomplete
    reason: str
    advice: str


@dataclass(frozen=True)
class Sample:
    prompt_index: int
    prompt: Messages | None
    episode: EpisodeView


@dataclass(frozen=True)
class PreflightReport:
    verdict: Verdict
    measured: Measured
    prediction: Prediction
    samples: list[Sample]


# --- life


def submit(
    session: Session, tenant: Tenant, spec: JobSpec, prompts: int | None = None, samples: int | None = None
) -> Job:
    """Creates a preflight of a job as it would be submitted; `prompts` and `samples` go over the specification's own.

    Raises what a submission raises, InvalidRequest for numbers out of bounds, and QuotaExceeded when MOST_LIVE are
    under way.
    """
    given = {"prompts": prompts, "samples": samples}
    changes = {name: number for name, number in given.items() if number is not None}
    if changes:
        document = spec.model_dump(mode="json")
        spec = jobs.parse_spec(document | {"preflight": document["preflight"] | changes})
    # Two at once cannot both take the last place.
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"preflight:{tenant.id}", 0))))
    live = session.scalars(
        select(func.count()).where(Job.tenant_id == tenant.id, Job.kind == JobKind.PREFLIGHT, Job.state.in_(LIVE))
    ).one()
    if live >= MOST_LIVE:
        raise QuotaExceeded(f"{live} preflights are under way; wait for one to end, or cancel it")
    return jobs.submit(session, tenant, spec, kind=JobKind.PREFLIGHT)


def find(session: Session, tenant_id: uuid.UUID, preflight_id: uuid.UUID) -> Job:
    """Raises NotFound for what is no preflight of this tenant."""
    mine = select(Job).where(Job.id == preflight_id, Job.tenant_id == tenant_id, Job.kind == JobKind.PREFLIGHT)
    job = session.scalars(mine.execution_options(populate_existing=True)).first()
    if job is None:
        raise NotFound(f"no preflight {preflight_id}", param="preflight")
    return job


def expire_late() -> int:
    """Fails preflights that are not over DEADLINE_SECONDS after they were made. A part of the sweep."""
    with transaction() as session:
        late = session.scalars(
            select(Job.id).where(
                Job.kind == JobKind.PREFLIGHT,
                Job.state.in_(LIVE),
                Job.created_at < func.now() - timedelta(seconds=DEADLINE_SECONDS),
            )
        ).all()
    for job_id in late:
        with transaction() as session:
            jobs.fail_by_id(
                session,
                job_id,
                "preflight_timeout",
                f"not over after {DEADLINE_SECONDS / 60:.0f} minutes: the engines were busy or not there; try again",
            )
    return len(late)


# --- report


def report(session: Session, job: Job) -> PreflightReport | None:
    """What a finished preflight says; None before its end, and for one that failed or was cancelled."""
    round_ = session.scalars(
        select(Round).where(
            Round.job_id == job.id, Round.kind == RoundKind.PREFLIGHT, Round.state == RoundState.COMMITTED
        )
    ).first()
    if round_ is None or round_.summary is None:
        return None
    summary, spec = round_.summary, JobSpec.model_validate(job.spec)
    measured = Measured(
        prompts=summary["groups"],
        **{name: summary[name] for name in Measured.__dataclass_fields__ if name != "prompts"},
    )
    return PreflightReport(judge(measured), measured, predict(spec, summary), _samples(session, job))


def predict(spec: JobSpec, summary: Mapping[str, Any]) -> Prediction:
    """Time and cost of the job from a preflight round's summary."""
    h, e = spec.hyperparameters, spec.evaluation
    step_episodes = h.prompts_per_round * h.group_size
    evaluations = 1 + h.n_steps // e.every if e.every else 0
    episodes = h.n_steps * step_episodes + evaluations * e.prompts * e.samples
    unknown = []
    rollout = training = commit = busy = total = None
    pace, environment = summary["training_seconds_per_token"], 0.0
    if not summary["generated_tokens"]:
        unknown.append("rollout_seconds: the preflight generated no token")
    elif not summary["slots"]:
        unknown.append("rollout_seconds: no rollout worker of this base model was alive when the preflight ended")
    else:
        rollout = _rollout_seconds(summary, step_episodes)
        environment = max(0.0, summary["elapsed_seconds"] - _rollout_seconds(summary, summary["episodes"]))
    if pace is None:
        unknown.append("training_seconds: no job has been trained on this base model yet")
    else:
        training = step_episodes * summary["episode_tokens"] * pace
        commit = summary["commit_seconds"]
        busy = episodes * summary["engine_seconds"] + h.n_steps * training
    if rollout is not None and training is not None and commit is not None:
        total = h.n_steps * (rollout + environment + training + commit)
    return Prediction(
        steps=h.n_steps,
        rollout_seconds=rollout,
        environment_seconds=environment,
        training_seconds=training,
        commit_seconds=commit,
        total_seconds=total,
        cost=Cost(
            prompt_tokens=round(episodes * summary["read_tokens"]),
            generated_tokens=round(episodes * summary["generated_tokens"]),
            trained_tokens=round(h.n_steps * step_episodes * summary["episode_tokens"]),
            busy_seconds=busy,
        ),
        unknown=unknown,
    )


def _rollout_seconds(summary: Mapping[str, Any], episodes: int) -> float:
    """Of a round of so many episodes: the slots are full until the last ones, and the round waits for the longest."""
    full = episodes * summary["engine_seconds"] / min(summary["slots"], episodes)
    return float(full + summary["longest_seconds"] - summary["engine_seconds"])


def judge(m: Measured) -> Verdict:
    """The one thing to know before the job is created: what keeps it from learning, the gravest first."""
    dropped = sum(m.dropped.values())
    if m.episodes == 0 or dropped >= DROPPED * (m.episodes + dropped):
        return Verdict(
            "incomplete",
            f"{dropped} of {m.episodes + dropped} episodes could not be finished ({_counts(m.dropped)})",
            "Run the preflight again; if that does not help, ask the operator about the workers.",
        )
    faults = {flag: count for flag, count in m.flags.items() if flag in GRADER_FAULTS}
    if sum(faults.values()) >= GRADER_ERRORS * m.episodes:
        return Verdict(
            "grader_errors",
            f"grading failed in {sum(faults.values())} of {m.episodes} episodes ({_counts(faults)})",
            "Mend the grader: try it on answers like those in the samples before you create the job.",
        )
    if m.truncated_share >= TRUNCATED:
        return Verdict(
            "truncated",
            f"{m.truncated_share:.0%} of the answers were cut off at sampling.max_tokens",
            "Raise sampling.max_tokens, or ask for shorter answers in the prompts.",
        )
    if m.zero_variance_share == 1:
        return _without_signal(m)
    mixed = m.prompts - round(m.zero_variance_share * m.prompts)
    return Verdict(
        "good",
        f"the answers to {mixed} of {m.prompts} prompts differ in worth; {m.pass_rate:.0%} pass, and the mean reward is"
        f" {m.reward_mean:.2g}",
        "Create the job; most prompts give no signal, so a larger group_size or prompts of fitting difficulty help."
        if m.zero_variance_share >= MOSTLY_FLAT
        else "Create the job.",
    )


def _without_signal(m: Measured) -> Verdict:
    if m.pass_rate == 1:
        return Verdict(
            "too_easy",
            f"all {m.episodes} answers pass: the base model can do this already",
            "Choose harder prompts, or a stricter grader.",
        )
    if m.pass_rate == 0:
        return Verdict(
            "too_hard",
            f"none of {m.episodes} answers passes, and those to one prompt are all worth the same",
            "Start with easier prompts, show solved examples in the prompt, or reward part of the way. Read the"
            " samples: if an answer there is right, mend the grader.",
        )
    return Verdict(
        "no_signal",
        f"the answers to one prompt are all worth the same, whichever of the {m.prompts} it is",
        "Raise hyperparameters.group_size or sampling.temperature, or choose prompts that the model sometimes solves.",
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{code}: {count}" for code, count in counts.items())


def _samples(session: Session, job: Job) -> list[Sample]:
    """The best and the worst answer to the first prompts."""
    samples = []
    for group in trajectories(session, job, kind=RoundKind.PREFLIGHT, limit=SAMPLED_PROMPTS).groups:
        rewarded = [(e.reward, e) for e in group.episodes if e.reward is not None]
        rewarded.sort(key=itemgetter(0), reverse=True)
        samples += [Sample(group.index, group.messages, e) for _, e in rewarded[:1] + rewarded[1:][-1:]]
    return samples
