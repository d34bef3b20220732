"""Episodes move by claims: an UPDATE that takes a lease and raises the attempt number, and a fenced one that records.

A message only names episodes. A duplicate, late or forged one finds the claim taken or the state gone, and does
nothing; a worker that comes back from the dead fails the fence (rule 2). Statements on many episodes lock them in
order of id, so that no two wait for each other.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Row, func, insert, select, text, update
from sqlalchemy.orm import Session

from app.manager import admission, doorbells, jobs, rounds
from app.manager.packing import pack_ids, pack_logprobs, unpack_ids
from app.models import Episode, Group, Job, PolicyVersion, Round, StoredObject, Turn, UsageEntry
from app.models.round import IN_FLIGHT, EpisodeState, RoundKind, RoundState, TurnKind
from app.settings import get_settings
from app.specs.job import JobSpec


@dataclass(frozen=True)
class Claim:
    """An episode that this worker holds."""

    episode_id: int
    attempt: int
    turn: int
    losses: int
    retries: int
    round: RoundContext
    group_id: int
    seed: int


@dataclass(frozen=True)
class RoundContext:
    """What the episodes of one round share."""

    id: int
    tenant_id: uuid.UUID
    job_id: uuid.UUID
    kind: str
    policy_version: int
    weights_digest: str
    spec: JobSpec

    @property
    def split(self) -> str:
        return "eval" if self.kind == RoundKind.EVAL else "train"


@dataclass(frozen=True)
class AdapterFiles:
    """The objects that hold a policy version's adapter."""

    model: StoredObject
    config: StoredObject


def lease(seconds: float) -> Any:
    return func.now() + timedelta(seconds=seconds)


def claim(
    session: Session, episode_ids: Sequence[int], state: EpisodeState, claimant: str, lease_seconds: float
) -> list[Claim]:
    """Takes the episodes among `episode_ids` that wait in `state` without a live lease, in (group, index) order."""
    return _claim(session, Episode.id.in_(episode_ids), state, claimant, lease_seconds)


def claim_resets(session: Session, group_ids: Sequence[int], claimant: str, lease_seconds: float) -> list[Claim]:
    """Takes the episodes of these groups that wait for their prompt."""
    return _claim(session, Episode.group_id.in_(group_ids), EpisodeState.RESETTING, claimant, lease_seconds)


def _claim(session: Session, which: Any, state: EpisodeState, claimant: str, lease_seconds: float) -> list[Claim]:
    free = (
        select(Episode.id)
        .join(Round, Round.id == Episode.round_id)
        .where(
            which,
            Episode.state == state,
            Episode.lease_until.is_(None) | (Episode.lease_until < func.now()),
            Round.state == RoundState.ROLLING_OUT,
        )
        .order_by(Episode.id)
        .with_for_update(of=Episode, key_share=True, skip_locked=True)
        .cte("free")
    )
    rows = session.execute(
        update(Episode)
        .where(Episode.id == free.c.id)
        .values(attempt=Episode.attempt + 1, lease_until=lease(lease_seconds), worker=claimant)
        .returning(
            Episode.id,
            Episode.attempt,
            Episode.turn,
            Episode.losses,
            Episode.retries,
            Episode.round_id,
            Episode.group_id,
            Episode.index,
            Episode.seed,
        )
        .execution_options(synchronize_session=False)
    ).all()
    contexts = _round_contexts(session, {r.round_id for r in rows})
    rows = sorted(rows, key=lambda r: (r.round_id, r.group_id, r.index))
    return [Claim(r.id, r.attempt, r.turn, r.losses, r.retries, contexts[r.round_id], r.group_id, r.seed) for r in rows]


def _round_contexts(session: Session, round_ids: set[int]) -> dict[int, RoundContext]:
    rows = session.execute(
        select(
            Round.id, Round.tenant_id, Round.job_id, Round.kind, Round.policy_version, Round.weights_digest, Job.spec
        )
        .join(Job, Job.id == Round.job_id)
        .where(Round.id.in_(round_ids))
    )
    return {
        r.id: RoundContext(
            r.id, r.tenant_id, r.job_id, r.kind, r.policy_version, r.weights_digest, JobSpec.model_validate(r.spec)
        )
        for r in rows
    }


