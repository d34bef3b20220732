"""Clients of the API: Flask's test client with a key, and a server on loopback for clients that need a socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flask import Flask
from flask.testing import FlaskClient
from werkzeug.serving import make_server

from app.db import transaction
from app.manager import tenants
from app.models import Tenant


def make_key(tenant: Tenant, *scopes: str) -> str:
    """The secret of a new key; without scopes named it has all."""
    with transaction() as session:
        _, secret = tenants.create_key(session, tenant, "test", scopes or tenants.SCOPES)
    return secret


def client_with(app: Flask, secret: str) -> FlaskClient:
    client = app.test_client()
    client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {secret}"
    return client


@contextmanager
def serving(app: Flask) -> Iterator[str]:
    """The URL under which the app answers, a thread a request."""
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
