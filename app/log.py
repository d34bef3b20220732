"""Structured logs."""

from __future__ import annotations

import logging
import sys

import structlog

from app.settings import get_settings


def configure_logging(process: str) -> None:
    settings = get_settings()
    logging.basicConfig(stream=sys.stderr, level=settings.log_level, force=True)
    structlog.contextvars.bind_contextvars(process=process)
