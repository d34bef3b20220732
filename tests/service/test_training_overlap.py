"""Upload and commit of one job beside the next job's update: each round keeps its own lease, faults and commit."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app import storage
from app.db import transaction
from app.manager import commit, recovery
from app.manager.buffer import TrainingClaim
from app.models import PolicyVersion, Tenant
from app.settings import get_settings
from tests import by_hand
from tests.trainers import new_worker, play_round, start_job, versions_and_steps
from tests.workers import wait_for
from workers import retry
from workers.lora import WEIGHTS_FILE
from workers.training.holding import Held
from workers.training.worker import TrainingWorker

SECONDS = 30.0  # that something is waited for


@pytest.fixture
def worker(hand: None, tmp_path: Path) -> Iterator[TrainingWorker]:
    made = new_worker(tmp_path / "cache")
    yield made
    made.hand.wait_until_empty()


class Recorder:
    """What the worker did, in order; a commit of a job in `held` waits until it is let go."""

    def __init__(self, worker: TrainingWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, uuid.UUID]] = []
        self.held: dict[uuid.UUID, threading.Event] = {}
        update, commit_round = worker._update, commit.commit_round

        def recorded_update(held: Held) -> object:
            self.events.append(("update", held.claim.job_id))
            return update(held)

        def recorded_commit(session: object, claim: TrainingClaim, *args: object) -> int:
            version: int = commit_round(session, claim, *args)  # type: ignore[arg-type]
            self.events.append(("commit", claim.job_id))
            return version

        def late_publish(claim: TrainingClaim, *args: object) -> int:
            if claim.job_id in self.held and not self.held[claim.job_id].wait(SECONDS):
                raise AssertionError("nobody let the commit go")
            version: int = publish(claim, *args)  # type: ignore[arg-type]
            return version

        publish = worker.publisher.publish
        monkeypatch.setattr(worker, "_update", recorded_update)
        monkeypatch.setattr(worker.publisher, "publish", late_publish)
        monkeypatch.setattr(commit, "commit_round", recorded_commit)

    def hold(self, job_id: uuid.UUID) -> threading.Event:
        self.held[job_id] = threading.Event()
        return self.held[job_id]


@pytest.fixture
def recorder(worker: TrainingWorker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder(worker, monkeypatch)
    yield made
    for event in made.held.values():
        event.set()
    worker.hand.wait_until_empty()


def ready_jobs(worker: TrainingWorker, tenant: Tenant, count: int) -> list[uuid.UUID]:
    """Running jobs whose first rounds are ready, in this order."""
    jobs = [start_job(worker, tenant, name=f"job-{i}", seed=i) for i in range(count)]
    for job_id in jobs:
        play_round(job_id)
    return jobs


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_the_next_jobs_update_starts_before_the_first_ones_commit(
    worker: TrainingWorker, tenant: Tenant, recorder: Recorder
) -> None:
    first, second = ready_jobs(worker, tenant, 2)
    let_go = recorder.hold(first)
    worker.train_next()  # returns only if the second update does not wait for the first commit
    load = worker.load()
    let_go.set()
    worker.hand.wait_until_empty()
    assert first in {uuid.UUID(p["job"]) for p in load["publishing"]}
    assert load["round"] is None
    assert recorder.events.index(("update", second)) < recorder.events.index(("commit", first))
    assert [versions_and_steps(job_id) for job_id in (first, second)] == [[(0, 0), (1, 1)]] * 2
    assert worker.load() | {"busy_seconds": 0} == {
        "round": None,
        "job": None,
        "publishing": [],
        "streaming": None,
        "updates": 2,
        "busy_seconds": 0,
    }


def test_no_more_is_claimed_than_there_is_room_for(
    worker: TrainingWorker, tenant: Tenant, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.hand, "_room", 1)
    first, second = ready_jobs(worker, tenant, 2)
    let_go = recorder.hold(first)
    thread = in_thread(worker.train_next)
    wait_for(lambda: worker.load()["publishing"], SECONDS, "the first round is to be published")
    assert by_hand.live_round(second).state == "ready"
    let_go.set()
    thread.join(SECONDS)
    worker.hand.wait_until_empty()
    assert recorder.events == [("update", first), ("commit", first), ("update", second), ("commit", second)]


def test_a_slow_upload_does_not_keep_a_neighbours_commit(
    worker: TrainingWorker, tenant: Tenant, recorder: Recorder
) -> None:
    slow, quick = ready_jobs(worker, tenant, 2)
    recorder.hold(slow)
    worker.train_next()
    wait_for(lambda: ("commit", quick) in recorder.events, SECONDS, "the neighbour is to commit")
    assert ("commit", slow) not in recorder.events


def test_a_failing_upload_gives_its_own_round_back(
    worker: TrainingWorker, tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other bytes lie under the key of the first job's upload, so storage refuses it however often it is tried."""
    monkeypatch.setattr(retry, "PAUSES", (0.0,))
    bad, good = ready_jobs(worker, tenant, 2)
    prefix = storage.version_prefix(tenant.id, bad, 1, by_hand.live_round(bad).attempt + 1)
    storage.put(f"{prefix}adapter/{WEIGHTS_FILE}", b"other bytes")
    worker.train_next()
    worker.hand.wait_until_empty()
    worker.train_next()  # the round that was given back, in case it came too late for the first pass
    worker.hand.wait_until_empty()
    assert [versions_and_steps(job_id) for job_id in (bad, good)] == [[(0, 0), (1, 1)]] * 2
    with transaction() as session:
        assert [session.get_one(PolicyVersion, (job_id, 1)).attempt for job_id in (bad, good)] == [2, 1]


