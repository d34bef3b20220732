"""The web process: health for load balancers and supervisors. `gunicorn "app.web:create_app()"`."""

from __future__ import annotations

from collections.abc import Callable

import redis
import structlog
from botocore.exceptions import BotoCoreError, ClientError
from flask import Flask
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from app import db, storage
from app.settings import get_settings

log = structlog.get_logger(__name__)

PROBE_SECONDS = 3.0


def create_app() -> Flask:
    app = Flask(__name__)

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        """This process answers; says nothing of the services behind it."""
        return {"status": "ok"}

    @app.get("/readyz")
    def readyz() -> tuple[dict[str, str], int]:
        """200 when database, Redis and S3 are all reachable, else 503; the body says which are."""
        parts = {name: probe() for name, probe in PROBES.items()}
        return parts, 200 if set(parts.values()) == {"ok"} else 503

    return app


def probe_database() -> str:
    try:
        with db.engine("service").connect() as connection:
            connection.execute(text("SELECT 1"))
    except SQLAlchemyError as error:
        return _unreachable("database", error)
    return "ok"


def probe_redis() -> str:
    url = get_settings().redis_url.get_secret_value()
    try:
        with redis.Redis.from_url(url, socket_timeout=PROBE_SECONDS, socket_connect_timeout=PROBE_SECONDS) as client:
            client.ping()
    except redis.RedisError as error:
        return _unreachable("redis", error)
    return "ok"


def probe_s3() -> str:
    try:
        storage.client().head_bucket(Bucket=get_settings().s3_bucket)
    except (BotoCoreError, ClientError) as error:
        return _unreachable("s3", error)
    return "ok"


def _unreachable(part: str, error: Exception) -> str:
    """The reason goes to the log: the endpoint is public, and reasons name hosts and users."""
    log.warning("not_ready", part=part, error=str(error))
    return "unreachable"


PROBES: dict[str, Callable[[], str]] = {"database": probe_database, "redis": probe_redis, "s3": probe_s3}
