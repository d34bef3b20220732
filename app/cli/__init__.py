"""The `marlaas` command. Each module of this package is one group of commands."""

from __future__ import annotations

import sys

import structlog
import typer

from app.cli import adapters, files, jobs, keys, models, operators, preflight, service, tenants, workers
from app.cli.output import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Multi-tenant asynchronous reinforcement learning: many LoRA adapters over one base model.",
)
app.command()(service.up)
app.add_typer(service.database, name="db")
app.add_typer(models.app, name="model")
app.add_typer(tenants.app, name="tenant")
app.add_typer(keys.app, name="key")
app.add_typer(files.app, name="file")
jobs.app.command("preflight")(preflight.check)
app.add_typer(jobs.app, name="job")
app.add_typer(adapters.app, name="adapter")
app.add_typer(workers.app, name="worker")
app.add_typer(operators.app, name="operator")


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # standard output is for answers
    app()
