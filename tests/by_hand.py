"""Works the manager by hand, as the workers would, with made-up content: claims, records, commits."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sqlalchemy import select, text

from app.db import engine, transaction
from app.manager import admission, base_models, buffer, commit, episodes, jobs, objects, tenants, workers
from app.manager.buffer import TrainingClaim
from app.manager.commit import NewVersion
from app.manager.episodes import Answer, Claim, GeneratedTurn, GroupPrompt
from app.manager.objects import Upload
from app.manager.workers import Announcement
from app.models import Episode, Group, Job, PolicyVersion, Round, Tenant
from app.models.object import ObjectKind
from app.models.round import EpisodeState
from app.models.worker import WorkerKind

MODEL = "tiny"
LEASE = 60.0
GENERATED, PROMPT = [7, 8, 9], [1, 2]

ROLLOUT = Announcement("rollout@hand", uuid.uuid4(), WorkerKind.ROLLOUT, MODEL, slots=64, adapter_slots=8)
TOOLS = Announcement("tools@hand", uuid.uuid4(), WorkerKind.TOOLS, slots=64)
TRAINING = Announcement("training@hand", uuid.uuid4(), WorkerKind.TRAINING, MODEL, slots=1)

Reward = Callable[[int, int], float]  # of (group, index)


# --- what there is


def register_model(name: str = MODEL) -> None:
    with transaction() as session:
        base_models.register(session, name, name, "float32", {"context_length": 512, "vocab_size": 64})


def announce(*said: Announcement) -> None:
    """Heartbeats of workers, which stay alive for the whole test."""
    with transaction() as session:
        for one in said:
            workers.heartbeat(session, one)
    execute("UPDATE workers SET seen_at = now() + interval '1 h'")


def make_tenant(name: str = "acme", **quota: Any) -> Tenant:
    with transaction() as session:
        return tenants.create_tenant(session, name, **quota)


def document(**changes: Any) -> dict[str, Any]:
    """A small job: 2 prompts × 2 episodes, 3 steps. Changes go over it field by field."""
    fields: dict[str, Any] = {
        "name": "digits",
        "base_model": MODEL,
        "environment": {"type": "calculator", "max_turns": 2},
        "sampling": {"max_tokens": 8},
        "hyperparameters": {"n_steps": 3, "prompts_per_round": 2, "group_size": 2},
    }
    for field, value in changes.items():
        fields[field] = fields.get(field, {}) | value if isinstance(value, dict) else value
    return fields


def submit(tenant: Tenant, **changes: Any) -> uuid.UUID:
    """A job that waits for its validation."""
    with transaction() as session:
        return jobs.submit(session, tenant, jobs.parse_spec(document(**changes))).id


def queue_job(tenant: Tenant, **changes: Any) -> uuid.UUID:
    """A job that is valid and waits for its tenant's quota."""
    job_id = submit(tenant, **changes)
    with transaction() as session:
        jobs.validated(session, job_id)
    return job_id


def start_job(tenant: Tenant, **changes: Any) -> uuid.UUID:
    """A running job with version 0 and its first round, of which nothing is admitted yet."""
    job_id = queue_job(tenant, **changes)
    with transaction() as session:
        jobs.start_queued(session)
    publish_initial(job_id)
    return job_id


def publish_initial(job_id: uuid.UUID) -> bool:
    new = new_version(job_id, 0, attempt=uuid.uuid4().int % 2**31)
    with transaction() as session:
        return commit.commit_initial(session, job_id, new)


def new_version(
    job_id: uuid.UUID, version: int, attempt: int = 1, signal: bool = True, parent: TrainingClaim | None = None
) -> NewVersion:
    """Announced objects of a version (nothing is uploaded); without signal those of its parent."""
    if not signal:
        assert parent is not None
        return NewVersion(
            parent.weights_digest,
            parent.adapter.id,
            parent.config.id,
            parent.optimizer.id if parent.optimizer else None,
            optimizer_steps=0,
            signal=False,
        )
    uploads = [
        Upload(kind, f"hand/{job_id}/{version}/{attempt}/{kind}", f"{job_id}{version}{kind}".encode())
        for kind in (ObjectKind.ADAPTER_MODEL, ObjectKind.ADAPTER_CONFIG, ObjectKind.OPTIMIZER)
    ]
    with transaction() as session:
        tenant_id = session.get_one(Job, job_id).tenant_id
        model, config, optimizer = objects.announce(session, tenant_id, job_id, version, uploads)
    return NewVersion(digest(job_id, version), model, config, optimizer, optimizer_steps=version, signal=True)


