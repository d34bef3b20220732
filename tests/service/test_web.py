"""The web process's health endpoints, against the real services."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from flask.testing import FlaskClient

from app import db, storage
from app.embedded import EmbeddedStack
from app.web import create_app


@pytest.fixture
def web(database: str) -> FlaskClient:
    storage.client.cache_clear()
    return create_app().test_client()


@pytest.fixture(params=["postgres", "valkey", "seaweedfs"])
def stopped(request: pytest.FixtureRequest, stack: EmbeddedStack) -> Iterator[str]:
    """The part that is not reachable while its server is stopped."""
    stack.stop(request.param)
    yield {"postgres": "database", "valkey": "redis", "seaweedfs": "s3"}[request.param]
    stack.start(request.param)
    db.dispose_engines()


def test_ready_while_all_services_answer(web: FlaskClient) -> None:
    response = web.get("/readyz")
    assert (response.status_code, response.json) == (200, {"database": "ok", "redis": "ok", "s3": "ok"})


def test_not_ready_names_the_part_that_does_not_answer(web: FlaskClient, stopped: str) -> None:
    response = web.get("/readyz")
    assert (response.status_code, response.json) == (
        503,
        {"database": "ok", "redis": "ok", "s3": "ok"} | {stopped: "unreachable"},
    )


def test_alive_while_services_are_away(web: FlaskClient, stopped: str) -> None:
    assert web.get("/healthz").status_code == 200
