"""The web process: the API, the console, and health for supervisors. `gunicorn "app.web:create_app()"`."""

from __future__ import annotations

from collections.abc import Callable

import redis
import structlog
from apiflask import APIFlask
from botocore.exceptions import BotoCoreError, ClientError
from flask import Response, request
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.exceptions import HTTPException
from werkzeug.middleware.proxy_fix import ProxyFix

from app import console, db, metrics, storage
from app.api import api, openapi, requests
from app.api.blueprint import PREFIX
from app.api.errors import on_http_error
from app.settings import get_settings

log = structlog.get_logger(__name__)

PROBE_SECONDS = 3.0


def create_app() -> APIFlask:
    app = APIFlask(
        __name__,
        title="MARLaaS",
        version=openapi.release(),
        spec_path=openapi.PATH,
        docs_path=None,
        json_errors=False,
        static_folder=None,  # type: ignore[arg-type]
    )
    proxies = get_settings().trusted_proxies
    app.wsgi_app = ProxyFix(app.wsgi_app, x_for=proxies, x_proto=proxies, x_host=proxies)  # type: ignore[method-assign]
    app.url_map.merge_slashes = False  # names of models may hold any
    requests.install(app)
    openapi.configure(app)
    app.register_error_handler(HTTPException, _on_unrouted)
    metrics.install(app)
    app.register_blueprint(api)
    console.register(app)
    app.add_url_rule("/healthz", view_func=healthz)
    app.add_url_rule("/readyz", view_func=readyz)
    return app


def healthz() -> dict[str, str]:
    """This process answers; says nothing of the services behind it."""
    return {"status": "ok"}


def readyz() -> tuple[dict[str, str], int]:
    """200 when database, Redis and S3 are all reachable, else 503; the body says which are."""
    parts = {name: probe() for name, probe in PROBES.items()}
    return parts, 200 if set(parts.values()) == {"ok"} else 503


def _on_unrouted(error: HTTPException) -> Response | HTTPException:
    """No such route or method, and no blueprint whose error it would be: the API's clients read JSON there too."""
    return on_http_error(error) if request.path.startswith(f"{PREFIX}/") else error


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
        storage.check()
    except (BotoCoreError, ClientError) as error:
        return _unreachable("s3", error)
    return "ok"


def _unreachable(part: str, error: Exception) -> str:
    """The reason goes to the log: the endpoint is public, and reasons name hosts and users."""
    log.warning("not_ready", part=part, error=str(error))
    return "unreachable"


PROBES: dict[str, Callable[[], str]] = {"database": probe_database, "redis": probe_redis, "s3": probe_s3}
