"""Prometheus metrics at `/metrics`: the service as Postgres and Redis know it, and the requests of this web process.

Figures of the service are read when somebody asks, at most once in `CACHE_SECONDS`; those of a part that does not
answer are left out, and `marlaas_up` says so. No label names a tenant or a job: there are as many series as states,
queues, workers and routes.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import redis
import structlog
from flask import Flask, Response, g, request
from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from sqlalchemy import func, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app import broker
from app.db import transaction
from app.manager.workers import live_workers
from app.models import BaseModel, Episode, Job, Round
from app.models.job import JobKind, JobState
from app.models.round import OPEN, RoundState
from app.models.worker import WorkerKind
from app.settings import get_settings

log = structlog.get_logger(__name__)

CACHE_SECONDS = 5.0
DATABASE_TIMEOUT, REDIS_TIMEOUT = "5s", 3.0
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}  # any other word is a client's invention
LIVE_ROUNDS = (RoundState.ROLLING_OUT, RoundState.READY, RoundState.TRAINING)


def install(app: Flask) -> None:
    """Adds the route `/metrics` to an app and counts all its requests."""
    registry = CollectorRegistry()
    registry.register(ServiceCollector())
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    requests = Counter(
        "marlaas_http_requests", "Requests answered.", ["method", "endpoint", "status"], registry=registry
    )
    latency = Histogram(
        "marlaas_http_request_seconds",
        "Time to the answer, of a stream to its beginning.",
        ["method", "endpoint"],
        buckets=LATENCY_BUCKETS,
        registry=registry,
    )

    @app.before_request
    def start_clock() -> None:
        g.metrics_started = time.perf_counter()

    @app.after_request
    def count(response: Response) -> Response:
        method = request.method if request.method in METHODS else "other"
        endpoint = request.endpoint or "none"  # a path or method that no route has
        requests.labels(method, endpoint, response.status_code).inc()
        latency.labels(method, endpoint).observe(time.perf_counter() - g.metrics_started)
        return response

    def metrics() -> Response:
        """In the text format of Prometheus. With `MARLAAS_METRICS_TOKEN` only for whoever shows it as bearer."""
        token = get_settings().metrics_token
        shown = request.headers.get("Authorization", "")
        if token and not hmac.compare_digest(shown.encode(), b"Bearer " + token.get_secret_value().encode()):
            return Response("show the token of MARLAAS_METRICS_TOKEN\n", 401, {"WWW-Authenticate": "Bearer"})
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return Response(encode(registry), content_type=content_type)

    app.add_url_rule("/metrics", view_func=metrics)


class ServiceCollector(Collector):
    """What Postgres and Redis know, remembered for `CACHE_SECONDS`. Scrapes that come together read once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: list[Metric] = []
        self._read_at = float("-inf")
        self._queues: list[str] = [*WorkerKind]  # of the last time that Postgres told the base models

    def describe(self) -> Iterable[Metric]:
        return []  # without it, registering would read

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            if time.monotonic() - self._read_at > CACHE_SECONDS:
                self._read = self._read_parts()
                self._read_at = time.monotonic()
            return self._read

    def _read_parts(self) -> list[Metric]:
        up = GaugeMetricFamily("marlaas_up", "Whether this part of the service answered.", labels=["part"])
        read: list[Metric] = [up]
        parts: list[tuple[str, Callable[[], list[Metric]], type[Exception]]] = [
            ("database", self._from_database, SQLAlchemyError),
            ("redis", self._from_redis, redis.RedisError),
        ]
        for part, read_part, away in parts:
            try:
                read += read_part()
            except away as error:
                log.warning("no_metrics", part=part, error=str(error).splitlines()[0])
                up.add_metric([part], 0)
            else:
                up.add_metric([part], 1)
        return read

    def _from_database(self) -> list[Metric]:
        with transaction() as session:
            session.execute(text(f"SET LOCAL statement_timeout = '{DATABASE_TIMEOUT}'"))
            suffixes = session.scalars(select(BaseModel.queue_suffix)).all()
            read = [*_jobs(session), *_rounds(session), *_workers(session)]
        self._queues = [
            WorkerKind.MANAGER,
            WorkerKind.TOOLS,
            *(f"{kind}{suffix}" for kind in (WorkerKind.ROLLOUT, WorkerKind.TRAINING) for suffix in suffixes or [""]),
        ]
        return read

    def _from_redis(self) -> list[Metric]:
        url = get_settings().redis_url.get_secret_value()
        with redis.Redis.from_url(url, socket_timeout=REDIS_TIMEOUT, socket_connect_timeout=REDIS_TIMEOUT) as client:
            lengths = {queue: client.llen(queue) for queue in self._queues}
            sent_at = client.get(broker.SWEEP_SENT_AT)
        depths = _gauge("marlaas_queue_messages", "Doorbells that wait in Redis.", "queue", lengths)
        if sent_at is None:
            return [depths]
        age = max(0.0, time.time() - float(sent_at))
        return [
            depths,
            GaugeMetricFamily("marlaas_sweep_sent_seconds", "Time since beat last sent a sweep.", value=age),
        ]


