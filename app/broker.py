"""The Celery app: queues, routes and transport options. Task bodies live in `workers`; here they are names only.

Postgres is the truth and a message is a doorbell (rule 2): acknowledged early, never retried by Celery, and a
message that is lost is sent again by the sweep.
"""

from __future__ import annotations

from typing import Any

import structlog
from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from app.settings import get_settings

log = structlog.get_logger(__name__)

celery = Celery("marlaas")

ADMIT = "manager.admit"
SWEEP = "manager.sweep"
RETAIN = "manager.retain"
SUBMIT = "jobs.submit"
VALIDATE = "tools.validate"
RESET = "tools.reset"
STEP = "tools.step"
GRADE = "tools.grade"
GENERATE = "rollout.generate"
CHAT = "rollout.chat"
TRAIN = "training.train"
STREAM = "training.stream"
START = "training.start"

SWEEP_SENT_AT = "marlaas:sweep-sent-at"  # Redis key: when beat last sent a sweep, in seconds since the epoch


@celery.add_defaults
def configuration() -> dict[str, Any]:
    """Read at first use, so that settings may be made after import."""
    settings = get_settings()
    return {
        "broker_url": settings.redis_url.get_secret_value(),
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_transport_options": {
            # Messages are acknowledged as they start, so this only bounds how long a dead worker's prefetch hides.
            "visibility_timeout": 3600,
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 10,
        },
        "task_ignore_result": True,
        "task_serializer": "json",
        "accept_content": ["json"],
        "task_acks_late": False,
        "task_default_queue": "manager",
        "task_routes": {
            "manager.*": {"queue": "manager"},
            "jobs.*": {"queue": "manager"},
            "tools.*": {"queue": "tools"},
        },
        "task_publish_retry_policy": {"max_retries": 1, "interval_start": 0, "interval_step": 0.2},
        "worker_pool": "threads",
        "worker_prefetch_multiplier": 1,
        "worker_send_task_events": True,
        "worker_hijack_root_logger": False,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "include": ["workers.manager", "workers.tools.tasks", "workers.rollout.tasks", "workers.training.tasks"],
        "beat_schedule": {
            "sweep": {"task": SWEEP, "schedule": settings.sweep_seconds, "options": {"expires": 30}},
            "retain": {"task": RETAIN, "schedule": 300.0, "options": {"expires": 300}},
        },
    }


def ring(task: str, queue: str, **ids: Any) -> None:
    """Sends a doorbell. A broker that cannot be reached is logged only: the sweep rings again."""
    try:
        celery.send_task(task, kwargs=ids, queue=queue)
    except (OperationalError, RedisError, OSError) as error:
        log.warning("doorbell_lost", task=task, queue=queue, error=str(error))
