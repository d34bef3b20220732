"""The manager against the real Postgres: a clean database a test, no workers, doorbells written down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from apiflask import APIFlask
from flask.testing import FlaskClient
from sqlalchemy import text

from app import broker, db
from app.models import Base, Tenant
from app.settings import Settings, get_settings
from app.web import create_app
from tests import by_hand
from tests.api_client import client_with, make_key, serving


class Bells(list[tuple[str, dict[str, Any]]]):
    """Doorbells as they were rung: (task, ids)."""

    def of(self, task: str) -> list[dict[str, Any]]:
        return [ids for name, ids in self if name == task]


@pytest.fixture
def bells(monkeypatch: pytest.MonkeyPatch) -> Bells:
    rung = Bells()
    monkeypatch.setattr(broker, "ring", lambda task, queue, **ids: rung.append((task, ids)))
    return rung


@pytest.fixture
def clean(database: str, bells: Bells) -> Iterator[str]:
    """An empty database."""
    yield database
    empty()


def empty() -> None:
    """Deleting is quicker than truncating where there are few rows; as a replica no trigger looks for references."""
    with db.engine("owner").begin() as connection:
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        connection.execute(text("; ".join(f"DELETE FROM {table.name}" for table in Base.metadata.sorted_tables)))


@pytest.fixture
def hand(clean: str) -> None:
    """A base model and live workers that only announce themselves."""
    by_hand.register_model()
    by_hand.announce(by_hand.ROLLOUT, by_hand.TOOLS, by_hand.TRAINING)


@pytest.fixture
def tenant(hand: None) -> Tenant:
    return by_hand.make_tenant()


@pytest.fixture
def settings(hand: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Settings of this test alone, to be changed by `monkeypatch.setattr`."""
    yield get_settings()


@pytest.fixture(scope="session")
def web_app(database: str) -> APIFlask:
    return create_app()


@pytest.fixture
def client(web_app: APIFlask, tenant: Tenant) -> FlaskClient:
    """Calls the API with a key of `tenant`."""
    return client_with(web_app, make_key(tenant))


@pytest.fixture(scope="session")
def server(web_app: APIFlask) -> Iterator[str]:
    """The URL of the web process, on loopback."""
    with serving(web_app) as url:
        yield url


@pytest.fixture
def openai_client(server: str, tenant: Tenant) -> Iterator[openai.OpenAI]:
    """The unmodified client of OpenAI, with a key of `tenant`."""
    with openai.OpenAI(base_url=f"{server}/v1", api_key=make_key(tenant), max_retries=0) as client:
        yield client
