"""What every worker process has: its stage, its heartbeat, its spans, draining, and an end when it is stuck.

One process serves one stage, told by its queues: `celery -A workers worker -Q rollout`. Celery's signals start and
stop it; the stage's own parts (engine, trainer, environments) are made at the first use.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import structlog
from celery.signals import celeryd_init, setup_logging, worker_init, worker_ready, worker_shutdown, worker_shutting_down
from sqlalchemy import text
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from app import migrate
from app.broker import celery
from app.db import transaction
from app.errors import InvalidRequest, MarlaasError
from app.log import configure_logging
from app.manager import base_models, workers
from app.manager.doorbells import ring_admission
from app.manager.workers import Announcement
from app.models import BaseModel
from app.models.worker import WorkerKind
from app.settings import get_settings
from workers.retry import retried
from workers.spans import SpanRecorder

log = structlog.get_logger(__name__)

# Celery threads of each stage: a thread waits for its batch, so there are about as many as episodes or calls at once.
THREADS = {WorkerKind.ROLLOUT: 32, WorkerKind.TOOLS: 32, WorkerKind.TRAINING: 1, WorkerKind.MANAGER: 4}

DATABASE_SECONDS = 60.0  # that a starting worker waits for the database

EXIT_REFUSED = 78  # as EX_CONFIG: starting again would not help
EXIT_STUCK = 75  # as EX_TEMPFAIL: a supervisor starts the worker again


@dataclass
class Runtime:
    """This process as a worker."""

    kind: WorkerKind
    name: str
    queues: tuple[str, ...] = ()
    boot: uuid.UUID = field(default_factory=uuid.uuid4)
    base_model: BaseModel | None = None
    spans: SpanRecorder = field(default_factory=SpanRecorder)
    draining: bool = False
    leaving: bool = False  # asked to end: it finishes what it holds and is given no more
    slots: int = 0
    adapter_slots: int = 0
    load: Callable[[], dict[str, Any]] = dict
    finish: Callable[[], object] = lambda: None  # waits for what the stage does outside of Celery's threads
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def claimant(self) -> str:
        return f"{self.name}/{self.boot}"

    def announcement(self) -> Announcement:
        return Announcement(
            name=self.name,
            boot=self.boot,
            kind=self.kind,
            base_model=self.base_model.name if self.base_model else None,
            slots=0 if self.leaving else self.slots,
            adapter_slots=self.adapter_slots,
            load=self.load(),
        )

    def beat(self) -> None:
        """One heartbeat: announces this worker, stores its spans, learns whether to drain."""
        with transaction() as session:
            draining = workers.heartbeat(session, self.announcement())
            self.spans.flush(session, self.name)
        if draining != self.draining:
            self.drain() if draining else self.undrain()

    def drain(self) -> None:
        """Takes no more messages; what has started goes on to its end."""
        self.draining = True
        log.info("draining", worker=self.name)
        for queue in self.queues:
            celery.control.cancel_consumer(queue, destination=[self.name], reply=False)

    def undrain(self) -> None:
        """Takes messages again."""
        self.draining = False
        log.info("undrained", worker=self.name)
        for queue in self.queues:
            celery.control.add_consumer(queue, destination=[self.name], reply=False)

    def start(self) -> None:
        """Begins with a heartbeat in the database, so that work can be given, then beats until `stop`."""

        def announce() -> None:
            with transaction() as session:
                workers.heartbeat(session, self.announcement())
                ring_admission(session)

        retried(announce, OperationalError)
        threading.Thread(target=self._beat_on, name="heartbeat", daemon=True).start()

    def _beat_on(self) -> None:
        while not self._stop.wait(get_settings().heartbeat_seconds):
            try:
                self.beat()
            except SQLAlchemyError as error:
                log.warning("heartbeat_failed", error=str(error).splitlines()[0])

    def stop(self) -> None:
        self.leaving = True
        self.finish()
        self._stop.set()
        try:
            with transaction() as session:
                self.spans.flush(session, self.name)
                workers.retire(session, self.announcement())
        except SQLAlchemyError as error:
            log.warning("retire_failed", error=str(error).splitlines()[0])


_runtime: Runtime | None = None


def runtime() -> Runtime:
    """This process's runtime. Raises InvalidRequest outside of a worker."""
    if _runtime is None:
        raise InvalidRequest("this process is not a worker")
    return _runtime


