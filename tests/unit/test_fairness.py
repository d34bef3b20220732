"""Fairness as properties: of any demands, shares and capacities, not of examples."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from app.manager.fairness import Demand, Ready, Share, allocate, next_to_train

WEIGHTS = st.sampled_from((0.25, 0.5, 1.0, 2.0, 3.0, 10.0))
Given = dict[Hashable, int]


@st.composite
def demands(draw: st.DrawFn, most_jobs: int = 8, most_tenants: int = 4) -> list[Demand]:
    count = draw(st.integers(0, most_jobs))
    return [
        Demand(
            round=i,
            tenant=f"t{draw(st.integers(0, most_tenants - 1))}",
            waiting=draw(st.integers(0, 12)),
            running=draw(st.integers(0, 12)),
            age=draw(st.integers(0, 100)),
            weight=draw(WEIGHTS),
            adapter=f"a{draw(st.integers(0, most_jobs - 1))}",
        )
        for i in range(count)
    ]


@st.composite
def shares(draw: st.DrawFn, room: st.SearchStrategy[int] = st.integers(0, 30)) -> dict[Hashable, Share]:  # noqa: B008
    return {f"t{i}": Share(draw(WEIGHTS), draw(room)) for i in range(4)}


CAPACITY = st.integers(0, 64)
UNLIMITED = shares(st.just(10**6))


def waits(found: list[Demand], given_: Given) -> list[Demand]:
    return [d for d in found if d.waiting > given_.get(d.round, 0)]


def load(found: list[Demand], given_: Given) -> dict[Hashable, float]:
    """Slots by tenant, after the allocation."""
    held: dict[Hashable, float] = defaultdict(float)
    for d in found:
        held[d.tenant] += d.running + given_.get(d.round, 0)
    return held


def by_tenant(found: list[Demand], given_: Given) -> dict[Hashable, int]:
    got: dict[Hashable, int] = defaultdict(int)
    for d in found:
        got[d.tenant] += given_.get(d.round, 0)
    return got


@given(CAPACITY, demands(), shares(), st.none() | st.integers(0, 8))
def test_never_more_than_there_are_slots(
    capacity: int, found: list[Demand], share: dict[Hashable, Share], adapters: int | None
) -> None:
    assert sum(allocate(capacity, found, share, adapters).values()) <= capacity


@given(CAPACITY, demands(), shares(), st.none() | st.integers(0, 8))
def test_never_more_than_wait(
    capacity: int, found: list[Demand], share: dict[Hashable, Share], adapters: int | None
) -> None:
    waiting = {d.round: d.waiting for d in found}
    assert all(0 < n <= waiting[r] for r, n in allocate(capacity, found, share, adapters).items())


@given(CAPACITY, demands(), shares(), st.none() | st.integers(0, 8))
def test_never_more_than_a_tenants_quota(
    capacity: int, found: list[Demand], share: dict[Hashable, Share], adapters: int | None
) -> None:
    got = by_tenant(found, allocate(capacity, found, share, adapters))
    assert all(n <= share[t].room for t, n in got.items())


@given(CAPACITY, demands(), shares(), st.integers(0, 8))
def test_never_more_adapters_than_have_a_slot(
    capacity: int, found: list[Demand], share: dict[Hashable, Share], adapters: int
) -> None:
    given_ = allocate(capacity, found, share, adapters)
    before = {d.adapter for d in found if d.running}
    after = before | {d.adapter for d in found if given_.get(d.round)}
    assert len(after) <= max(adapters, len(before))


@given(CAPACITY, demands(), shares(), st.none() | st.integers(0, 8))
def test_a_slot_stays_free_only_if_nobody_may_have_it(
    capacity: int, found: list[Demand], share: dict[Hashable, Share], adapters: int | None
) -> None:
    given_ = allocate(capacity, found, share, adapters)
    if sum(given_.values()) == capacity:
        return
    got = by_tenant(found, given_)
    in_use = {d.adapter for d in found if d.running or given_.get(d.round)}
    for d in waits(found, given_):
        no_room = got[d.tenant] >= share[d.tenant].room
        no_adapter = adapters is not None and d.adapter not in in_use and len(in_use) >= adapters
        assert no_room or no_adapter


@given(CAPACITY, demands(), shares())
def test_no_tenant_that_got_a_slot_is_ahead_of_one_that_waits(
    capacity: int, found: list[Demand], share: dict[Hashable, Share]
) -> None:
    """Weighted max-min: who got a slot had, before the last one, no more for its weight than who still waits."""
    given_ = allocate(capacity, found, share)
    held, got = load(found, given_), by_tenant(found, given_)
    waiting = {d.tenant for d in waits(found, given_) if got[d.tenant] < share[d.tenant].room}
    for rich in (t for t, n in got.items() if n):
        for poor in waiting - {rich}:
            assert (held[rich] - 1) / share[rich].weight <= held[poor] / share[poor].weight


@given(CAPACITY, demands(), shares())
def test_no_job_that_got_a_slot_is_ahead_of_one_of_its_tenant_that_waits(
    capacity: int, found: list[Demand], share: dict[Hashable, Share]
) -> None:
    given_ = allocate(capacity, found, share)
    for rich in (d for d in found if given_.get(d.round)):
        for poor in waits(found, given_):
            if poor.tenant == rich.tenant and poor.round != rich.round:
                held = rich.running + given_[rich.round] - 1
                assert held / rich.weight <= (poor.running + given_.get(poor.round, 0)) / poor.weight


@given(CAPACITY, demands(), UNLIMITED)
def test_a_tenant_that_waits_has_its_share(capacity: int, found: list[Demand], share: dict[Hashable, Share]) -> None:
    """Among tenants of equal weight that start from nothing and all want more, slots differ by one at most."""
    found = [replace(d, running=0, waiting=100) for d in found]
    equal: dict[Hashable, Share] = {t: replace(s, weight=1.0) for t, s in share.items()}
    got = by_tenant(found, allocate(capacity, found, equal))
    assert not got or max(got.values()) - min(got.values()) <= 1


@given(demands(), shares(), st.none() | st.integers(0, 8))
def test_the_order_of_the_demands_does_not_matter_between_ages(
    found: list[Demand], share: dict[Hashable, Share], adapters: int | None
) -> None:
    found = [replace(d, age=float(i), adapter=d.round) for i, d in enumerate(found)]
    assert allocate(10, found, share, adapters) == allocate(10, found[::-1], share, adapters)


@given(st.integers(1, 6), demands(), UNLIMITED, st.integers(1, 4))
def test_nobody_starves(capacity: int, found: list[Demand], share: dict[Hashable, Share], adapters: int) -> None:
    """A churn without end: in each step the oldest running episode ends and its slot goes to somebody; a job whose
    round is through opens the next one at once. Everyone is let in before the others have gone through eight rounds
    each (most often one; in a hundred thousand trials four), whatever their weights, also where adapters must take
    turns."""
    live = [replace(d, running=0, waiting=d.waiting + 1, adapter=(d.round, 0)) for d in found]
    running: deque[int] = deque()
    got: set[Hashable] = set()
    for step in range(8 * sum(d.waiting for d in live) + 1):
        given_ = allocate(capacity - len(running), live, share, adapters)
        got |= given_.keys()
        for i, d in enumerate(live):
            n = given_.get(d.round, 0)
            running.extend([i] * n)
            live[i] = replace(d, running=d.running + n, waiting=d.waiting - n, age=d.age + 1)
        if len(got) == len(live):
            return
        ended = running.popleft()
        d = live[ended]
        live[ended] = replace(d, running=d.running - 1)
        if d.running == 1 and not d.waiting:  # its next round, at its next version
            live[ended] = replace(d, running=0, waiting=found[ended].waiting + 1, age=0, adapter=(d.round, step + 1))
    raise AssertionError(f"{len(live) - len(got)} of {len(live)} jobs got nothing")


# --- who trains next


@st.composite
def buffers(draw: st.DrawFn) -> list[Ready]:
    count = draw(st.integers(1, 8))
    times = draw(st.lists(st.integers(0, 100), min_size=count, max_size=count))
    return [Ready(i, f"t{draw(st.integers(0, 3))}", float(at)) for i, at in enumerate(times)]


SPENT = st.dictionaries(st.sampled_from(("t0", "t1", "t2", "t3")), st.floats(0, 1000))
TENANT_WEIGHTS = st.fixed_dictionaries({f"t{i}": WEIGHTS for i in range(4)})


@given(buffers(), SPENT, TENANT_WEIGHTS)
def test_the_tenant_with_the_least_training_for_its_weight_is_next(
    ready: list[Ready], spent: dict[Hashable, float], weights: dict[Hashable, float]
) -> None:
    chosen = ready[next_to_train(ready, spent, weights)]
    least = min(spent.get(r.tenant, 0.0) / weights[r.tenant] for r in ready)
    assert spent.get(chosen.tenant, 0.0) / weights[chosen.tenant] == least


@given(buffers(), SPENT, TENANT_WEIGHTS)
def test_a_tenants_rounds_are_first_in_first_out(
    ready: list[Ready], spent: dict[Hashable, float], weights: dict[Hashable, float]
) -> None:
    chosen = ready[next_to_train(ready, spent, weights)]
    assert chosen.ready_at == min(r.ready_at for r in ready if r.tenant == chosen.tenant)


@given(TENANT_WEIGHTS)
def test_training_time_goes_by_weight_while_all_have_something(weights: dict[Hashable, float]) -> None:
    spent: dict[Hashable, float] = dict.fromkeys(weights, 0.0)
    ready = [Ready(i, t, 0.0) for i, t in enumerate(weights)]
    for _ in range(400):
        spent[ready[next_to_train(ready, spent, weights)].tenant] += 1.0
    # A tenant may be one update, for its weight, ahead of what is due to it.
    most = 1 / min(weights.values())
    by_weight = [spent[t] / weights[t] for t in weights]
    assert max(by_weight) - min(by_weight) <= most + 1e-9
