"""Structured logs: one JSON object a line on stderr, for structlog and the standard library alike.

Ids are bound where work begins, `with structlog.contextvars.bound_contextvars(tenant=…, job=…, round=…, episode=…)`,
and then stand on every line of that work, also on lines that libraries log.
"""

from __future__ import annotations

import logging
import os
import re
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from app.settings import get_settings

HIDDEN = "***"
SECRET_KEYS = {"authorization", "api_key", "access_key", "secret_key", "password", "secret", "credentials"}
PASSWORD_IN_URL = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+(?=@)")
SIGNATURE_IN_URL = re.compile(r"(?<=X-Amz-Signature=)[0-9a-f]+")  # of presigned URLs
API_KEY = re.compile(r"\b(mk-[A-Za-z0-9_-]{6})[A-Za-z0-9_-]+")

# They tell of every message and every request; at INFO our own lines tell of the work itself.
CHATTY = ("alembic", "celery.app.trace", "celery.beat", "celery.worker.strategy", "httpx")


def hide_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Blanks values under names of secrets, and passwords, signatures and API keys inside text."""
    for key, value in event.items():
        if key in SECRET_KEYS:
            event[key] = HIDDEN
        elif isinstance(value, str):
            value = PASSWORD_IN_URL.sub(rf"\1:{HIDDEN}", value)
            value = SIGNATURE_IN_URL.sub(HIDDEN, value)
            event[key] = API_KEY.sub(rf"\1{HIDDEN}", value)
    return event


def formatter(process: str) -> structlog.stdlib.ProcessorFormatter:
    """Renders a log record, from structlog or not, as one line."""
    settings = get_settings()
    render: list[Processor]
    if settings.log_json:
        render = [structlog.processors.format_exc_info, hide_secrets, structlog.processors.JSONRenderer(default=str)]
    else:
        render = [hide_secrets, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_shared(process), structlog.stdlib.ExtraAdder()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
    )


def configure_logging(process: str) -> None:
    """Sets up all logging of this process; `process` (web, manager, rollout …) stands on every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(get_settings().log_level.upper())
    if root.level == logging.INFO:
        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
    structlog.configure(
        processors=[*_shared(process), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _shared(process: str) -> list[Processor]:
    def name_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["process"] = process
        event["pid"] = os.getpid()
        return event

    return [
        structlog.contextvars.merge_contextvars,
        name_process,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