def kind_of(queues: Sequence[str]) -> WorkerKind:
    """The stage that serves these queues. Raises InvalidRequest when they are of several."""
    kinds = {queue.partition(".")[0] for queue in queues}
    if len(kinds) > 1 or not kinds <= set(WorkerKind):
        raise InvalidRequest(
            f"a worker serves one stage: one of -Q {', '.join(k.value for k in WorkerKind)}, not {', '.join(queues)}"
        )
    return WorkerKind(kinds.pop())


def ends_on_error(handler: Callable[..., None]) -> Callable[..., None]:
    """Celery logs what a signal's handler raises and goes on; a worker that cannot serve must end instead."""

    @wraps(handler)
    def wrapped(**kwargs: Any) -> None:
        try:
            handler(**kwargs)
        except Exception as error:
            print(f"this worker cannot start: {error}", file=sys.stderr, flush=True)
            if not isinstance(error, MarlaasError):
                traceback.print_exc()
            raise SystemExit(EXIT_REFUSED) from error

    return wrapped


def wait_for_database() -> None:
    """A worker may start while the database does. Raises OperationalError when it does not answer in time."""
    deadline = time.monotonic() + DATABASE_SECONDS
    while True:
        try:
            with transaction() as session:
                session.execute(text("SELECT 1"))
                return
        except OperationalError as error:
            if time.monotonic() > deadline:
                raise
            print(f"waiting for the database: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            time.sleep(1)


@celeryd_init.connect(weak=False)
@ends_on_error
def on_init(sender: str, conf: Any, options: dict[str, Any], **_: Any) -> None:
    """Before the worker is built: its stage, how many threads, which cores."""
    global _runtime
    queues = options.get("queues") or WorkerKind.MANAGER.value
    queues = tuple(queues.split(",") if isinstance(queues, str) else queues)
    kind = kind_of(queues)
    settings = get_settings()
    conf.worker_concurrency = THREADS[kind]
    if settings.cpu_affinity:
        os.sched_setaffinity(0, {int(core) for core in settings.cpu_affinity.split(",")})
    wait_for_database()
    migrate.check_schema()
    _runtime = Runtime(kind, sender, queues)
    if kind in (WorkerKind.ROLLOUT, WorkerKind.TRAINING):
        with transaction() as session:
            model = base_models.served_model(session, settings.base_model)
        for queue in queues:
            if queue != f"{kind}{model.queue_suffix}":
                raise InvalidRequest(
                    f"base model {model.name!r} is served on queue {kind}{model.queue_suffix}, not {queue};"
                    " set MARLAAS_BASE_MODEL or change -Q"
                )
        _runtime.base_model = model


@worker_init.connect(weak=False)
@ends_on_error
def on_build(**_: Any) -> None:
    """Makes the stage before the first message is taken, so that none waits in a worker that is not ready."""
    kind = runtime().kind
    if kind == WorkerKind.ROLLOUT:
        from workers.rollout.worker import rollout_worker

        rollout_worker()
    elif kind == WorkerKind.TRAINING:
        from workers.training.worker import training_worker

        training_worker()
    elif kind == WorkerKind.TOOLS:
        from workers.tools.worker import tools_worker

        tools_worker().warm()


@worker_ready.connect(weak=False)
@ends_on_error
def on_ready(**_: Any) -> None:
    this = runtime()
    this.start()
    log.info("worker_ready", worker=this.name, kind=this.kind)


@worker_shutting_down.connect
def on_shutting_down(**_: Any) -> None:
    if _runtime is not None:
        _runtime.leaving = True


@worker_shutdown.connect
def on_shutdown(**_: Any) -> None:
    if _runtime is not None:
        _runtime.stop()


@setup_logging.connect
def on_setup_logging(**_: Any) -> None:
    configure_logging(_runtime.name if _runtime else "beat")  # nobody else sets logging up


def give_up(reason: str) -> None:
    """Ends the process at once; what it held comes back by its leases."""
    log.critical("stuck", reason=reason)
    os._exit(EXIT_STUCK)


class Watchdog:
    """Ends the process when work makes no progress: a supervisor starts it anew, the sweep gives its work again."""

    def __init__(self, busy: Callable[[], bool], progress: Callable[[], int], seconds: float) -> None:
        self._busy, self._progress, self._seconds = busy, progress, seconds
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        seen, since = self._progress(), time.monotonic()
        while True:
            time.sleep(min(5.0, self._seconds / 4))
            now = self._progress()
            if now != seen or not self._busy():
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self._seconds:
                give_up(f"no progress in {self._seconds:.0f} seconds")