def digest(job_id: uuid.UUID, version: int) -> str:
    return hashlib.sha256(f"{job_id}:{version}".encode()).hexdigest()


# --- reading


def job(job_id: uuid.UUID) -> Job:
    with transaction() as session:
        return session.get_one(Job, job_id)


def live_round(job_id: uuid.UUID) -> Round:
    """The job's newest training round."""
    with transaction() as session:
        return session.scalars(
            select(Round).where(Round.job_id == job_id, Round.kind == "train").order_by(Round.id.desc()).limit(1)
        ).one()


def round_of(round_id: int) -> Round:
    with transaction() as session:
        return session.get_one(Round, round_id)


def episodes_of(round_id: int, *states: EpisodeState) -> list[Episode]:
    """In (group, index) order."""
    with transaction() as session:
        statement = select(Episode).where(Episode.round_id == round_id)
        if states:
            statement = statement.where(Episode.state.in_(states))
        return list(session.scalars(statement.order_by(Episode.group_id, Episode.index)))


def ids(found: Iterable[Episode]) -> list[int]:
    return [e.id for e in found]


def versions(job_id: uuid.UUID) -> list[PolicyVersion]:
    with transaction() as session:
        return list(
            session.scalars(select(PolicyVersion).where(PolicyVersion.job_id == job_id).order_by(PolicyVersion.version))
        )


# --- the stages


def admit() -> int:
    with transaction() as session:
        return admission.admit(session)


def claim(episode_ids: Sequence[int], state: EpisodeState, claimant: Announcement = ROLLOUT) -> list[Claim]:
    with transaction() as session:
        return episodes.claim(session, episode_ids, state, claimant.claimant, LEASE)


def reset(round_id: int) -> list[int]:
    """Gives all groups whose episodes wait for it their prompt; returns the episodes that generate next."""
    with transaction() as session:
        groups = session.scalars(select(Group.id).where(Group.round_id == round_id)).all()
        claims = episodes.claim_resets(session, groups, TOOLS.claimant, LEASE)
    prompts = {c.group_id: GroupPrompt([{"role": "user", "content": "?"}], None, {}, 0) for c in claims}
    with transaction() as session:
        episodes.record_prompts(session, prompts, claims)
    return [c.episode_id for c in claims]


def turn(claim: Claim, **changes: Any) -> GeneratedTurn:
    """What an engine says, made up."""
    fields: dict[str, Any] = {
        "context_ids": PROMPT,
        "sampled_ids": GENERATED,
        "logprobs": [-0.5] * len(GENERATED),
        "finish_reason": "stop",
        "text": "7",
        "weights_digest": claim.round.weights_digest,
        "context_length": len(PROMPT),
        "seconds": 0.1,
    }
    return GeneratedTurn(claim=claim, **(fields | changes))


def answer(claim: Claim, reward: float | None = 1.0) -> Answer:
    """What an environment says: the end with a reward, or (None) an observation."""
    return Answer(
        claim=claim,
        state={"turns": claim.turn},
        observation=[] if reward is not None else [{"role": "tool", "content": "go on"}],
        reward=reward,
        passed=None if reward is None else reward >= 1,
        flags=(),
        truncated=False,
        seconds=0.01,
    )


def record_turns(turns: Sequence[GeneratedTurn]) -> int:
    with transaction() as session:
        return episodes.record_generated(session, turns)


def record_answers(answers: Sequence[Answer]) -> int:
    with transaction() as session:
        return episodes.record_answers(session, answers)


def generate(episode_ids: Sequence[int]) -> int:
    return record_turns([turn(c) for c in claim(episode_ids, EpisodeState.GENERATING)])