def adapter_files(session: Session, job_id: uuid.UUID, version: int) -> AdapterFiles:
    model, config = (
        session.scalars(
            select(StoredObject)
            .join(PolicyVersion, column == StoredObject.id)
            .where(PolicyVersion.job_id == job_id, PolicyVersion.version == version)
        ).one()
        for column in (PolicyVersion.adapter_object_id, PolicyVersion.config_object_id)
    )
    return AdapterFiles(model, config)


# The fence: those of the (episode, attempt) pairs that are still held, under their row locks.
_HELD = """
WITH held AS (
    SELECT e.id FROM episodes e
    JOIN unnest(CAST(:ids AS bigint[]), CAST(:attempts AS int[])) AS h(id, attempt) USING (id, attempt)
    JOIN rounds r ON r.id = e.round_id
    WHERE {state} AND e.lease_until IS NOT NULL AND r.state = 'rolling_out'
    ORDER BY e.id FOR NO KEY UPDATE OF e
)
"""


def renew(session: Session, held: Sequence[tuple[int, int]], lease_seconds: float) -> set[int]:
    """Renews the leases of (episode, attempt) pairs; returns the episodes still held. The others are lost."""
    if not held:
        return set()
    ids, attempts = zip(*held, strict=True)
    rows = session.execute(
        text(
            _HELD.format(state="e.state IN ('resetting', 'generating', 'acting')")
            + "UPDATE episodes e SET lease_until = now() + make_interval(secs => :seconds)"
            " FROM held WHERE e.id = held.id RETURNING e.id"
        ),
        {"ids": list(ids), "attempts": list(attempts), "seconds": lease_seconds},
    )
    return {row.id for row in rows}


# --- resets


@dataclass(frozen=True)
class GroupPrompt:
    messages: list[dict[str, Any]] | None  # None: not reset yet
    tools: list[dict[str, Any]] | None
    state: dict[str, Any] | None
    item: int


def group_prompts(session: Session, group_ids: set[int]) -> dict[int, GroupPrompt]:
    rows = session.execute(
        select(Group.id, Group.messages, Group.tools, Group.state, Group.item).where(Group.id.in_(group_ids))
    )
    return {r.id: GroupPrompt(r.messages, r.tools, r.state, r.item) for r in rows}


def record_prompts(session: Session, prompts: dict[int, GroupPrompt], claims: Sequence[Claim]) -> None:
    """Stores the prompts of groups (the first writer wins, a reset is deterministic); their episodes generate next."""
    for group_id, prompt in sorted(prompts.items()):
        session.execute(
            update(Group)
            .where(Group.id == group_id, Group.messages.is_(None))
            .values(messages=prompt.messages, tools=prompt.tools, state=prompt.state)
        )
    moved = _release(session, [(c.episode_id, c.attempt) for c in claims], EpisodeState.RESETTING, "generating", 0)
    if moved:
        doorbells.ring_generations(session, moved)


def _release(session: Session, held: Sequence[tuple[int, int]], state: str, new_state: str, turns: int) -> list[int]:
    """The fenced move: gives the lease up and goes on to `new_state`; returns the episodes that were still held."""
    if not held:
        return []
    ids, attempts = zip(*held, strict=True)
    rows = session.execute(
        text(
            _HELD.format(state="e.state = :state")
            + "UPDATE episodes e SET state = :new_state, turn = turn + :turns, lease_until = NULL, worker = NULL,"
            " doorbell_at = now(), losses = 0 FROM held WHERE e.id = held.id RETURNING e.id"
        ),
        {"ids": list(ids), "attempts": list(attempts), "state": state, "new_state": new_state, "turns": turns},
    )
    return sorted(row.id for row in rows)


# --- generation


@dataclass(frozen=True)
class GeneratedTurn:
    """One turn of the policy, as the engine sampled it."""

    claim: Claim
    context_ids: list[int]  # ids appended to the episode's ids before sampling
    sampled_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    text: str
    weights_digest: str
    context_length: int  # ids in front of the sampled ones
    seconds: float


