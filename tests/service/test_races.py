"""Everybody at once on the same jobs: no deadlock, and at the end everything is whole."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from app.db import transaction
from app.errors import Conflict
from app.manager import buffer, commit, episodes, recovery, retention
from app.manager.commit import LostClaim
from app.models import Tenant
from app.models.round import EpisodeState
from tests import by_hand

THREADS = 6
# More of them for a longer hunt, by hand.
OPERATIONS = int(os.environ.get("MARLAAS_TEST_RACES", "60"))


class Hand:
    """One thread that does whatever comes to its mind, as any worker, the manager or a user might."""

    def __init__(self, seed: int, job_ids: list[uuid.UUID]) -> None:
        self.random = random.Random(seed)
        self.job_ids = job_ids
        self.commits = 0
        users: list[Callable[[], object]] = [self.pause, self.resume, self.resume]
        workers: list[Callable[[], object]] = [self.reset, self.generate, self.act, self.train]
        self.operations = [*workers * 6, by_hand.admit, by_hand.admit, recovery.sweep, self.forget, self.renew, *users]

    def work(self) -> None:
        for _ in range(OPERATIONS):
            self.random.choice(self.operations)()

    def some_episodes(self) -> list[int]:
        """A message that names some episodes of some rounds, in no order."""
        with transaction() as session:
            found = list(session.scalars(text("SELECT id FROM episodes ORDER BY id DESC LIMIT 40")))
        return self.random.sample(found, len(found) * 2 // 3)

    def reset(self) -> None:
        with transaction() as session:
            for round_id in session.scalars(text("SELECT id FROM rounds WHERE state = 'rolling_out'")).all():
                by_hand.reset(round_id)

    def generate(self) -> None:
        claims = by_hand.claim(self.some_episodes(), EpisodeState.GENERATING)
        self.random.shuffle(claims)
        if claims and self.random.random() < 0.2:
            with transaction() as session:
                episodes.give_back(session, claims, "infrastructure", "for once")
        by_hand.record_turns([by_hand.turn(c) for c in claims])

    def act(self) -> None:
        claims = by_hand.claim(self.some_episodes(), EpisodeState.ACTING)
        self.random.shuffle(claims)
        rewards = [None if c.turn < 3 and self.random.random() < 0.3 else self.random.random() for c in claims]
        by_hand.record_answers([by_hand.answer(c, reward) for c, reward in zip(claims, rewards, strict=True)])

    def train(self) -> None:
        with transaction() as session:
            held = buffer.claim_next(session, by_hand.MODEL, by_hand.TRAINING.claimant, by_hand.LEASE)
            if held is None:
                return
            assert sum(map(len, buffer.trajectories(session, held))) == 4
        new = by_hand.new_version(held.job_id, held.policy_version + 1, held.attempt)
        for _ in range(self.random.choice((1, 1, 2))):  # now and then the answer was lost
            try:
                with transaction() as session:
                    if not commit.is_committed(session, held):
                        commit.commit_round(session, held, new, {})
                        self.commits += 1
            except LostClaim:
                return

    def renew(self) -> None:
        claims = by_hand.claim(self.some_episodes(), EpisodeState.GENERATING)
        with transaction() as session:
            episodes.renew(session, [(c.episode_id, c.attempt) for c in reversed(claims)], by_hand.LEASE)
        with transaction() as session:
            retention.expire_orphans(session)

    def forget(self) -> None:
        by_hand.expire_leases(self.random.choice(("episodes", "rounds")))

    def pause(self) -> None:
        self._want(by_hand.pause)

    def resume(self) -> None:
        for _ in range(3):
            self._want(by_hand.resume)

    def _want(self, change: Callable[[uuid.UUID], None]) -> None:
        try:
            change(self.random.choice(self.job_ids))
        except Conflict:
            return


# What is never to be found, whatever happened.
BROKEN = {
    "a gap in versions": """
        SELECT job_id FROM policy_versions GROUP BY job_id HAVING count(*) <> max(version) + 1""",
    "a job at another version than its newest": """
        SELECT j.id FROM jobs j JOIN policy_versions v ON v.job_id = j.id GROUP BY j.id
        HAVING j.version <> max(v.version)""",
    "a committed round without its version, or the other way round": """
        SELECT r.id FROM rounds r FULL JOIN policy_versions v ON v.round_id = r.id
        WHERE (r.state = 'committed') <> (v.version IS NOT NULL) AND r.kind = 'train'""",
    "a version by another attempt than the round's last": """
        SELECT r.id FROM rounds r JOIN policy_versions v ON v.round_id = r.id WHERE r.attempt <> v.attempt""",
    "a count of open episodes that is wrong": """
        SELECT r.id FROM rounds r JOIN episodes e ON e.round_id = r.id WHERE r.state <> 'abandoned'
        GROUP BY r.id HAVING count(*) FILTER (WHERE e.state NOT IN ('finished', 'failed')) <> r.open_episodes""",
    "a round that rolls out with nothing open": """
        SELECT id FROM rounds WHERE state = 'rolling_out' AND open_episodes = 0""",
    "an episode with a turn too many or too few": """
        SELECT e.id FROM episodes e LEFT JOIN turns t ON t.round_id = e.round_id AND t.episode_id = e.id
        GROUP BY e.id HAVING count(t.episode_id) <> e.turn OR max(t.index) <> e.turn - 1""",
    "turns that do not take turns": """
        SELECT episode_id FROM turns WHERE (index % 2 = 0) <> (kind = 'policy')""",
    "a turn that is not charged once": """
        SELECT t.episode_id FROM turns t LEFT JOIN usage u ON u.episode_id = t.episode_id AND u.turn = t.index
        WHERE t.kind = 'policy' GROUP BY t.episode_id, t.index HAVING count(u.id) <> 1""",
    "a lost or doubled trajectory": """
        SELECT r.id FROM rounds r JOIN episodes e ON e.round_id = r.id WHERE r.state = 'committed'
        GROUP BY r.id HAVING count(*) FILTER (WHERE e.state = 'finished') <> 4""",
    "a dead episode that is still open": """
        SELECT e.id FROM episodes e JOIN rounds r ON r.id = e.round_id
        WHERE r.state = 'abandoned' AND e.state NOT IN ('finished', 'failed')""",
    "a version whose object is not live": """
        SELECT v.version FROM policy_versions v JOIN objects o ON o.id = v.adapter_object_id WHERE o.state <> 'live'""",
}


def broken() -> dict[str, list[object]]:
    with transaction() as session:
        found = {name: list(session.scalars(text(query))) for name, query in BROKEN.items()}
    return {name: rows for name, rows in found.items() if rows}


@pytest.fixture
def job_ids(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> list[uuid.UUID]:
    from app.settings import get_settings

    monkeypatch.setattr(get_settings(), "losses_before_alone", 1000)  # the leases here run out all the time
    monkeypatch.setattr(get_settings(), "infrastructure_retries", 1000)
    other = by_hand.make_tenant("other")
    return [by_hand.start_job(t, hyperparameters={"n_steps": 1000}) for t in (tenant, tenant, other)]


def bring_to_order(job_ids: list[uuid.UUID]) -> None:
    """Well-behaved workers take over, and each job's round comes to its commit: nothing was left stuck."""
    for job_id in job_ids:
        if by_hand.job(job_id).wanted == "pause":
            by_hand.resume(job_id)
    for table in ("episodes", "rounds"):
        by_hand.expire_leases(table)
    recovery.sweep()
    by_hand.admit()
    for round_id in [by_hand.live_round(job_id).id for job_id in job_ids]:
        by_hand.reset(round_id)
        found = by_hand.ids(by_hand.episodes_of(round_id))
        by_hand.generate(found)
        by_hand.act(found)
    while (held := by_hand.claim_training()) is not None:
        by_hand.commit_claim(held)


@pytest.mark.parametrize("seed", [1, 2])
def test_everybody_at_once(job_ids: list[uuid.UUID], seed: int) -> None:
    hands = [Hand(seed * 100 + i, job_ids) for i in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(hand.work) for hand in hands]:
            done.result()  # raises what the thread raised, a deadlock among them
    assert broken() == {}
    versions = [by_hand.job(j).version for j in job_ids]
    assert sum(hand.commits for hand in hands) == sum(versions)
    bring_to_order(job_ids)
    assert all(by_hand.job(j).version > before for j, before in zip(job_ids, versions, strict=True))
    assert broken() == {}


def test_cancelling_everything_in_the_middle(job_ids: list[uuid.UUID]) -> None:
    hands = [Hand(i, job_ids) for i in range(THREADS)]
    with ThreadPoolExecutor(THREADS + 1) as pool:
        working = [pool.submit(hand.work) for hand in hands]
        cancelling = [pool.submit(by_hand.cancel, job_id) for job_id in job_ids]
        for done in [*working, *cancelling]:
            done.result()
    assert {by_hand.job(j).state for j in job_ids} == {"cancelled"}
    assert broken() == {}
