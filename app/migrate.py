"""The schema, by Alembic: from Python with this module, by hand with the `alembic` command and `alembic.ini`."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config

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
