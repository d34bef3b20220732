"""/metrics against the real services: right figures, the format of Prometheus, partial when a part is away."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

from app import broker, db, storage
from app.embedded import EmbeddedStack
from app.models import Tenant
from app.settings import Settings, get_settings
from app.web import create_app
from tests import by_hand

Sample = tuple[str, tuple[tuple[str, str], ...]]


@pytest.fixture
def web(clean: str) -> FlaskClient:
    storage.client.cache_clear()
    return create_app().test_client()


@pytest.fixture
def client(stack: EmbeddedStack) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(get_settings().redis_url.get_secret_value()) as client:
        client.flushall()
        yield client
        client.flushall()


def scrape(web: FlaskClient) -> dict[Sample, float]:
    response = web.get("/metrics")
    assert response.status_code == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def value(samples: dict[Sample, float], name: str, **labels: str) -> float:
    return samples[(name, tuple(sorted(labels.items())))]


def test_an_empty_service_has_all_states_at_zero(web: FlaskClient) -> None:
    read = scrape(web)
    assert value(read, "marlaas_jobs", state="running") == 0
    assert value(read, "marlaas_episodes", state="waiting") == 0
    assert value(read, "marlaas_workers", kind="rollout") == 0
    assert value(read, "marlaas_up", part="database") == value(read, "marlaas_up", part="redis") == 1


def test_jobs_rounds_and_commits_are_counted(tenant: Tenant, web: FlaskClient) -> None:
    trained = by_hand.start_job(tenant)
    by_hand.step(trained)
    by_hand.start_job(tenant)
    by_hand.submit(tenant)
    read = scrape(web)
    assert value(read, "marlaas_jobs", state="running") == 2
    assert value(read, "marlaas_jobs", state="validating_files") == 1
    assert value(read, "marlaas_commits_total") == 1
    assert value(read, "marlaas_rounds", state="rolling_out") == 2


def test_episodes_are_counted_by_state_and_the_oldest_has_an_age(tenant: Tenant, web: FlaskClient) -> None:
    by_hand.start_job(tenant)
    by_hand.execute("UPDATE rounds SET created_at = now() - interval '100 s'")
    read = scrape(web)
    assert value(read, "marlaas_episodes", state="waiting") == 4
    assert 100 <= value(read, "marlaas_oldest_waiting_seconds", stage="rollout") < 160


def test_a_ready_round_waits_for_training(tenant: Tenant, web: FlaskClient) -> None:
    by_hand.finish_round(by_hand.start_job(tenant))
    by_hand.execute("UPDATE rounds SET ready_at = now() - interval '100 s'")
    read = scrape(web)
    assert value(read, "marlaas_rounds", state="ready") == 1
    assert 100 <= value(read, "marlaas_oldest_waiting_seconds", stage="training") < 160


def test_workers_that_are_alive_are_summed(hand: None, web: FlaskClient) -> None:
    load = {"tokens_per_second": 40.5, "generated_tokens": 900, "busy_seconds": 12.5}
    by_hand.announce(by_hand.Announcement("rollout@two", by_hand.uuid.uuid4(), "rollout", "tiny", 32, 8, load))
    by_hand.execute("UPDATE workers SET draining = true WHERE name = 'rollout@two'")
    read = scrape(web)
    assert value(read, "marlaas_workers", kind="rollout") == 2
    assert value(read, "marlaas_workers_draining", kind="rollout") == 1
    assert value(read, "marlaas_engine_slots") == 64 + 32
    assert value(read, "marlaas_tokens_per_second") == 40.5
    assert value(read, "marlaas_worker_generated_tokens_total", kind="rollout", worker="rollout@two") == 900
    assert value(read, "marlaas_worker_busy_seconds_total", kind="rollout", worker="rollout@two") == 12.5


def test_doorbells_in_redis_and_the_age_of_the_last_sweep(web: FlaskClient, client: redis.Redis) -> None:
    client.rpush("tools", "one", "two")
    client.set(broker.SWEEP_SENT_AT, time.time() - 30)
    read = scrape(web)
    assert value(read, "marlaas_queue_messages", queue="tools") == 2
    assert value(read, "marlaas_queue_messages", queue="manager") == 0
    assert 30 <= value(read, "marlaas_sweep_sent_seconds") < 90


def test_requests_are_counted_by_route_and_not_by_address(web: FlaskClient) -> None:
    web.get("/healthz")
    web.get("/healthz")
    web.get("/no/such/page")
    web.open("/healthz", method="INVENTED")
    read = scrape(web)
    assert value(read, "marlaas_http_requests_total", method="GET", endpoint="healthz", status="200") == 2
    assert value(read, "marlaas_http_requests_total", method="GET", endpoint="none", status="404") == 1
    assert value(read, "marlaas_http_requests_total", method="other", endpoint="none", status="405") == 1
    assert value(read, "marlaas_http_request_seconds_count", method="GET", endpoint="healthz") == 2


def test_no_label_names_a_tenant_or_a_job(tenant: Tenant, web: FlaskClient) -> None:
    job_id = by_hand.start_job(tenant, name="secret-plan")
    text = web.get("/metrics").text
    assert not [word for word in (tenant.name, str(tenant.id), str(job_id), "secret-plan") if word in text]


def test_figures_are_partial_while_redis_is_away(stack: EmbeddedStack, web: FlaskClient) -> None:
    stack.stop("valkey")
    try:
        read = scrape(web)
    finally:
        stack.start("valkey")
    assert value(read, "marlaas_up", part="redis") == 0
    assert value(read, "marlaas_jobs", state="running") == 0
    assert not [name for name, _ in read if name == "marlaas_queue_messages"]


def test_figures_are_partial_while_the_database_is_away(stack: EmbeddedStack, web: FlaskClient) -> None:
    stack.stop("postgres")
    try:
        read = scrape(web)
    finally:
        stack.start("postgres")
        db.dispose_engines()
    assert value(read, "marlaas_up", part="database") == 0
    assert value(read, "marlaas_queue_messages", queue="manager") == 0


def test_scrapes_that_come_soon_after_each_other_read_once(tenant: Tenant, web: FlaskClient) -> None:
    scrape(web)
    by_hand.start_job(tenant)
    assert value(scrape(web), "marlaas_jobs", state="running") == 0


@pytest.mark.parametrize(("header", "status"), [(None, 401), ("Bearer wrong", 401), ("Bearer right", 200)])
def test_a_token_is_asked_for_where_one_is_set(
    settings: Settings, web: FlaskClient, monkeypatch: pytest.MonkeyPatch, header: str | None, status: int
) -> None:
    monkeypatch.setattr(settings, "metrics_token", Settings(metrics_token="right").metrics_token)
    assert web.get("/metrics", headers={"Authorization": header} if header else {}).status_code == status
