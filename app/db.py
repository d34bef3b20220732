"""Database engines and sessions for the three roles, and the hook that publishes messages after commit.

owner: migrations. service: workers, manager, console. api: tenant requests, under row-level security.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from app.settings import get_settings

Role = Literal["owner", "service", "api"]

AFTER_COMMIT = "marlaas_after_commit"
TENANT = "marlaas_tenant"


@lru_cache
def engine(role: Role) -> Engine:
    """The connection pool of a role. Without a login of its own the owner's login takes the role."""
    settings = get_settings()
    own = {"owner": None, "service": settings.database_service_url, "api": settings.database_api_url}[role]
    url = make_url((own or settings.database_url).get_secret_value())
    options = "-c lock_timeout=10s -c idle_in_transaction_session_timeout=60s"
    if role == "api":
        options += " -c statement_timeout=15s"  # no tenant's question may take a connection for long
    if role != "owner" and own is None:
        options += f" -c role=marlaas_{role}"
    return create_engine(
        url,
        pool_pre_ping=True,
        pool_size=10,
        max_overflow=40,
        hide_parameters=True,  # they hold tenants' text and hashes of keys
        connect_args={"options": options, "connect_timeout": 10, "application_name": f"marlaas-{role}"},
    )


def dispose_engines() -> None:
    """Closes the pools, for a process that forks or a test that moves to another database."""
    for role in ("owner", "service", "api"):
        engine(role).dispose()
    engine.cache_clear()


@contextmanager
def transaction(role: Role = "service", tenant_id: uuid.UUID | None = None) -> Iterator[Session]:
    """One transaction. Messages given to `after_commit` go out once it is committed, and only then."""
    with Session(engine(role), expire_on_commit=False) as session:
        if tenant_id is not None:
            session.info[TENANT] = str(tenant_id)
        with session.begin():
            yield session
        for publish in session.info.pop(AFTER_COMMIT, []):
            publish()


def after_commit(session: Session, publish: Callable[[], object]) -> None:
    """Calls `publish` when the session's transaction has committed; a rollback forgets it (rule 6)."""
    session.info.setdefault(AFTER_COMMIT, []).append(publish)


@event.listens_for(Session, "after_begin")
def _set_tenant(session: Session, transaction: object, connection: Connection) -> None:
    """Row-level security reads this setting; `true` binds it to the transaction."""
    if tenant := session.info.get(TENANT):
        connection.execute(text("SELECT set_config('marlaas.tenant', :tenant, true)"), {"tenant": tenant})
