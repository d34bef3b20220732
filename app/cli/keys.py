"""`marlaas key …`: a tenant's API keys. The secret is shown once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from app.cli.output import Cell, JsonFlag, TenantName, ago, columns, print_json, say, short, show
from app.db import transaction
from app.manager import tenants

app = typer.Typer(no_args_is_help=True, help="API keys of a tenant.")

FIELDS = ("id", "name", "prefix", "scopes", "created_at", "expires_at", "last_used_at", "revoked_at")
CELLS: dict[str, Cell] = {
    "ID": lambda k: short(k.id),
    "NAME": lambda k: k.name,
    "KEY": lambda k: f"{k.prefix}…",
    "SCOPES": lambda k: " ".join(k.scopes),
    "CREATED": lambda k: ago(k.created_at),
    "LAST USED": lambda k: ago(k.last_used_at),
    "STATE": lambda k: _state(k.revoked_at, k.expires_at),
}


def _state(revoked_at: datetime | None, expires_at: datetime | None) -> str:
    if revoked_at is not None:
        return "revoked"
    if expires_at is None:
        return "active"
    return f"until {expires_at:%Y-%m-%d}" if expires_at > datetime.now(UTC) else "expired"


@app.command()
def create(
    name: str,
    tenant: TenantName,
    scopes: Annotated[list[str], typer.Option("--scope", help="read, write; may be given twice.")] = list(  # noqa: B006
        tenants.SCOPES
    ),
    days: Annotated[float | None, typer.Option("--expires-days", min=0.001, help="Lifetime; default: no end.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Creates a key and shows its secret, this once."""
    expires_at = None if days is None else datetime.now(UTC) + timedelta(days=days)
    with transaction() as session:
        key, secret = tenants.create_key(session, tenants.find_tenant(session, tenant), name, scopes, expires_at)
        session.refresh(key)
    if as_json:
        print_json(columns(key, *FIELDS) | {"secret": secret})
        return
    say(f"created key {short(key.id)} of tenant {tenant}; keep the secret, it is not shown again:")
    print(secret)


@app.command("list")
def list_(tenant: TenantName, as_json: JsonFlag = False) -> None:
    """Shows a tenant's keys, without their secrets."""
    with transaction() as session:
        rows = tenants.list_keys(session, tenants.find_tenant(session, tenant))
    show(rows, CELLS, as_json, empty=f"tenant {tenant} has no keys", data=[columns(k, *FIELDS) for k in rows])


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="Start of the key's id or of the key.")],
    tenant: TenantName,
    as_json: JsonFlag = False,
) -> None:
    """Ends a key: requests with it are refused from now on."""
    with transaction() as session:
        owner = tenants.find_tenant(session, tenant)
        found = tenants.find_key(session, owner, key)
        tenants.revoke_key(session, owner, found.id)
        session.flush()
        session.refresh(found)
    if as_json:
        print_json(columns(found, *FIELDS))
    else:
        say(f"revoked key {short(found.id)} ({found.name})")
