"""`marlaas tenant …`: who may use the service, and how much of it."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from app.cli.output import Cell, JsonFlag, ago, columns, print_json, say, show
from app.db import transaction
from app.manager import tenants
from app.models import Tenant

app = typer.Typer(no_args_is_help=True, help="Tenants: weights, quotas, suspension.")

FIELDS = ("id", "name", "weight", *tenants.QUOTAS, "suspended", "created_at")
CELLS: dict[str, Cell] = {
    "TENANT": lambda t: t.name,
    "WEIGHT": lambda t: t.weight,
    "RUNNING JOBS": lambda t: f"at most {t.max_running_jobs}",
    "EPISODES IN FLIGHT": lambda t: f"at most {t.max_inflight_episodes}",
    "STATE": lambda t: "suspended" if t.suspended else "active",
    "CREATED": lambda t: ago(t.created_at),
}

Weight = Annotated[float | None, typer.Option(help="Share of the hardware against other tenants.")]
RunningJobs = Annotated[int | None, typer.Option("--max-running-jobs", help="Jobs that run at once.")]
LiveJobs = Annotated[int | None, typer.Option("--max-live-jobs", help="Jobs that queue, run or pause.")]
Episodes = Annotated[int | None, typer.Option("--max-inflight-episodes", help="Episodes in flight at once.")]
Chats = Annotated[int | None, typer.Option("--max-chat-requests", help="Completions at once.")]
Requests = Annotated[int | None, typer.Option("--requests-per-minute", help="API requests of one key.")]
FileBytes = Annotated[int | None, typer.Option("--max-file-bytes", help="All files together.")]


@app.command()
def create(
    name: str,
    weight: Weight = None,
    jobs: RunningJobs = None,
    live: LiveJobs = None,
    episodes: Episodes = None,
    chats: Chats = None,
    requests: Requests = None,
    file_bytes: FileBytes = None,
    as_json: JsonFlag = False,
) -> None:
    """Creates a tenant."""
    given = {"weight": weight, **_quotas(jobs, live, episodes, chats, requests, file_bytes)}
    with transaction() as session:
        tenant = tenants.create_tenant(session, name, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
        session.refresh(tenant)
    then = f"marlaas key create NAME --tenant {shlex.quote(tenant.name)}"
    _tell(tenant, f"created tenant {tenant.name}; next: {then}", as_json)


@app.command("list")
def list_(as_json: JsonFlag = False) -> None:
    """Shows all tenants."""
    with transaction() as session:
        rows = tenants.list_tenants(session)
    show(rows, CELLS, as_json, empty="no tenants; marlaas tenant create NAME", data=[columns(t, *FIELDS) for t in rows])


@app.command("set")
def set_(
    name: str,
    weight: Weight = None,
    jobs: RunningJobs = None,
    live: LiveJobs = None,
    episodes: Episodes = None,
    chats: Chats = None,
    requests: Requests = None,
    file_bytes: FileBytes = None,
    suspend: Annotated[
        bool | None, typer.Option("--suspend/--unsuspend", help="Stop giving it work, or go on.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Changes a tenant's weight or quotas, suspends it, or lifts that. Running jobs follow at once."""
    with transaction() as session:
        tenant = tenants.change_tenant(
            session,
            tenants.find_tenant(session, name),
            weight=weight,
            suspended=suspend,
            **_quotas(jobs, live, episodes, chats, requests, file_bytes),
        )
    _tell(tenant, f"changed tenant {tenant.name}", as_json)


def _quotas(*given: int | None) -> dict[str, int | None]:
    """By column, in the order of the options."""
    columns_ = ("max_running_jobs", "max_live_jobs", "max_inflight_episodes", "max_chat_requests")
    return dict(zip((*columns_, "requests_per_minute", "max_file_bytes"), given, strict=True))


def _tell(tenant: Tenant, message: str, as_json: bool) -> None:
    if as_json:
        print_json(columns(tenant, *FIELDS))
    else:
        say(message)