def record_generated(session: Session, turns: Sequence[GeneratedTurn]) -> int:
    """Stores turns of the policy and rings for the environment's answer; returns how many were still held.

    The foreign key to the round refuses a turn of other weights than the round's.
    """
    by_id = {t.claim.episode_id: t for t in turns}
    held = [(t.claim.episode_id, t.claim.attempt) for t in turns]
    moved = _release(session, held, EpisodeState.GENERATING, "acting", 1)
    if not moved:
        return 0
    kept = [by_id[i] for i in moved]
    session.execute(
        insert(Turn),
        [
            {
                "round_id": t.claim.round.id,
                "episode_id": t.claim.episode_id,
                "index": t.claim.turn,
                "tenant_id": t.claim.round.tenant_id,
                "policy_version": t.claim.round.policy_version,
                "kind": TurnKind.POLICY,
                "attempt": t.claim.attempt,
                "weights_digest": t.weights_digest,
                "context_ids": pack_ids(t.context_ids),
                "sampled_ids": pack_ids(t.sampled_ids),
                "logprobs": pack_logprobs(t.logprobs),
                "finish_reason": t.finish_reason,
                "messages": [{"role": "assistant", "content": t.text}],
                "seconds": t.seconds,
            }
            for t in kept
        ],
    )
    session.execute(
        insert(UsageEntry),
        [
            {
                "tenant_id": t.claim.round.tenant_id,
                "job_id": t.claim.round.job_id,
                "round_id": t.claim.round.id,
                "episode_id": t.claim.episode_id,
                "turn": t.claim.turn,
                "attempt": t.claim.attempt,
                "prompt_tokens": t.context_length,
                "generated_tokens": len(t.sampled_ids),
                "busy_seconds": t.seconds,
            }
            for t in kept
        ],
    )
    doorbells.ring_steps(session, moved)
    if admission.backlog(session):
        doorbells.ring_admission(session)
    return len(moved)


def turns_so_far(session: Session, claims: Sequence[Claim]) -> dict[int, list[Turn]]:
    """The recorded turns of each claimed episode, in order."""
    later = [c for c in claims if c.turn > 0]
    found: dict[int, list[Turn]] = defaultdict(list)
    if later:
        statement = select(Turn).where(
            Turn.round_id.in_({c.round.id for c in later}), Turn.episode_id.in_([c.episode_id for c in later])
        )
        for turn in session.scalars(statement.order_by(Turn.episode_id, Turn.index)):
            found[turn.episode_id].append(turn)
    return found


def ids_so_far(turns: Sequence[Turn]) -> list[int]:
    """Every id of the episode up to now, as rendered and as sampled (rule 5)."""
    ids: list[int] = []
    for turn in turns:
        if turn.kind == TurnKind.POLICY:
            ids += unpack_ids(turn.context_ids or b"") + unpack_ids(turn.sampled_ids or b"")
    return ids


def sampled_ids(turn: Turn) -> list[int]:
    return unpack_ids(turn.sampled_ids or b"")


# --- environment answers


@dataclass(frozen=True)
class Answer:
    """What the environment said to one turn: either an observation, or the end with a reward."""

    claim: Claim
    state: dict[str, Any]
    observation: list[dict[str, Any]]
    reward: float | None
    passed: bool | None
    flags: tuple[str, ...]
    truncated: bool
    seconds: float


def record_answers(session: Session, answers: Sequence[Answer]) -> int:
    """Stores the environment's answers: goes on to generate, or finishes the episode and counts its round down."""
    locked = rounds.lock_rounds(session, {a.claim.round.id for a in answers})
    going_on = [a for a in answers if a.reward is None]
    finished = [a for a in answers if a.reward is not None]
    moved = _release(
        session, [(a.claim.episode_id, a.claim.attempt) for a in going_on], EpisodeState.ACTING, "generating", 1
    )
    if moved:
        by_id = {a.claim.episode_id: a for a in going_on}
        session.execute(
            insert(Turn),
            [
                {
                    "round_id": a.claim.round.id,
                    "episode_id": a.claim.episode_id,
                    "index": a.claim.turn,
                    "tenant_id": a.claim.round.tenant_id,
                    "policy_version": a.claim.round.policy_version,
                    "kind": TurnKind.ENVIRONMENT,
                    "attempt": a.claim.attempt,
                    "messages": a.observation,
                    "state": a.state,
                    "seconds": a.seconds,
                }
                for a in map(by_id.__getitem__, moved)
            ],
        )
        _flag(session, [by_id[i] for i in moved if by_id[i].flags])
        doorbells.ring_generations(session, moved)
    closed = _finish(session, finished)
    for round_id, count in Counter(row.round_id for row in closed).items():
        rounds.count_down(session, locked[round_id], count)
    if closed and get_settings().train_streaming:
        of_one_step = {a.claim.round.id for a in finished if a.claim.round.spec.hyperparameters.minibatches == 1}
        doorbells.ring_streaming(session, {row.group_id for row in closed if row.round_id in of_one_step})
    return len(moved) + len(closed)


