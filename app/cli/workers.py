"""`marlaas worker …`: who works, at what, and letting a worker finish."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.output import Cell, JsonFlag, ago, columns, print_json, say, show
from app.db import transaction
from app.manager import workers

app = typer.Typer(no_args_is_help=True, help="Workers: what they do, draining.")

FIELDS = ("name", "kind", "base_model", "slots", "adapter_slots", "draining", "load", "started_at", "seen_at")
CELLS: dict[str, Cell] = {
    "WORKER": lambda w: w.name,
    "STAGE": lambda w: w.kind,
    "MODEL": lambda w: w.base_model,
    "BUSY": lambda w: f"{w.load['running']}/{w.slots}" if "running" in w.load else None,
    "ADAPTERS": lambda w: len(w.load["resident"]) if "resident" in w.load else None,
    "TOKENS/S": lambda w: w.load.get("tokens_per_second"),
    "STATE": lambda w: "draining" if w.draining else "working",
    "UP": lambda w: ago(w.started_at),
    "SEEN": lambda w: ago(w.seen_at),
}
Name = Annotated[str, typer.Argument(help="As `marlaas worker list` shows it, e.g. rollout@host.")]


@app.command("list")
def list_(as_json: JsonFlag = False) -> None:
    """Shows the workers that are alive."""
    with transaction() as session:
        rows = workers.live_workers(session)
    show(
        rows,
        CELLS,
        as_json,
        empty="no worker is alive; `marlaas up` starts them, or celery -A workers worker -Q rollout",
        data=[columns(w, *FIELDS) for w in rows],
    )


@app.command()
def drain(name: Name, as_json: JsonFlag = False) -> None:
    """Lets a worker finish what it has and gives it no more."""
    _set(name, True, as_json)


@app.command()
def undrain(name: Name, as_json: JsonFlag = False) -> None:
    """Gives a draining worker work again."""
    _set(name, False, as_json)


def _set(name: str, draining: bool, as_json: bool) -> None:
    with transaction() as session:
        workers.set_draining(session, name, draining)
    if as_json:
        print_json({"name": name, "draining": draining})
    else:
        say(f"{name} {'finishes what it has and takes no more' if draining else 'takes work again'}")
