"""`marlaas file …`: a tenant's data files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.output import Cell, JsonFlag, TenantName, ago, columns, print_json, say, short, show, size
from app.db import transaction
from app.manager import files, tenants
from app.models import File, StoredObject

app = typer.Typer(no_args_is_help=True, help="Data files (JSON Lines) of a tenant.")

CELLS: dict[str, Cell] = {
    "ID": lambda row: row["id"],
    "NAME": lambda row: row["name"],
    "LINES": lambda row: row["lines"],
    "SIZE": lambda row: size(row["size"]),
    "CREATED": lambda row: row["ago"],
}


@app.command()
def upload(
    path: Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True)],
    tenant: TenantName,
    name: Annotated[str | None, typer.Option(help="Default: the file's own name.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Checks every line and stores the file. Give its id as environment.params.file_id of a `dataset` job."""
    with transaction() as session:
        owner = tenants.find_tenant(session, tenant)
    with path.open("rb") as stream:
        file = files.upload(owner.id, name or path.name, stream)
    if as_json:
        print_json(columns(file, "id", "name", "lines", "purpose", "created_at"))
    else:
        say(f"stored {file.lines} items as file {file.id}")


@app.command("list")
def list_(tenant: TenantName, as_json: JsonFlag = False) -> None:
    """Shows a tenant's files."""
    with transaction() as session:
        found = files.list_files(session, tenants.find_tenant(session, tenant))
    rows = [_row(file, stored) | {"ago": ago(file.created_at)} for file, stored in found]
    show(rows, CELLS, as_json, empty=f"tenant {tenant} has no files", data=[_row(*pair) for pair in found])


@app.command()
def delete(
    file: Annotated[str, typer.Argument(help="Its id, the start of it, or its name.")],
    tenant: TenantName,
    as_json: JsonFlag = False,
) -> None:
    """Deletes a file that no live job reads."""
    with transaction() as session:
        found = files.find_file(session, tenants.find_tenant(session, tenant), file)
        files.delete(session, found)
    if as_json:
        print_json({"id": found.id, "deleted": True})
    else:
        say(f"deleted file {short(found.id)} ({found.name})")


def _row(file: File, stored: StoredObject) -> dict[str, Any]:
    return columns(file, "id", "name", "lines", "purpose", "created_at") | columns(stored, "size", "sha256")