def _flag(session: Session, answers: Sequence[Answer]) -> None:
    """Keeps what was remarked on turns that are not the last; the caller has moved these episodes, so holds them."""
    if answers:
        said = [{"id": a.claim.episode_id, "flags": list(a.flags)} for a in answers]
        session.execute(
            text(
                "UPDATE episodes e SET flags = coalesce(e.flags, '[]') || said.flags"
                " FROM jsonb_to_recordset(CAST(:said AS jsonb)) AS said(id bigint, flags jsonb) WHERE e.id = said.id"
            ),
            {"said": json.dumps(said)},
        )


def _finish(session: Session, answers: Sequence[Answer]) -> list[Row[tuple[int, int]]]:
    """The fenced move to the end, with the reward; returns round and group of each episode that was still held. The
    caller holds the rounds' locks."""
    if not answers:
        return []
    said = [
        {"id": a.claim.episode_id, "reward": a.reward, "passed": a.passed, "truncated": a.truncated}
        | ({"flags": list(a.flags)} if a.flags else {})
        for a in answers
    ]
    rows = session.execute(
        text(
            _HELD.format(state="e.state = 'acting'")
            + "UPDATE episodes e SET state = 'finished', reward = said.reward, passed = said.passed,"
            " truncated = said.truncated, flags = nullif(coalesce(e.flags, '[]') || coalesce(said.flags, '[]'), '[]'),"
            " lease_until = NULL, finished_at = clock_timestamp()"
            " FROM held JOIN jsonb_to_recordset(CAST(:said AS jsonb)) AS said(id bigint, reward float8, passed bool,"
            " truncated bool, flags jsonb) USING (id) WHERE e.id = held.id RETURNING e.round_id, e.group_id"
        ),
        {
            "ids": [a.claim.episode_id for a in answers],
            "attempts": [a.claim.attempt for a in answers],
            "said": json.dumps(said, allow_nan=False),
        },
    )
    return list(rows)


# --- faults


def give_back(session: Session, claims: Sequence[Claim], code: str, message: str) -> None:
    """An infrastructure fault: the episode is tried again from its last recorded turn with the same seed, until its
    budget is spent; then it is dropped and its round goes on without it."""
    settings = get_settings()
    locked = rounds.lock_rounds(session, {c.round.id for c in claims})
    for c in sorted(claims, key=lambda c: c.episode_id):
        episode = _held_episode(session, c)
        if episode is None or locked[c.round.id].state != RoundState.ROLLING_OUT:
            continue
        episode.lease_until = None
        episode.worker = None
        if episode.retries < settings.infrastructure_retries:
            episode.retries += 1
            episode.doorbell_at = func.now()  # rung again by the sweep: that is the back-off
        else:
            drop(session, episode, locked[c.round.id], code, message)


def fail_job(session: Session, claim: Claim, code: str, message: str) -> None:
    """A fault of the job's own fails it, unless the episode is another attempt's by now: that one decides."""
    job = jobs.lock_job(session, claim.round.job_id)
    rounds.lock_rounds(session, {claim.round.id})
    if _held_episode(session, claim) is not None:
        jobs.fail(session, job, code, message)


def _held_episode(session: Session, claim: Claim) -> Episode | None:
    return session.scalars(
        select(Episode)
        .where(
            Episode.id == claim.episode_id,
            Episode.attempt == claim.attempt,
            Episode.state.in_(IN_FLIGHT),
            Episode.lease_until.is_not(None),
        )
        .with_for_update(key_share=True)
        .execution_options(populate_existing=True)
    ).first()


def drop(session: Session, episode: Episode, round_: Round, code: str, message: str) -> None:
    """Fails one episode for good; the group goes on without it. The caller holds the round's lock."""
    episode.state = EpisodeState.FAILED
    episode.error_code = code
    episode.lease_until = None
    episode.finished_at = func.clock_timestamp()
    session.flush()
    jobs.warn(session, round_.job_id, "episode_dropped", f"episode {episode.id} dropped: {code}: {message}")
    rounds.count_down(session, round_, 1)
