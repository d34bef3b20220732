"""Fixtures for all tests. Services are real: one embedded stack a test process, in a directory of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

if "PYTEST_XDIST_WORKER" in os.environ:  # test processes at once share the cores; read when torch is loaded
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("COLUMNS", None)  # of the terminal that the test processes write to: commands under test have none

from app import db, migrate
from app.embedded import EmbeddedStack
from app.embedded.home import remove_state
from app.settings import get_settings


@pytest.fixture(scope="session")
def state_dir() -> Iterator[Path]:
    """A state directory that the servers' user can reach, removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="marlaas-test-"))
    if os.geteuid() == 0:
        path.chmod(0o711)
    yield path
    remove_state(path)


@pytest.fixture(scope="session")
def stack(state_dir: Path) -> Iterator[EmbeddedStack]:
    """Postgres, Valkey and SeaweedFS; the settings of this process and of its children point at them."""
    with EmbeddedStack(state_dir, usual_ports=False) as stack, pytest.MonkeyPatch.context() as patch:
        for name, value in stack.environment().items():
            patch.setenv(name, value)
        patch.setenv("MARLAAS_ENVIRONMENT_MODULES", "tests.toy")
        get_settings.cache_clear()
        db.engine.cache_clear()
        do_not_flush()
        yield stack
    get_settings.cache_clear()
    db.engine.cache_clear()


def do_not_flush() -> None:
    """Commits need not outlive a crash of the machine; one of the server they do, as the kernel has the data."""
    with db.engine("owner").connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ALTER SYSTEM SET fsync = off"))
        connection.execute(text("SELECT pg_reload_conf()"))


@pytest.fixture(scope="session")
def database(stack: EmbeddedStack) -> str:
    """The owner's URL of a database with the newest schema, into which the service and api roles can log in."""
    url = stack.environment()["MARLAAS_DATABASE_URL"]
    migrate.upgrade(url)
    stack.create_logins()
    return url
