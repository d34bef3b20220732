"""Who may generate next: pure functions, weighted max-min fair over tenants, then over the jobs of a tenant."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """A round that wants engine slots."""

    round: Hashable
    tenant: Hashable
    waiting: int  # episodes not admitted yet
    running: int  # episodes that hold a slot now
    age: float = 0.0  # seconds since it was opened: the older goes first among equals
    weight: float = 1.0  # of the job inside its tenant
    adapter: Hashable = None  # the policy version it needs in an engine's slot


@dataclass(frozen=True, slots=True)
class Share:
    weight: float = 1.0
    room: int = 1 << 30  # how many more episodes the tenant's quota lets in flight


def allocate(
    capacity: int, demands: Sequence[Demand], shares: Mapping[Hashable, Share], adapter_slots: int | None = None
) -> dict[Hashable, int]:
    """Hands out `capacity` free slots one by one: each to the tenant with the least running episodes for its weight,
    there to the job with the least for its weight, the oldest round first among equals. Returns how many episodes to
    admit, by round.

    Work-conserving: a slot stays free only when nobody who waits may have it. Nobody starves: who runs nothing comes
    before all who run something, however heavy these are. `adapter_slots` bounds how many adapters are in use at once.
    """
    given: dict[Hashable, int] = defaultdict(int)
    room = {tenant: share.room for tenant, share in shares.items()}
    adapters = {d.adapter for d in demands if d.running > 0}
    tenant_load: dict[Hashable, float] = defaultdict(float)
    for demand in demands:
        tenant_load[demand.tenant] += demand.running
    jobs: dict[Hashable, list[tuple[float, float, int]]] = defaultdict(list)
    for order, demand in enumerate(demands):
        if demand.waiting > 0:
            heapq.heappush(jobs[demand.tenant], (demand.running / demand.weight, -demand.age, order))
    tenants = [(tenant_load[t] / shares[t].weight, heap[0][1], i, t) for i, (t, heap) in enumerate(jobs.items())]
    heapq.heapify(tenants)
    while capacity > 0 and tenants:
        _, _, i, tenant = heapq.heappop(tenants)
        heap = jobs[tenant]
        if room[tenant] <= 0 or not heap:
            continue
        _, _, order = heapq.heappop(heap)
        demand = demands[order]
        fits = adapter_slots is None or demand.adapter in adapters or len(adapters) < adapter_slots
        if fits:
            adapters.add(demand.adapter)
            given[demand.round] += 1
            capacity -= 1
            room[tenant] -= 1
            tenant_load[tenant] += 1
            if given[demand.round] < demand.waiting:
                load = (demand.running + given[demand.round]) / demand.weight
                heapq.heappush(heap, (load, -demand.age, order))
        if heap:
            heapq.heappush(tenants, (tenant_load[tenant] / shares[tenant].weight, heap[0][1], i, tenant))
    return dict(given)


@dataclass(frozen=True, slots=True)
class Ready:
    """A round whose trajectories are complete."""

    round: int
    tenant: Hashable
    ready_at: float


def next_to_train(ready: Sequence[Ready], spent: Mapping[Hashable, float], weights: Mapping[Hashable, float]) -> int:
    """First in, first out, between tenants by who has had the least training time for its weight of late."""
    return min(ready, key=lambda r: (spent.get(r.tenant, 0.0) / weights[r.tenant], r.ready_at, r.round)).round
