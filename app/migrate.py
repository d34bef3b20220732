"""The schema, by Alembic: from Python with this module, by hand with the `alembic` command and `alembic.ini`."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError

from app.db import transaction
from app.errors import Conflict

MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"


def config(url: str) -> Config:
    """Alembic's configuration for the database at `url` (the owner's)."""
    alembic = Config()
    alembic.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    alembic.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return alembic


def upgrade(url: str, revision: str = "head") -> None:
    """Migrates up to `revision`. Nothing happens when it is there already."""
    command.upgrade(config(url), revision)


def downgrade(url: str, revision: str) -> None:
    command.downgrade(config(url), revision)


def check_schema() -> None:
    """Raises Conflict when the database's schema is not the one that this code knows."""
    known = ScriptDirectory.from_config(config("")).get_current_head()
    try:
        with transaction() as session:
            found = session.execute(text("SELECT version_num FROM alembic_version")).scalar()
    except ProgrammingError:
        found = None
    if found != known:
        raise Conflict(
            f"the database's schema is {found or 'empty'}, this code knows {known}: run `marlaas db upgrade`"
            " with the newest release, then start the workers of that release",
            code="unknown_schema",
        )
