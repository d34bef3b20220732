"""Who calls: a Bearer key, its tenant and scopes; and the transaction that sees this tenant's rows alone."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

import structlog
from flask import g, request
from sqlalchemy import text
from sqlalchemy.orm import Session

from app import db
from app.api import limits
from app.api.blueprint import annotate
from app.errors import Forbidden, Unauthorized
from app.manager.tenants import hash_secret
from app.models import Tenant

Scope = Literal["read", "write"]
View = Callable[..., Any]


@dataclass(frozen=True)
class Caller:
    tenant_id: uuid.UUID
    tenant_name: str
    key_id: uuid.UUID
    scopes: frozenset[str]


def requires(scope: Scope, max_bytes: int | None = None) -> Callable[[View], View]:
    """Lets a view run for keys with this scope: 401, 403, 429 otherwise. Stands above `@api.input`, so that nobody
    learns anything, and nothing is read, without a key. `max_bytes`: of the body, where it may be larger than usual.
    """

    def decorator(view: View) -> View:
        @wraps(view)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            g.caller = _admit(scope)
            if max_bytes is not None:
                request.max_content_length = max_bytes
            return view(*args, **kwargs)

        annotate(wrapper, scope=scope)
        return wrapper

    return decorator


def caller() -> Caller:
    """Of this request. Only inside views under `@requires`."""
    found: Caller = g.caller
    return found


def tenant_transaction() -> AbstractContextManager[Session]:
    """A transaction of the api role, bound to the caller's tenant by row-level security."""
    return db.transaction("api", caller().tenant_id)


def _admit(scope: Scope) -> Caller:
    found, tenant = _find(_secret())
    structlog.contextvars.bind_contextvars(tenant=str(found.tenant_id), key=str(found.key_id))
    limits.count_request(found.key_id, tenant.requests_per_minute)
    if scope not in found.scopes:
        raise Forbidden(f"This key lacks the scope {scope!r}. Use one that has it; an operator makes keys.")
    if scope == "write" and tenant.suspended:
        raise Forbidden(
            f"The tenant {tenant.name!r} is suspended and can read only. Ask an operator to lift that.",
            code="tenant_suspended",
        )
    return found


def _secret() -> str:
    header = request.authorization
    if header is None or header.type != "bearer" or not header.token:
        raise Unauthorized("Send an API key as `Authorization: Bearer mk-…`.", code="missing_api_key")
    return header.token


def _find(secret: str) -> tuple[Caller, Tenant]:
    with db.transaction("api") as session:
        key = session.execute(
            text("SELECT key_id, tenant_id, scopes FROM marlaas_find_key(:hash)"), {"hash": hash_secret(secret)}
        ).one_or_none()
        if key is None:
            raise Unauthorized("This API key is unknown, revoked or expired. Ask an operator for a new one.")
        session.execute(text("SELECT set_config('marlaas.tenant', :id, true)"), {"id": str(key.tenant_id)})
        tenant = session.get_one(Tenant, key.tenant_id)
    return Caller(tenant.id, tenant.name, key.key_id, frozenset(key.scopes)), tenant
