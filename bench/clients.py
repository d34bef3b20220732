"""Clients of the tenant API and open consoles, in a process of their own.

`python -m bench.clients` reads its orders from stdin as JSON and prints what it measured as JSON. A client asks, waits
for the answer, thinks for a while, and asks again, as scripts and dashboards do. A console asks for what the overview
shows every two seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import httpx2 as httpx

POLL_SECONDS = 2.0
FRAGMENTS = ("/fragments/overview/figures", "/fragments/overview/queues", "/data/timeline?minutes=5")
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
    consoles: int
    operator: str
    password: str

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


async def one_console(orders: Orders, number: int, until: float) -> list[Sample]:
    samples = []
    url = orders.url.removesuffix("/v1") + "/console"
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        login = await client.get("/login")
        token = re.search(r'name="csrf_token"[^>]*value="([^"]+)"', login.text)
        form = {"name": orders.operator, "password": orders.password, "csrf_token": token[1] if token else ""}
        await client.post("/login", data=form)
        await asyncio.sleep(random.Random(number).uniform(0, POLL_SECONDS))
        while time.monotonic() < until:
            started = time.perf_counter()
            answers = await asyncio.gather(*(timed(client, fragment) for fragment in FRAGMENTS))
            samples.extend(answers)
            await asyncio.sleep(max(0.0, POLL_SECONDS - (time.perf_counter() - started)))
    return samples


async def timed(client: httpx.AsyncClient, url: str) -> Sample:
    started = time.perf_counter()
    status = (await client.get(url)).status_code
    return Sample("console", status, time.perf_counter() - started)


def kinds(start: int) -> Iterator[str]:
    while True:
        yield MIX[start % len(MIX)]
        start += 1


async def run(orders: Orders) -> list[Sample]:
    until = time.monotonic() + orders.seconds
    found = await asyncio.gather(
        *(one_client(orders, number, until) for number in range(orders.clients)),
        *(one_console(orders, number, until) for number in range(orders.consoles)),
    )
    return [sample for samples in found for sample in samples]


if __name__ == "__main__":
    samples = asyncio.run(run(Orders(**json.load(sys.stdin))))
    json.dump([asdict(sample) for sample in samples], sys.stdout)