def act(episode_ids: Sequence[int], reward: float | None = 1.0) -> int:
    return record_answers([answer(c, reward) for c in claim(episode_ids, EpisodeState.ACTING, TOOLS)])


def to_state(round_id: int, state: EpisodeState) -> list[int]:
    """Takes all episodes of a round, admitted or not, as far as `state`; returns them."""
    admit()
    if state != EpisodeState.RESETTING:
        reset(round_id)
    found = ids(episodes_of(round_id))
    if state == EpisodeState.ACTING:
        generate(found)
    return found


def finish_round(job_id: uuid.UUID, reward: Reward = lambda group, index: float(index % 2)) -> int:
    """Plays the job's training round to its end, so that it is ready; returns its id."""
    round_id = live_round(job_id).id
    to_state(round_id, EpisodeState.ACTING)
    places = {e.id: (e.group_id, e.index) for e in episodes_of(round_id)}
    claims = claim(list(places), EpisodeState.ACTING, TOOLS)
    record_answers([answer(c, reward(*places[c.episode_id])) for c in claims])
    return round_id


def claim_training(claimant: Announcement = TRAINING) -> TrainingClaim | None:
    with transaction() as session:
        return buffer.claim_next(session, MODEL, claimant.claimant, LEASE)


def commit_claim(held: TrainingClaim, signal: bool = True) -> int:
    new = new_version(held.job_id, held.policy_version + 1, held.attempt, signal, held)
    with transaction() as session:
        return commit.commit_round(session, held, new, {"reward_mean": 0.5, "total_tokens": 10, "seconds": 0.1})


def train(signal: bool = True) -> int:
    """Claims the next ready round and commits it; returns the new version."""
    held = claim_training()
    assert held is not None
    return commit_claim(held, signal)


def step(job_id: uuid.UUID, signal: bool = True) -> int:
    """One round of the job from admission to commit."""
    finish_round(job_id)
    return train(signal)


# --- time and faults


def execute(statement: str, **parameters: Any) -> int:
    """SQL as the service; returns the number of rows."""
    with transaction() as session:
        return session.execute(text(statement), parameters).rowcount  # type: ignore[attr-defined, no-any-return]


def expire_leases(table: str = "episodes") -> int:
    """All leases ran out a second ago, but for those that somebody is just renewing or giving up."""
    return execute(
        f"WITH held AS (SELECT id FROM {table} WHERE lease_until IS NOT NULL ORDER BY id FOR UPDATE SKIP LOCKED)"
        f" UPDATE {table} t SET lease_until = now() - interval '1 s' FROM held WHERE t.id = held.id"
    )


def make_bells_old() -> None:
    """Everything that was rung for was so an hour ago."""
    for table in ("episodes", "rounds", "jobs"):
        execute(f"UPDATE {table} SET doorbell_at = now() - interval '1 h' WHERE doorbell_at IS NOT NULL")


def to_phase(job_id: uuid.UUID, phase: str) -> TrainingClaim | None:
    """Takes a started job to a phase of its round."""
    round_id = live_round(job_id).id
    if phase in ("resetting", "generating", "acting"):
        to_state(round_id, EpisodeState(phase))
    elif phase in ("ready", "training"):
        finish_round(job_id)
    return claim_training() if phase == "training" else None


# --- what users want


def cancel(job_id: uuid.UUID) -> None:
    with transaction() as session:
        jobs.cancel(session, job_id)


def pause(job_id: uuid.UUID) -> None:
    with transaction() as session:
        jobs.pause(session, job_id)


def resume(job_id: uuid.UUID) -> None:
    with transaction() as session:
        jobs.resume(session, job_id)


def wait_until_blocked(seconds: float = 10.0) -> None:
    """Returns once a session of the service waits for a lock. Raises AssertionError when none does in time."""
    deadline = time.monotonic() + seconds
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = 'marlaas-service'"
    )
    while time.monotonic() < deadline:
        with engine("owner").connect() as connection:
            if connection.execute(text(waiting)).scalar_one():
                return
    raise AssertionError("no session waits for a lock")
