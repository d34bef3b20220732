"""Clients of the tenant API, in a process of their own: `python -m bench.clients` reads its orders from stdin as JSON
and prints what it measured as JSON.

A client asks, waits for the answer, thinks for a while, and asks again, as scripts and dashboards do.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import httpx

# In a client's order; a tenth of the requests is a completion.
MIX = ("list", "retrieve", "events", "list", "retrieve", "events", "list", "retrieve", "events", "chat")


@dataclass(frozen=True)
class Orders:
    url: str
    keys: list[str]  # one a tenant; clients take them in turn
    jobs: list[str]  # one a tenant
    models: list[str]  # one a tenant, for completions
    clients: int
    seconds: float
    think_seconds: float

    def as_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Sample:
    kind: str
    status: int  # 0: no answer
    seconds: float


def request(client: httpx.AsyncClient, kind: str, job: str, model: str) -> Any:
    if kind == "list":
        return client.get("/fine_tuning/jobs", params={"limit": 20})
    if kind == "retrieve":
        return client.get(f"/fine_tuning/jobs/{job}")
    if kind == "events":
        return client.get(f"/fine_tuning/jobs/{job}/events", params={"limit": 20})
    body = {"model": model, "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 8}
    return client.post("/chat/completions", json=body)


async def one_client(orders: Orders, number: int, until: float) -> list[Sample]:
    tenant = number % len(orders.keys)
    wait = random.Random(number)
    samples = []
    headers = {"Authorization": f"Bearer {orders.keys[tenant]}"}
    async with httpx.AsyncClient(base_url=orders.url, headers=headers, timeout=120) as client:
        await asyncio.sleep(wait.uniform(0, orders.think_seconds))
        for kind in kinds(number):
            if time.monotonic() >= until:
                return samples
            started = time.perf_counter()
            try:
                status = (await request(client, kind, orders.jobs[tenant], orders.models[tenant])).status_code
            except httpx.HTTPError:
                status = 0
            samples.append(Sample(kind, status, time.perf_counter() - started))
            await asyncio.sleep(wait.uniform(0.5, 1.5) * orders.think_seconds)
    return samples


def kinds(start: int) -> Iterator[str]:
    while True:
        yield MIX[start % len(MIX)]
        start += 1


async def run(orders: Orders) -> list[Sample]:
    until = time.monotonic() + orders.seconds
    found = await asyncio.gather(*(one_client(orders, number, until) for number in range(orders.clients)))
    return [sample for samples in found for sample in samples]


if __name__ == "__main__":
    samples = asyncio.run(run(Orders(**json.load(sys.stdin))))
    json.dump([asdict(sample) for sample in samples], sys.stdout)
