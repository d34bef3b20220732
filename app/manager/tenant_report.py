"""Tenants for operators: what each has taken of its quotas, and when it was last here."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from app.errors import NotFound
from app.models import Tenant

MOST_TENANTS = 500


@dataclass(frozen=True)
class TenantLoad:
    tenant: Tenant
    running_jobs: int
    live_jobs: int  # queued, running and paused ones
    in_flight: int  # episodes
    keys: int  # that are neither revoked nor expired
    last_used_at: datetime | None  # any of its keys


@dataclass(frozen=True)
class TenantFiles:
    count: int
    bytes: int


_LOADS = """
WITH wanted AS (SELECT CAST(unnest(CAST(:ids AS uuid[])) AS uuid) AS id),
jobs_of AS (
    SELECT tenant_id, count(*) AS live, count(*) FILTER (WHERE state = 'running') AS running FROM jobs
    WHERE state NOT IN ('succeeded', 'failed', 'cancelled') AND kind = 'train' GROUP BY 1
),
flight AS (
    SELECT tenant_id, count(*) AS episodes FROM episodes WHERE state IN ('resetting', 'generating', 'acting') GROUP BY 1
),
keys AS (
    SELECT tenant_id, count(*) FILTER (WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())) AS good,
        max(last_used_at) AS last_used
    FROM api_keys WHERE tenant_id IN (SELECT id FROM wanted) GROUP BY 1
)
SELECT w.id, coalesce(j.running, 0) AS running, coalesce(j.live, 0) AS live, coalesce(f.episodes, 0) AS in_flight,
    coalesce(k.good, 0) AS keys, k.last_used
FROM wanted w LEFT JOIN jobs_of j ON j.tenant_id = w.id LEFT JOIN flight f ON f.tenant_id = w.id
LEFT JOIN keys k ON k.tenant_id = w.id
"""


def list_loads(session: Session, search: str = "") -> list[TenantLoad]:
    """Tenants whose name contains `search`, by name, at most MOST_TENANTS."""
    found = session.scalars(
        select(Tenant).where(Tenant.name.icontains(search, autoescape=True)).order_by(Tenant.name).limit(MOST_TENANTS)
    ).all()
    return _loads(session, found)


def load(session: Session, tenant_id: uuid.UUID) -> TenantLoad:
    """Raises NotFound."""
    tenant = session.get(Tenant, tenant_id)
    if tenant is None:
        raise NotFound(f"There is no tenant {tenant_id}.", param="tenant")
    return _loads(session, [tenant])[0]


def _loads(session: Session, tenants: Sequence[Tenant]) -> list[TenantLoad]:
    rows = {row.id: row for row in session.execute(text(_LOADS), {"ids": [t.id for t in tenants]})}
    return [
        TenantLoad(t, row.running, row.live, row.in_flight, row.keys, row.last_used)
        for t in tenants
        for row in [rows[t.id]]
    ]


def files(session: Session, tenant_id: uuid.UUID) -> TenantFiles:
    row = session.execute(
        text(
            "SELECT count(*) AS files, coalesce(sum(o.size), 0)::bigint AS bytes FROM files f JOIN objects o"
            " ON o.id = f.object_id WHERE f.tenant_id = :tenant AND f.deleted_at IS NULL"
        ),
        {"tenant": tenant_id},
    ).one()
    return TenantFiles(row.files, row.bytes)


def count(session: Session) -> int:
    return session.execute(select(func.count()).select_from(Tenant)).scalar_one()
