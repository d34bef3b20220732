"""Gunicorn's configuration of the web process; the `Procfile` names it."""

from __future__ import annotations

from typing import Any

from app.log import configure_logging
from app.settings import get_settings

_settings = get_settings()

bind = f"{_settings.web_host}:{_settings.web_port}"
worker_class = "gthread"
workers = 1  # sessions' rate limits, caches and request counters are of one process; several web processes are fine
threads = _settings.web_threads
timeout = 60
graceful_timeout = 25  # for answers that have begun; less than supervisors wait before they kill
keepalive = 75  # longer than proxies keep idle connections: it is never us who closes one as it is being used
forwarded_allow_ips = ""  # X-Forwarded-* counts by MARLAAS_TRUSTED_PROXIES alone, in `app.web`
control_socket_disable = True
accesslog = None  # the lines of health probes would drown all others; /metrics counts requests by route
logconfig_dict: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"generic": {"()": "app.log.formatter", "process": "web"}},
    "loggers": {"gunicorn.error": {"level": "INFO", "handlers": [], "propagate": True}},
}


def on_starting(_server: object) -> None:
    """Before the workers are forked, who inherit it."""
    configure_logging("web")
