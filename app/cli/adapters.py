"""`marlaas adapter …`: a job's adapters, downloaded as ready PEFT folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.output import Cell, JsonFlag, MaybeTenant, Version, ago, print_json, say, show, size
from app.db import transaction
from app.manager import adapters, jobs, tenants
from app.models import Job

app = typer.Typer(no_args_is_help=True, help="Adapters of a job.")

JobName = Annotated[str, typer.Argument(metavar="JOB", help="Id, start of the id, or name.")]
CELLS: dict[str, Cell] = {
    "VERSION": lambda v: v.version,
    "REWARD": lambda v: v.reward_mean,
    "SIZE": lambda v: size(v.size),
    "CREATED": lambda v: ago(v.created_at),
    "FILES": lambda v: "stored" if v.available else "expired",
    "WEIGHTS": lambda v: v.weights_digest[:12] + ("" if v.signal else " (as before: no signal)"),
}


def find(text: str, tenant: str | None) -> Job:
    with transaction() as session:
        return jobs.find_job(session, text, tenants.find_tenant(session, tenant) if tenant else None)


@app.command("list")
def list_(job: JobName, tenant: MaybeTenant = None, as_json: JsonFlag = False) -> None:
    """Shows a job's versions."""
    found = find(job, tenant)
    with transaction() as session:
        rows = adapters.versions(session, found)
    show(rows, CELLS, as_json, empty=f"job {found.name} has no version yet, being {found.state}")


@app.command()
def download(
    job: JobName,
    to: Annotated[Path, typer.Option("--to", help="Folder to make; must not exist or be empty.")],
    version: Version = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that holds an adapter.")] = False,
    tenant: MaybeTenant = None,
    as_json: JsonFlag = False,
) -> None:
    """Downloads a version as a folder for PeftModel.from_pretrained. Every file's digest is checked."""
    done = adapters.download(find(job, tenant).id, version, to.resolve(), force=force)
    if as_json:
        files = [{"name": f.name, "sha256": f.sha256, "size": f.size} for f in done.files]
        print_json({"job_id": done.job_id, "version": done.version, "folder": str(to), "files": files})
    else:
        say(f"version {done.version} of {done.job} ({done.base_model}) is in {to}")


@app.command()
def url(job: JobName, version: Version = None, tenant: MaybeTenant = None, as_json: JsonFlag = False) -> None:
    """Shows URLs that download a version's files for a short while, without credentials."""
    with transaction() as session:
        found = adapters.manifest(session, find(job, tenant), version)
    if as_json:
        print_json(found)
    else:
        for file in found.files:
            print(file.url)
