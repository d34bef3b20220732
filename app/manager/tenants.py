"""Tenants and their keys. A key is shown once; its hash stays."""

from __future__ import annotations

import hashlib
import re
import secrets
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.errors import Conflict, InvalidRequest, NotFound
from app.manager import doorbells
from app.models import ApiKey, Tenant

SCOPES = ("read", "write")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}", re.ASCII)  # models are called by it: ft:<base>:<tenant>:…
MAX_WEIGHT = 1e6
MAX_QUOTA = 2**31 - 1
MAX_BYTES = 2**50

# The columns of a tenant that limit it, each with the most that it may be.
QUOTAS = {
    "max_running_jobs": MAX_QUOTA,
    "max_live_jobs": MAX_QUOTA,
    "max_inflight_episodes": MAX_QUOTA,
    "max_chat_requests": MAX_QUOTA,
    "requests_per_minute": MAX_QUOTA,
    "max_file_bytes": MAX_BYTES,
}


def create_tenant(session: Session, name: str, *, weight: float = 1.0, **quotas: int) -> Tenant:
    """`quotas` are of QUOTAS; the others have their defaults. Raises InvalidRequest, Conflict."""
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            "a tenant's name has 1 to 64 letters (A to Z), digits, spaces, dots, dashes and underscores, the first a"
            " letter or digit",
            param="name",
        )
    _check_limits(weight, quotas)
    tenant = Tenant(name=name, weight=weight, **quotas)
    try:
        with session.begin_nested():
            session.add(tenant)
    except IntegrityError as error:
        raise Conflict(f"a tenant named {name!r} exists already", param="name") from error
    return tenant


def change_tenant(
    session: Session,
    tenant: Tenant,
    *,
    weight: float | None = None,
    suspended: bool | None = None,
    **quotas: int | None,
) -> Tenant:
    """Changes what is given and rings for admission, as work may be let in now that was not before."""
    _check_limits(weight, quotas)
    for field, value in (quotas | {"weight": weight, "suspended": suspended}).items():
        if value is not None:
            setattr(tenant, field, value)
    doorbells.ring_admission(session)
    return tenant


def _check_limits(weight: float | None, quotas: Mapping[str, int | None]) -> None:
    if weight is not None and not 0 < weight <= MAX_WEIGHT:
        raise InvalidRequest(f"weight must be above 0 and at most {MAX_WEIGHT:g}", param="weight")
    for field, quota in quotas.items():
        if quota is not None and not 0 <= quota <= QUOTAS[field]:
            raise InvalidRequest(f"{field} must be 0 to {QUOTAS[field]}", param=field)


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
    if not 1 <= len(name) <= 64 or not name.isprintable():
        raise InvalidRequest("a key's name has 1 to 64 printable characters", param="name")
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


def find_key(session: Session, tenant: Tenant, text: str) -> ApiKey:
    """A key of the tenant by the start (4 characters or more) of its id, or of the key itself as it is shown."""
    wanted = text.strip()
    found = [
        key
        for key in list_keys(session, tenant)
        if len(wanted) >= 4 and (str(key.id).startswith(wanted.lower()) or key.prefix == wanted.rstrip("…")[:9])
    ]
    if not found:
        raise NotFound(f"tenant {tenant.name!r} has no key {text!r}; `marlaas key list` shows them", param="key")
    if len(found) > 1:
        raise InvalidRequest(f"{len(found)} keys match {text!r}; give more of the id", param="key")
    return found[0]


def revoke_key(session: Session, tenant: Tenant, key_id: uuid.UUID) -> None:
    key = session.scalars(select(ApiKey).where(ApiKey.tenant_id == tenant.id, ApiKey.id == key_id)).first()
    if key is None:
        raise NotFound(f"tenant {tenant.name!r} has no key {key_id}", param="key")
    if key.revoked_at is None:
        key.revoked_at = func.now()
