"""The console through Flask's test client: logging in, and posting forms with the session's token."""

from __future__ import annotations

import html
import re
from typing import Any

from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from app.db import transaction
from app.manager import operators
from app.models import Operator

PASSWORD = "correct horse battery"


def make_operator(name: str, role: str = "admin") -> Operator:
    with transaction() as session:
        return operators.create(session, name, PASSWORD, role)


class Console:
    """An operator's browser, without the scripts."""

    def __init__(self, client: FlaskClient) -> None:
        self.client = client

    def token(self) -> str:
        """The session's token, as the pages carry it."""
        with self.client.session_transaction("/console/") as session:
            session.setdefault("csrf", "token-of-the-test")
            token: str = session["csrf"]
        return token

    def log_in(self, name: str, password: str = PASSWORD, **fields: str) -> TestResponse:
        return self.post("/console/login", name=name, password=password, **fields)

    def get(self, path: str, **options: Any) -> TestResponse:
        return self.client.get(path, **options)

    def page(self, path: str) -> str:
        """The text of a page that must be there, as a person reads it (entities as characters)."""
        response = self.get(path)
        assert response.status_code == 200, (path, response.status_code)
        return html.unescape(response.text)

    def post(self, path: str, headers: dict[str, str] | None = None, **fields: Any) -> TestResponse:
        return self.client.post(path, data={"csrf_token": self.token(), **fields}, headers=headers)

    def done(self, path: str, **fields: Any) -> str:
        """Posts a form that must succeed; returns the page that it leads to."""
        response = self.post(path, **fields)
        assert response.status_code == 303, response.text
        return self.page(response.location)


def shown_secrets(text: str) -> list[str]:
    return re.findall(r"mk-[\w-]{20,}", text)
