"""The Celery app as workers run it: with the worker's life cycle and its remote commands."""

from __future__ import annotations

from app.broker import celery as app
from workers import beat, control, runtime

__all__ = ["app", "beat", "control", "runtime"]