def test_a_round_that_is_to_run_alone_waits_for_what_is_published(
    worker: TrainingWorker, tenant: Tenant, recorder: Recorder
) -> None:
    first, suspect = ready_jobs(worker, tenant, 2)
    losses = get_settings().losses_before_alone
    by_hand.execute("UPDATE rounds SET losses = :losses WHERE job_id = :job", losses=losses, job=suspect)
    let_go = recorder.hold(first)
    thread = in_thread(worker.train_next)
    wait_for(lambda: len(worker.hand.held()) == 2, SECONDS, "the suspect is to be claimed")
    let_go.set()
    thread.join(SECONDS)
    assert recorder.events == [("update", first), ("commit", first), ("update", suspect), ("commit", suspect)]


def test_a_round_that_another_worker_took_over_is_not_committed_twice(
    worker: TrainingWorker, tenant: Tenant, recorder: Recorder, tmp_path: Path
) -> None:
    """As after a pause of the whole machine: the lease ran out between the update and the commit."""
    (job_id,) = ready_jobs(worker, tenant, 1)
    let_go = recorder.hold(job_id)
    worker.train_next()
    by_hand.expire_leases("rounds")
    recovery.sweep()
    other = new_worker(tmp_path / "other")
    other.train_next()
    other.hand.wait_until_empty()
    assert versions_and_steps(job_id) == [(0, 0), (1, 1)]
    let_go.set()
    worker.hand.wait_until_empty()
    assert versions_and_steps(job_id) == [(0, 0), (1, 1)]
    assert by_hand.job(job_id).state == "running"


def test_each_lease_is_renewed_by_progress_of_its_own_until_its_own_deadline(
    worker: TrainingWorker, tenant: Tenant
) -> None:
    jobs = ready_jobs(worker, tenant, 3)
    held = [Held(claim=claim) for claim in (by_hand.claim_training() for _ in jobs) if claim]
    for one in held:
        worker.hand.add(one)
    worker.hand.renew()
    by_hand.expire_leases("rounds")
    going, silent, late = held
    going.tick()
    late.tick()
    late.since -= get_settings().training_deadline_seconds + 1
    worker.hand.renew()
    live = "lease_until > now() AND id = :id"
    assert [by_hand.execute(f"UPDATE rounds SET id = id WHERE {live}", id=h.claim.round_id) for h in held] == [1, 0, 0]
    for one in (going, silent, late):
        worker.hand.remove(one)


def test_the_process_ends_only_after_what_it_publishes(
    worker: TrainingWorker, tenant: Tenant, recorder: Recorder
) -> None:
    (job_id,) = ready_jobs(worker, tenant, 1)
    let_go = recorder.hold(job_id)
    worker.train_next()
    stopping = in_thread(worker.runtime.stop)
    wait_for(lambda: worker.runtime.leaving, SECONDS, "the worker is to leave")
    let_go.set()
    stopping.join(SECONDS)
    assert ("commit", job_id) in recorder.events
    assert worker.runtime._stop.is_set()


def test_a_worker_that_is_leaving_claims_no_more(worker: TrainingWorker, tenant: Tenant) -> None:
    (job_id,) = ready_jobs(worker, tenant, 1)
    worker.runtime.leaving = True
    worker.train_next()
    assert by_hand.live_round(job_id).state == "ready"
