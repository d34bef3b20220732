"""Included by every worker of the overhead benchmark: writes down what the process does, as intervals.

A line of JSON each, in the folder MARLAAS_BENCH_INTERVALS: kind, the Celery task or the thread that it was in, start
and end in seconds of the wall clock.
Kinds: `generate`, `environment`, `update` (the work itself), `files` (adapters and checkpoints, S3 and local cache),
`transaction` (a database session from first to last: Python, statements, commit, and the messages after it),
`statement` (waits for the database alone), `publish`, `message` (from publishing to the task's start).
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import current_task
from celery.signals import before_task_publish, task_prerun
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.orm import Session

from app import broker
from app.models.worker import WorkerKind
from workers.runtime import runtime

SENT = "bench_sent"

_file = (Path(os.environ["MARLAAS_BENCH_INTERVALS"]) / f"{os.getpid()}.jsonl").open("w", buffering=1)
_lock = threading.Lock()


def write(kind: str, start: float, end: float) -> None:
    task = current_task and current_task.name
    where = task or threading.current_thread().name
    with _lock:
        print(json.dumps([kind, where, start, end]), file=_file)


def timed(owner: Any, name: str, kind: str) -> None:
    """Replaces a function of a class or module by one that writes its interval down."""
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        started = time.time()
        try:
            return function(*args, **kwargs)
        finally:
            write(kind, started, time.time())

    setattr(owner, name, wrapper)


def time_transactions() -> None:
    enter, leave = Session.__enter__, Session.__exit__

    def entered(self: Session) -> Session:
        self.info[SENT] = time.time()
        return enter(self)

    def left(self: Session, *error: Any) -> None:
        leave(self, *error)
        write("transaction", self.info[SENT], time.time())

    Session.__enter__, Session.__exit__ = entered, left  # type: ignore[method-assign, assignment]


def time_generations() -> None:
    from workers.rollout.adapters import AdapterStore
    from workers.rollout.torch_engine import TorchEngine

    generate = TorchEngine.generate

    @functools.wraps(generate)
    def wrapper(self: TorchEngine, *args: Any, **kwargs: Any) -> Any:
        started = time.time()
        future = generate(self, *args, **kwargs)
        future.add_done_callback(lambda _: write("generate", started, time.time()))
        return future

    TorchEngine.generate = wrapper  # type: ignore[method-assign]
    timed(AdapterStore, "acquire", "files")


def time_training() -> None:
    from workers.training.publishing import Publisher
    from workers.training.trainer import Trainer
    from workers.training.worker import TrainingWorker

    timed(Trainer, "update", "update")
    timed(Trainer, "group_sums", "update")  # ahead of the round, too
    timed(TrainingWorker, "load_adapter", "files")
    timed(TrainingWorker, "load_optimizer", "files")
    timed(Publisher, "upload", "files")


def time_environments() -> None:
    from workers.tools.runner import EnvironmentRunner

    timed(EnvironmentRunner, "call", "environment")


@before_task_publish.connect(weak=False)
def on_publish(headers: dict[str, Any], **_: Any) -> None:
    headers[SENT] = time.time()


@task_prerun.connect(weak=False)
def on_start(task: Any, **_: Any) -> None:
    sent = getattr(task.request, SENT, None)
    if sent is not None:
        write("message", sent, time.time())


for method in ("connect", "do_ping", "do_execute", "do_executemany", "do_commit", "do_rollback"):
    timed(PGDialect_psycopg, method, "statement")
timed(broker, "ring", "publish")
time_transactions()
match runtime().kind:
    case WorkerKind.ROLLOUT:
        time_generations()
    case WorkerKind.TRAINING:
        time_training()
    case WorkerKind.TOOLS:
        time_environments()
