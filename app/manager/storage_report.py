"""What storage holds, of whom, what is kept how long, and what goes next."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from sqlalchemy import text
from sqlalchemy.orm import Session

from app.manager.retention import PARTITION
from app.models.object import ObjectKind
from app.settings import get_settings

ADAPTER_KINDS = (ObjectKind.ADAPTER_MODEL, ObjectKind.ADAPTER_CONFIG)


@dataclass(frozen=True)
class Amount:
    objects: int = 0
    bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.objects + other.objects, self.bytes + other.bytes)


NOTHING = Amount()


@dataclass
class Holding:
    """Live objects of a tenant, or of all."""

    tenant_id: uuid.UUID | None
    tenant: str
    kinds: dict[str, Amount] = field(default_factory=dict)

    @property
    def adapters(self) -> Amount:
        return sum((self.kinds.get(kind, NOTHING) for kind in ADAPTER_KINDS), NOTHING)

    @property
    def optimizers(self) -> Amount:
        return self.kinds.get(ObjectKind.OPTIMIZER, NOTHING)

    @property
    def zips(self) -> Amount:
        return self.kinds.get(ObjectKind.ADAPTER_ZIP, NOTHING)

    @property
    def files(self) -> Amount:
        return self.kinds.get(ObjectKind.FILE, NOTHING)

    @property
    def total(self) -> Amount:
        return sum(self.kinds.values(), NOTHING)


@dataclass(frozen=True)
class Leaving:
    """Objects on their way out."""

    expired: Amount  # marked; deleted once no link to them can be valid any more
    expired_kinds: dict[str, Amount]  # what those are, the largest first
    next_deletion: datetime | None
    pending: Amount  # announced and not committed: an upload, or an orphan once it is old enough
    next_orphan: datetime | None
    surplus_optimizers: Amount  # live, and more than a job keeps: marked at the next pass


@dataclass(frozen=True)
class TurnsPart:
    """A partition of the turns' table: rounds [first, last], dropped as a whole."""

    first_round: int
    last_round: int
    bytes: int
    rounds: int
    last_finished: datetime | None
    drops_at: datetime | None  # None: rounds of it are live, or it is not full yet


@dataclass(frozen=True)
class Storage:
    at: datetime
    tenants: list[Holding]  # the largest first
    total: Holding
    leaving: Leaving
    turns: list[TurnsPart]
    database_bytes: int


def storage(session: Session) -> Storage:
    """Reads the whole table of objects: to be kept for a while."""
    holdings: dict[uuid.UUID, Holding] = {}
    total = Holding(None, "all tenants")
    for row in session.execute(
        text(
            "SELECT o.tenant_id, t.name, o.kind, count(*) AS objects, sum(o.size)::bigint AS bytes FROM objects o"
            " JOIN tenants t ON t.id = o.tenant_id WHERE o.state = 'live' GROUP BY 1, 2, 3"
        )
    ):
        amount = Amount(row.objects, row.bytes)
        holdings.setdefault(row.tenant_id, Holding(row.tenant_id, row.name)).kinds[row.kind] = amount
        total.kinds[row.kind] = total.kinds.get(row.kind, NOTHING) + amount
    return Storage(
        at=datetime.now(UTC),
        tenants=sorted(holdings.values(), key=lambda h: (-h.total.bytes, h.tenant)),
        total=total,
        leaving=_leaving(session),
        turns=_turns(session),
        database_bytes=session.execute(text("SELECT pg_database_size(current_database())")).scalar_one(),
    )


def deletion_wait() -> timedelta:
    """Between mark and deletion: the longest that a link or a load may last."""
    settings = get_settings()
    return timedelta(seconds=settings.presign_seconds + settings.training_deadline_seconds)


def _leaving(session: Session) -> Leaving:
    rows = session.execute(
        text(
            "SELECT state, kind, count(*) AS objects, sum(size)::bigint AS bytes, min(state_at) AS oldest FROM objects"
            " WHERE state IN ('pending', 'expired') GROUP BY 1, 2 ORDER BY bytes DESC, kind"
        )
    ).all()
    surplus = session.execute(
        text(
            "SELECT count(*), coalesce(sum(size), 0)::bigint FROM (SELECT size, row_number() OVER"
            " (PARTITION BY job_id ORDER BY version DESC) AS place FROM objects"
            " WHERE kind = 'optimizer' AND state = 'live') ranked WHERE place > :keep"
        ),
        {"keep": get_settings().keep_optimizer_states},
    ).one()

    def kinds(state: str) -> dict[str, Amount]:
        return {row.kind: Amount(row.objects, row.bytes) for row in rows if row.state == state}

    def due(state: str, wait: timedelta) -> datetime | None:
        return min((row.oldest + wait for row in rows if row.state == state), default=None)

    return Leaving(
        expired=sum(kinds("expired").values(), NOTHING),
        expired_kinds=kinds("expired"),
        next_deletion=due("expired", deletion_wait()),
        pending=sum(kinds("pending").values(), NOTHING),
        next_orphan=due("pending", timedelta(seconds=get_settings().orphan_seconds)),
        surplus_optimizers=Amount(surplus[0], surplus[1]),
    )


def _turns(session: Session) -> list[TurnsPart]:
    rows = session.execute(
        text(
            "SELECT p.number, p.bytes, count(r.id) AS rounds, max(r.finished_at) AS finished,"
            " count(r.id) FILTER (WHERE r.finished_at IS NULL) AS unfinished,"
            " (p.number + 1) * :size <= (SELECT coalesce(max(id), 0) FROM rounds) AS full_"
            " FROM (SELECT substring(c.relname FROM 8)::bigint AS number, pg_total_relation_size(c.oid) AS bytes"
            "  FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'turns'::regclass) p"
            " LEFT JOIN rounds r ON r.id >= p.number * :size AND r.id < (p.number + 1) * :size"
            " GROUP BY 1, 2 ORDER BY 1"
        ),
        {"size": PARTITION},
    )
    kept = timedelta(days=get_settings().keep_rounds_days)
    return [
        TurnsPart(
            first_round=row.number * PARTITION,
            last_round=(row.number + 1) * PARTITION - 1,
            bytes=row.bytes,
            rounds=row.rounds,
            last_finished=row.finished,
            drops_at=row.finished + kept if row.finished and row.full_ and not row.unfinished else None,
        )
        for row in rows
    ]
