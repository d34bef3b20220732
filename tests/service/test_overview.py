"""The overview's figures and the report on storage, against the real services."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
import redis

from app.console.overview import LANES
from app.db import transaction
from app.manager import jobs, overview, progress, storage_report, tenant_report
from app.manager.overview import Overview, Queue
from app.manager.progress import Phase
from app.models import Tenant
from app.settings import Settings, get_settings
from tests import by_hand


def figures() -> Overview:
    with transaction() as session:
        names = overview.queue_names(session)
    messages = overview.count_messages(names)
    with transaction() as session:
        return overview.overview(session, messages)


def queue(name: str) -> Queue:
    (found,) = [q for q in figures().queues if q.name == name]
    return found


# --- jobs by phase

PHASES = ("waiting", "resetting", "generating", "acting", "ready", "training")


@pytest.mark.parametrize("phase", PHASES)
def test_jobs_are_counted_in_the_phases_that_progress_tells(tenant: Tenant, phase: str) -> None:
    by_hand.queue_job(tenant)
    by_hand.submit(tenant)
    paused = by_hand.start_job(tenant)
    by_hand.pause(paused)
    by_hand.to_phase(by_hand.start_job(tenant), phase)
    with transaction() as session:
        told = Counter(str(job.phase) for job in progress.job_progress(session))
    assert figures().phases == told


def test_an_evaluation_after_the_last_step_is_a_phase(tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant, evaluation={"every": 1, "prompts": 1}, hyperparameters={"n_steps": 1})
    by_hand.step(job_id)
    assert figures().phases == {"evaluating": 1}


def test_each_live_phase_has_a_lane() -> None:
    lanes = [phase for _, phases, _ in LANES for phase in phases]
    live = set(Phase) - {Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED}
    assert sorted(lanes) == sorted(live)


# --- queues


def test_what_waits_is_counted_where_it_waits(tenant: Tenant) -> None:
    by_hand.queue_job(tenant)
    assert queue("quota").depth == 1
    with transaction() as session:
        jobs.start_queued(session)
    (job_id,) = figures_of_running(tenant)
    by_hand.publish_initial(job_id)
    assert queue("admission").depth == 4
    by_hand.admit()
    assert (queue("admission").depth, queue("tools").depth) == (0, 4)
    by_hand.reset(by_hand.live_round(job_id).id)
    assert (queue("tools").depth, queue("rollout").depth) == (0, 4)
    by_hand.finish_round(job_id)
    assert (queue("rollout").depth, queue("tools").depth, queue("training").depth) == (0, 0, 1)


def figures_of_running(tenant: Tenant) -> list:
    with transaction() as session:
        return [job.job_id for job in progress.job_progress(session)]


def test_a_queue_tells_its_oldest(tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant)
    by_hand.finish_round(job_id)
    by_hand.execute("UPDATE rounds SET ready_at = now() - interval '90 s'")
    assert queue("training").oldest_seconds == pytest.approx(90, abs=30)
    assert queue("rollout").oldest_seconds is None


def test_messages_are_counted_over_all_base_models(hand: None) -> None:
    by_hand.register_model("other")
    with redis.Redis.from_url(get_settings().redis_url.get_secret_value()) as client:
        client.delete("training", "training.other")
        client.rpush("training", "a")
        client.rpush("training.other", "a", "b")
        assert queue("training").messages == 3
        client.delete("training", "training.other")
        assert queue("training").messages == 0


# --- speed and busy time


def span(worker: str, phase: str, start: float, end: float) -> None:
    """Of any round, between so many seconds ago."""
    by_hand.execute(
        "INSERT INTO phase_spans (tenant_id, round_id, phase, worker, started_at, ended_at)"
        " SELECT tenant_id, id, :phase, :worker, now() - make_interval(secs => :start),"
        " now() - make_interval(secs => :end) FROM rounds LIMIT 1",
        phase=phase,
        worker=worker,
        start=start,
        end=end,
    )


@pytest.fixture
def old_workers(tenant: Tenant) -> None:
    """Workers that have run for longer than shares are of, and a round for their spans."""
    by_hand.start_job(tenant)
    by_hand.execute("UPDATE workers SET started_at = now() - interval '1 day'")


def test_time_with_several_rounds_at_once_counts_once(old_workers: None) -> None:
    for start, end in ((100, 40), (90, 50), (70, 10)):  # together 90 s of 300
        span(by_hand.ROLLOUT.name, "rollout", start, end)
    span(by_hand.TRAINING.name, "training", 60, 0)
    now = figures()
    assert now.rollout_busy == pytest.approx(0.3, abs=0.01)
    assert now.training_busy == pytest.approx(0.2, abs=0.01)


def test_time_before_the_window_and_of_the_dead_does_not_count(old_workers: None) -> None:
    span(by_hand.ROLLOUT.name, "rollout", 345, 270)  # 30 s of it within
    span("rollout@dead", "rollout", 200, 0)
    assert figures().rollout_busy == pytest.approx(0.1, abs=0.01)


def test_without_workers_there_is_no_share(hand: None) -> None:
    by_hand.execute("DELETE FROM workers")
    now = figures()
    assert (now.rollout_busy, now.training_busy, list(now.workers)) == (None, None, [])


def test_speed_and_steps_are_of_late(tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant)
    for _ in range(2):
        by_hand.step(job_id)
    by_hand.execute("UPDATE rounds SET finished_at = now() - interval '30 min' WHERE policy_version = 0")
    now = figures()
    assert now.steps_per_hour == 6.0  # one in ten minutes
    assert now.tokens_per_second == pytest.approx(8 * len(by_hand.GENERATED) / overview.SPEED_SECONDS)


# --- storage


def test_storage_is_summed_by_tenant_and_kind(tenant: Tenant, settings: Settings) -> None:
    job_id = by_hand.start_job(tenant, hyperparameters={"n_steps": 9, "prompts_per_round": 1, "group_size": 2})
    for _ in range(3):
        by_hand.step(job_id)
    with transaction() as session:
        report = storage_report.storage(session)
    (holding,) = report.tenants
    assert (holding.tenant, holding.adapters.objects, holding.optimizers.objects) == ("acme", 8, 4)
    assert report.total.total == holding.total
    assert holding.total.bytes == holding.adapters.bytes + holding.optimizers.bytes > 0
    assert report.leaving.surplus_optimizers.objects == 4 - settings.keep_optimizer_states
    assert [part.rounds > 0 for part in report.turns][:1] == [True]


def test_what_is_marked_tells_when_it_goes(tenant: Tenant) -> None:
    by_hand.start_job(tenant)
    by_hand.execute("UPDATE objects SET state = 'expired', state_at = now() WHERE kind = 'optimizer'")
    with transaction() as session:
        leaving = storage_report.storage(session).leaving
    assert leaving.expired.objects == leaving.expired_kinds["optimizer"].objects == 1
    assert leaving.next_deletion is not None
    assert abs(leaving.next_deletion - datetime.now(UTC) - storage_report.deletion_wait()) < timedelta(minutes=1)


# --- tenants


def test_a_tenants_load_is_told_beside_its_quotas(tenant: Tenant) -> None:
    by_hand.make_tenant("idle")
    by_hand.to_phase(by_hand.start_job(tenant), "generating")
    by_hand.submit(tenant)
    with transaction() as session:
        acme, idle = tenant_report.list_loads(session)
    assert (acme.running_jobs, acme.live_jobs, acme.in_flight, acme.keys) == (1, 2, 4, 0)
    assert (idle.running_jobs, idle.live_jobs, idle.in_flight, idle.keys) == (0, 0, 0, 0)
