"""Logins of the two roles, as the settings' URLs name them."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy.engine import make_url

from app.errors import InvalidRequest
from app.logins import create_logins
from app.settings import get_settings

LOGIN = "marlaas_test_login"


@pytest.fixture
def owner(database: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database.replace("+psycopg", ""), autocommit=True) as connection:
        yield connection
        connection.execute(f"DROP ROLE IF EXISTS {LOGIN}")
    get_settings.cache_clear()


def name_login(database: str, monkeypatch: pytest.MonkeyPatch, user: str, password: str) -> str:
    """The settings give the service role this login; returns its URL for psycopg."""
    url = make_url(database).set(username=user, password=password)
    monkeypatch.setenv("MARLAAS_DATABASE_SERVICE_URL", url.render_as_string(hide_password=False))
    get_settings.cache_clear()
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


def test_a_login_has_its_roles_rights_and_no_more(
    owner: psycopg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = name_login(database, monkeypatch, LOGIN, "first'%word")
    assert create_logins()[0] == LOGIN
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM jobs").fetchone()
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("DROP TABLE jobs")


def test_another_password_replaces_the_first(
    owner: psycopg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = name_login(database, monkeypatch, LOGIN, "first")
    create_logins()
    second = name_login(database, monkeypatch, LOGIN, "second")
    create_logins()
    psycopg.connect(second).close()
    with pytest.raises(psycopg.OperationalError, match="authentication failed"):
        psycopg.connect(first)


@pytest.mark.parametrize(("user", "password"), [("marlaas", "word"), ("marlaas_service", "word"), (LOGIN, "")])
def test_the_owner_the_role_itself_and_no_password_are_refused(
    owner: psycopg.Connection, database: str, monkeypatch: pytest.MonkeyPatch, user: str, password: str
) -> None:
    name_login(database, monkeypatch, user, password)
    with pytest.raises(InvalidRequest, match="marlaas_service"):
        create_logins()
