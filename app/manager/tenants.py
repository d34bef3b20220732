"""Tenants and their keys. A key is shown once; its hash stays."""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.errors import Conflict, InvalidRequest, NotFound
from app.models import ApiKey, Tenant

SCOPES = ("read", "write")


def create_tenant(
    session: Session, name: str, *, weight: float = 1.0, max_running_jobs: int = 4, max_inflight_episodes: int = 256
) -> Tenant:
    if not name or len(name) > 64 or not name.isprintable():
        raise InvalidRequest("a tenant's name has 1 to 64 printable characters", param="name")
    if weight <= 0:
        raise InvalidRequest("weight must be above 0", param="weight")
    if max_running_jobs < 0 or max_inflight_episodes < 0:
        raise InvalidRequest("a quota is 0 or more", param="max_running_jobs")
    tenant = Tenant(
        name=name, weight=weight, max_running_jobs=max_running_jobs, max_inflight_episodes=max_inflight_episodes
    )
    try:
        with session.begin_nested():
            session.add(tenant)
    except IntegrityError as error:
        raise Conflict(f"a tenant named {name!r} exists already", param="name") from error
    return tenant


def find_tenant(session: Session, name: str) -> Tenant:
    tenant = session.scalars(select(Tenant).where(Tenant.name == name)).first()
    if tenant is None:
        raise NotFound(f"no tenant is named {name!r}; `marlaas tenant list` shows them", param="tenant")
    return tenant


def list_tenants(session: Session) -> Sequence[Tenant]:
    return session.scalars(select(Tenant).order_by(Tenant.name)).all()


def hash_secret(secret: str) -> bytes:
    """The secret is 256 random bits, so one round of SHA-256 is as strong as it can be."""
    return hashlib.sha256(secret.encode()).digest()


def create_key(
    session: Session,
    tenant: Tenant,
    name: str,
    scopes: Sequence[str] = SCOPES,
    expires_at: datetime | None = None,
) -> tuple[ApiKey, str]:
    """Returns the row and the secret, which is not kept anywhere."""
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown or not scopes:
        raise InvalidRequest(f"scopes are of {', '.join(SCOPES)}, not {', '.join(unknown) or 'empty'}", param="scopes")
    secret = "mk-" + secrets.token_urlsafe(32)
    key = ApiKey(
        tenant_id=tenant.id,
        name=name,
        prefix=secret[:9],
        secret_hash=hash_secret(secret),
        scopes=list(scopes),
        expires_at=expires_at,
    )
    session.add(key)
    session.flush()
    return key, secret


def list_keys(session: Session, tenant: Tenant) -> Sequence[ApiKey]:
    return session.scalars(select(ApiKey).where(ApiKey.tenant_id == tenant.id).order_by(ApiKey.created_at)).all()


def revoke_key(session: Session, tenant: Tenant, key_id: uuid.UUID) -> None:
    key = session.scalars(select(ApiKey).where(ApiKey.tenant_id == tenant.id, ApiKey.id == key_id)).first()
    if key is None:
        raise NotFound(f"tenant {tenant.name!r} has no key {key_id}", param="key")
    if key.revoked_at is None:
        key.revoked_at = func.now()
