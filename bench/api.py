"""Fifty clients of the tenant API while jobs train: how quick the answers are, and what they cost the training; and
how quick the console is with twenty of it open.

Windows with and without clients alternate on the same running jobs, so that both sides see the same machine.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import func, select

from app.api import ids
from app.base_models import DEFAULT_MODEL
from app.db import transaction
from app.embedded.ports import choose_ports
from app.manager import jobs, operators, tenants
from app.models import Episode, Tenant
from app.models.round import EpisodeState
from bench import service
from bench.clients import Orders
from bench.mixed import SETUP, Size, documents
from bench.report import console, save, table

TENANTS = 5
CONSOLES = 20
THINK_SECONDS = 1.0
PAIRS = 2  # windows without clients and with
WARM_SECONDS = 30.0


def main(state_dir: Path, clients: int, seconds: float) -> None:
    (port,) = choose_ports([18_100])
    setup = replace(SETUP, web=True, settings={**SETUP.settings, "MARLAAS_WEB_PORT": str(port)})
    with service.running_workers(setup, state_dir):
        owners = [service.tenant() for _ in range(TENANTS)]
        # Endless jobs: they are cancelled at the end.
        running = [
            service.submit(owner, document)
            for owner, document in zip(owners, documents(Size(100_000, 2, 4)), strict=False)
        ]
        orders = Orders(
            url=f"http://127.0.0.1:{port}/v1",
            keys=[key_of(owner) for owner in owners],
            jobs=[ids.job_id(job_id) for job_id in running],
            models=[DEFAULT_MODEL] * TENANTS,
            clients=clients,
            seconds=seconds,
            think_seconds=THINK_SECONDS,
            consoles=0,
            operator="bench",
            password=operator(),
        )
        time.sleep(WARM_SECONDS)
        load(replace(orders, seconds=5))  # warm
        quiet, busy, samples = [], [], []
        for _ in range(PAIRS):
            quiet.append(progress(seconds, lambda: time.sleep(seconds)))
            busy.append(progress(seconds, lambda: samples.extend(load(orders))))
        samples.extend(load(replace(orders, clients=0, consoles=CONSOLES)))
        for job_id in running:
            with transaction() as session:
                jobs.cancel(session, job_id)
    report(clients, seconds * PAIRS, samples, quiet, busy)


def key_of(owner: Tenant) -> str:
    with transaction() as session:
        return tenants.create_key(session, owner, "bench")[1]


def operator() -> str:
    """An operator `bench` for the console; returns the password."""
    password = secrets.token_urlsafe()
    with transaction() as session:
        operators.create(session, "bench", password, "viewer")
    return password


def load(orders: Orders) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.clients"],
        input=orders.as_json(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=service.ROOT,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def progress(seconds: float, work: Any) -> float:
    """Episodes that the jobs finished a second while `work` went on: finer than their steps."""
    before, started = finished(), time.monotonic()
    work()
    return (finished() - before) / (time.monotonic() - started)


def finished() -> int:
    with transaction() as session:
        return session.scalar(select(func.count()).where(Episode.state == EpisodeState.FINISHED)) or 0


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def report(
    clients: int, seconds: float, samples: Sequence[dict[str, Any]], quiet: Sequence[float], busy: Sequence[float]
) -> None:
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sample in samples:
        by_kind[sample["kind"]].append(sample)
    shown = table(
        f"{clients} clients that think {THINK_SECONDS:g} s between requests, while {TENANTS} jobs train",
        "request",
        "a second",
        "p50 ms",
        "p99 ms",
        "refused (429)",
        "failed",
    )
    figures = {}
    for kind in ("list", "retrieve", "events", "chat", "console"):
        found = by_kind[kind]
        answered = [1000 * s["seconds"] for s in found if s["status"] == 200]
        if not answered:
            continue
        figures[kind] = {
            "per_second": len(found) / (seconds if kind != "console" else seconds / PAIRS),
            "p50_ms": percentile(answered, 0.5),
            "p99_ms": percentile(answered, 0.99),
            "refused": sum(s["status"] == 429 for s in found),
            "failed": sum(s["status"] not in (200, 429) for s in found),
        }
        one = figures[kind]
        shown.add_row(
            kind if kind != "console" else f"{CONSOLES} open consoles, without clients",
            f"{one['per_second']:.1f}",
            f"{one['p50_ms']:.0f}",
            f"{one['p99_ms']:.0f}",
            str(one["refused"]),
            str(one["failed"]),
        )
    console.print(shown)
    slowdown = median(quiet) / median(busy)
    console.print(
        f"training: {median(quiet):.2f} episodes/s without clients, {median(busy):.2f} with them:"
        f" [bold]{slowdown:.2f}[/] times slower ({len(quiet)} windows a side)"
    )
    save(
        "api",
        {
            "clients": clients,
            "think_seconds": THINK_SECONDS,
            "requests_per_second": sum(s["kind"] != "console" for s in samples) / seconds,
            "by_request": figures,
            "episodes_per_second_quiet": list(quiet),
            "episodes_per_second_busy": list(busy),
            "slowdown": slowdown,
        },
    )