def _jobs(session: Session) -> list[Metric]:
    rows = session.execute(
        select(Job.state, func.count(), func.sum(Job.version)).where(Job.kind == JobKind.TRAIN).group_by(Job.state)
    ).all()
    jobs: dict[str, float] = dict.fromkeys(JobState, 0) | {state: count for state, count, _ in rows}
    commits = sum(versions for _, _, versions in rows)  # versions have no gaps
    return [
        _gauge("marlaas_jobs", "Jobs, by state.", "state", jobs),
        CounterMetricFamily("marlaas_commits", "Policy versions committed, all jobs.", value=commits),
    ]


def _rounds(session: Session) -> list[Metric]:
    rounds: dict[str, float] = dict.fromkeys(LIVE_ROUNDS, 0)
    states = select(Round.state, func.count()).where(Round.state.in_(LIVE_ROUNDS)).group_by(Round.state)
    rounds.update(session.execute(states).all())
    episodes: dict[str, float] = dict.fromkeys(OPEN, 0)
    states = (
        select(Episode.state, func.count())
        .join(Round, Round.id == Episode.round_id)
        .where(Round.state == RoundState.ROLLING_OUT, Episode.state.in_(OPEN))
        .group_by(Episode.state)
    )
    episodes.update(session.execute(states).all())
    oldest = session.execute(
        text(
            "SELECT"
            " (SELECT min(created_at) FROM jobs WHERE state = 'queued' AND wanted = 'run') AS start,"
            " (SELECT min(r.created_at) FROM rounds r WHERE r.state = 'rolling_out' AND EXISTS ("
            "  SELECT FROM episodes e WHERE e.round_id = r.id AND e.state = 'waiting')) AS rollout,"
            " (SELECT min(ready_at) FROM rounds WHERE state = 'ready') AS training,"
            " clock_timestamp() AS now"
        )
    ).one()
    ages = {
        stage: (oldest.now - since).total_seconds() if since else 0.0
        for stage, since in oldest._mapping.items()
        if stage != "now"
    }
    return [
        _gauge("marlaas_rounds", "Live rounds, by state.", "state", rounds),
        _gauge("marlaas_episodes", "Open episodes of live rounds, by state.", "state", episodes),
        _gauge("marlaas_oldest_waiting_seconds", "Age of what waits longest for a stage; 0: nothing.", "stage", ages),
    ]


def _workers(session: Session) -> list[Metric]:
    """Counters are of each process since its start, as it announced them."""
    labels = ["kind", "worker"]
    alive: dict[str, float] = dict.fromkeys(WorkerKind, 0)
    draining = alive.copy()
    slots = speed = 0.0
    busy = CounterMetricFamily("marlaas_worker_busy_seconds", "Time spent with work.", labels=labels)
    tokens = CounterMetricFamily("marlaas_worker_generated_tokens", "Tokens sampled by the engine.", labels=labels)
    updates = CounterMetricFamily("marlaas_worker_updates", "Updates made by the trainer.", labels=labels)
    for worker in live_workers(session):
        alive[worker.kind] += 1
        draining[worker.kind] += worker.draining
        speed += worker.load.get("tokens_per_second", 0.0)
        slots += worker.slots if worker.kind == WorkerKind.ROLLOUT else 0
        for family, name in ((busy, "busy_seconds"), (tokens, "generated_tokens"), (updates, "updates")):
            if name in worker.load:
                family.add_metric([worker.kind, worker.name], worker.load[name])
    return [
        _gauge("marlaas_workers", "Workers alive.", "kind", alive),
        _gauge("marlaas_workers_draining", "Of these, the ones that take no more work.", "kind", draining),
        GaugeMetricFamily("marlaas_engine_slots", "Episodes that all engines decode at once.", value=slots),
        GaugeMetricFamily("marlaas_tokens_per_second", "Tokens sampled a second, all engines.", value=speed),
        busy,
        tokens,
        updates,
    ]


def _gauge(name: str, help: str, label: str, values: Mapping[Any, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family
