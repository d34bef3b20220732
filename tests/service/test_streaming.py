"""Groups computed ahead of their round: the same bits as without, never anything stale, and nothing held for it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app import broker
from app.db import transaction
from app.models import StepMetrics, Tenant
from app.settings import get_settings
from tests import by_hand
from tests.service.conftest import Bells
from tests.trainers import new_worker, play_round, published_bits, start_job
from workers.training.worker import TrainingWorker


@pytest.fixture
def worker(hand: None, tmp_path: Path) -> Iterator[TrainingWorker]:
    made = new_worker(tmp_path / "cache")
    yield made
    made.hand.wait_until_empty()


def train(worker: TrainingWorker) -> None:
    worker.train_next()
    worker.hand.wait_until_empty()


def streamed(job_id: uuid.UUID, version: int = 1) -> float:
    """How many groups of an update were computed before it."""
    with transaction() as session:
        metrics: dict[str, float] = session.get_one(StepMetrics, (job_id, version)).metrics
    return metrics.get("streamed_groups", 0.0)


@pytest.mark.parametrize("changes", [{}, {"hyperparameters": {"kl_coefficient": 0.1}}], ids=["plain", "kl"])
def test_a_streamed_round_is_committed_with_the_bits_of_an_unstreamed_one(
    worker: TrainingWorker, tenant: Tenant, changes: dict[str, object]
) -> None:
    ahead, after = (start_job(worker, tenant, name=name, seed=1, **changes) for name in ("ahead", "after"))
    for version in (1, 2):
        groups = play_round(ahead, seed=version, groups=[1])
        worker.stream(groups[1])
        play_round(ahead, seed=version)
        train(worker)
        play_round(after, seed=version)
        train(worker)
        assert (streamed(ahead, version), streamed(after, version)) == (1, 0)
        assert published_bits(ahead, version) == published_bits(after, version)
    assert published_bits(ahead, 1) != published_bits(ahead, 2)


def test_sums_are_lost_with_their_process_and_nothing_else_is(
    worker: TrainingWorker, tenant: Tenant, tmp_path: Path
) -> None:
    killed, undisturbed = (start_job(worker, tenant, name=name, seed=1) for name in ("killed", "undisturbed"))
    worker.stream(play_round(killed, groups=[0])[0])
    play_round(killed)
    train(new_worker(tmp_path / "other"))
    play_round(undisturbed)
    train(worker)
    assert streamed(killed) == 0
    assert published_bits(killed, 1) == published_bits(undisturbed, 1)


def test_sums_of_other_trajectories_are_not_used(worker: TrainingWorker, tenant: Tenant) -> None:
    """Closed episodes never change; if one did, its group would be computed anew."""
    changed, reference = (start_job(worker, tenant, name=name, seed=1) for name in ("changed", "reference"))
    worker.stream(play_round(changed, groups=[0])[0])
    play_round(changed)
    play_round(reference)
    assert by_hand.execute("UPDATE episodes SET reward = 1 - reward") == 8
    train(worker)
    assert (streamed(changed), streamed(reference)) == (0, 0)
    assert published_bits(changed, 1) == published_bits(reference, 1)


def recorded(order: list[str], name: str, call: Callable[..., object]) -> Callable[..., object]:
    def wrapper(*args: object, **more: object) -> object:
        order.append(name)
        return call(*args, **more)

    return wrapper


def test_a_ready_round_goes_first(worker: TrainingWorker, tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    going, ready = (start_job(worker, tenant, name=name, seed=i) for i, name in enumerate(("going", "ready")))
    group = play_round(going, groups=[0])[0]
    play_round(ready)
    order: list[str] = []
    for name in ("update", "group_sums"):
        monkeypatch.setattr(worker.trainer, name, recorded(order, name, getattr(worker.trainer, name)))
    worker.stream(group)
    worker.hand.wait_until_empty()
    assert order == ["update", "group_sums"]
    assert by_hand.job(ready).version == 1


def test_an_open_group_is_left_alone(worker: TrainingWorker, tenant: Tenant) -> None:
    job_id = start_job(worker, tenant)
    worker.stream(play_round(job_id, groups=[0])[1])
    assert worker.streaming.rounds == set()


def test_what_was_computed_for_an_abandoned_round_is_dropped(worker: TrainingWorker, tenant: Tenant) -> None:
    gone, going = (start_job(worker, tenant, name=name, seed=i) for i, name in enumerate(("gone", "going")))
    group = play_round(gone, groups=[0])[0]
    worker.stream(group)
    assert worker.streaming.rounds == {by_hand.live_round(gone).id}
    by_hand.cancel(gone)
    worker.stream(group)  # its message may come late, or twice
    assert worker.streaming.rounds == set()
    worker.stream(play_round(going, groups=[0])[0])
    assert worker.streaming.rounds == {by_hand.live_round(going).id}


def test_a_job_that_is_paused_or_a_worker_that_drains_computes_nothing_ahead(
    worker: TrainingWorker, tenant: Tenant
) -> None:
    job_id = start_job(worker, tenant)
    group = play_round(job_id, groups=[0])[0]
    worker.runtime.draining = True
    worker.stream(group)
    assert worker.streaming.rounds == set()
    worker.runtime.draining = False
    by_hand.pause(job_id)
    worker.stream(group)
    assert worker.streaming.rounds == set()


def test_a_group_that_cannot_be_computed_is_the_updates_to_judge(worker: TrainingWorker, tenant: Tenant) -> None:
    job_id = start_job(worker, tenant)
    group = play_round(job_id, groups=[0])[0]
    by_hand.execute("UPDATE objects SET sha256 = repeat('0', 64), key = 'gone' WHERE kind = 'adapter_config'")
    worker.stream(group)
    assert by_hand.job(job_id).state == "running"
    play_round(job_id)
    train(worker)
    assert by_hand.job(job_id).error_code == "object_missing"


# --- doorbells


def test_a_group_that_closes_before_its_round_is_rung_for_once(tenant: Tenant, bells: Bells) -> None:
    job_id = by_hand.start_job(tenant)
    group = play_round(job_id, groups=[0])[0]
    assert bells.of(broker.STREAM) == [{"group_id": group}]
    play_round(job_id)  # the last group makes the round ready, which has a bell of its own
    assert bells.of(broker.STREAM) == [{"group_id": group}]
    assert len(bells.of(broker.TRAIN)) == 1


def test_nothing_is_rung_for_a_round_of_several_steps(tenant: Tenant, bells: Bells) -> None:
    job_id = by_hand.start_job(tenant, hyperparameters={"minibatches": 2})
    play_round(job_id, groups=[0])
    assert bells.of(broker.STREAM) == []


def test_nothing_is_rung_where_streaming_is_off(tenant: Tenant, bells: Bells, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_settings(), "train_streaming", False)
    play_round(by_hand.start_job(tenant), groups=[0])
    assert bells.of(broker.STREAM) == []
