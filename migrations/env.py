"""Alembic's environment: runs as the owner, with a lock timeout, so that no migration queues behind a long reader."""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine, text

from app.models import Base
from app.settings import get_settings

# Partitions of `turns` are made as rounds come; they are not in the models.
PARTITIONS = "turns_p"


def include_name(name: str | None, kind: str, parents: object) -> bool:
    return not (kind == "table" and name is not None and name.startswith(PARTITIONS))


def run() -> None:
    url = context.config.get_main_option("sqlalchemy.url") or get_settings().database_url.get_secret_value()
    engine = create_engine(url)
    with engine.connect() as connection:
        connection.execute(text("SET lock_timeout = '5s'"))
        connection.commit()
        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            include_name=include_name,
            compare_server_default=True,
        )
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


run()
