"""Logins for the service and the api role. The owner makes them, after the migrations, which make the roles."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy.engine import URL, make_url

from app.errors import InvalidRequest
from app.settings import get_settings


def create_logins() -> list[str]:
    """Makes the logins that the settings' URLs of the two roles name, or gives them these passwords; returns them.

    Raises InvalidRequest when a URL lacks user or password, or names the owner, who would become less than that.
    """
    settings = get_settings()
    owner = make_url(settings.database_url.get_secret_value())
    urls = {"marlaas_service": settings.database_service_url, "marlaas_api": settings.database_api_url}
    made = []
    parameters: dict[str, Any] = {**owner.translate_connect_args(username="user", database="dbname"), **owner.query}
    with psycopg.connect(**parameters) as connection:
        for role, secret in urls.items():
            if secret is not None:
                login, password = _login(role, make_url(secret.get_secret_value()), owner)
                create_login(connection, role, login, password)
                made.append(login)
    return made


def create_login(owner: psycopg.Connection, role: str, login: str, password: str) -> None:
    """Lets `login` log in with `password` and have the rights of `role`."""
    known = owner.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (login,)).fetchone()
    verb = sql.SQL("ALTER" if known else "CREATE")
    owner.execute(sql.SQL("{} ROLE {} LOGIN PASSWORD {}").format(verb, sql.Identifier(login), password))
    owner.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(role), sql.Identifier(login)))


def _login(role: str, url: URL, owner: URL) -> tuple[str, str]:
    if not url.username or not url.password:
        raise InvalidRequest(f"the URL of {role} names no user and password", param="database_url")
    if url.username in (owner.username, role):
        raise InvalidRequest(f"{role} needs a login of its own, and {url.username!r} is none", param="database_url")
    return url.username, url.password
