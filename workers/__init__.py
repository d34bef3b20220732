"""Data plane of MARLaaS. `celery -A workers worker -Q rollout|tools|training|manager` finds its app here."""

from app.broker import celery
from workers import control, runtime

__all__ = ["celery", "control", "runtime"]
