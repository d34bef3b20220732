"""`marlaas up` and `marlaas db …`: running the service."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from app.cli.output import say
from app.settings import get_settings

database = typer.Typer(no_args_is_help=True, help="The schema of the database.")


def up(
    embedded: Annotated[
        bool,
        typer.Option(
            "--embedded/--no-embedded",
            help="Start Postgres, Valkey and SeaweedFS, or use those of DATABASE_URL, REDIS_URL and MARLAAS_S3_*.",
        ),
    ] = True,
    state_dir: Annotated[
        Path | None, typer.Option(help="Data, credentials and models; default: MARLAAS_STATE_DIR, else .marlaas.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="The model that is served: a name, a folder or a Hugging Face id.")
    ] = None,
) -> None:
    """Runs the whole service until Ctrl-C: servers, schema, web, beat, manager and workers.

    A second `up` of the same state directory goes on where the first one stopped.
    """
    from app.up import up as run

    if state_dir is not None:
        os.environ["MARLAAS_STATE_DIR"] = str(state_dir.resolve())
        get_settings.cache_clear()
    run(embedded=embedded, base_model=base_model)


@database.command()
def upgrade(
    revision: Annotated[str, typer.Argument(help="Alembic revision.")] = "head",
    with_logins: Annotated[
        bool,
        typer.Option(
            "--logins",
            help="Also let the two roles log in as MARLAAS_DATABASE_SERVICE_URL and MARLAAS_DATABASE_API_URL say.",
        ),
    ] = False,
) -> None:
    """Migrates the database that the settings name to the newest schema."""
    from app import logins, migrate

    migrate.upgrade(get_settings().database_url.get_secret_value(), revision)
    say(f"the schema is at {revision}")
    if with_logins:
        say(f"logins: {', '.join(logins.create_logins()) or 'none are set'}")
