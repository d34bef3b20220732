"""`marlaas up`: servers, schema, base model and all processes of the service, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from sqlalchemy.exc import OperationalError

from app import base_models, db, migrate
from app.db import transaction
from app.embedded import EmbeddedStack
from app.embedded.credentials import write_private
from app.embedded.ports import choose_ports
from app.log import configure_logging
from app.manager import audit, operators
from app.manager import base_models as registry
from app.manager.workers import live_workers
from app.models.operator import OperatorRole
from app.models.worker import WorkerKind
from app.settings import get_settings
from app.supervisor import KeepsCrashing, Restarts, Supervisor

PROCFILE = Path(__file__).resolve().parent.parent / "Procfile"
TICK_SECONDS = 0.2
FIRST_OPERATOR = "admin"
PASSWORD_FILE = "console-password"
QUIET = {
    "TQDM_DISABLE": "1",  # progress bars are no log lines
    "PYTHONWARNINGS": "ignore:You're running the worker with superuser",  # as the operator knows
}


def up(*, embedded: bool = True, base_model: str | None = None, procfile: Path = PROCFILE) -> None:
    """Runs until Ctrl-C or SIGTERM, then stops workers first, servers last. A second Ctrl-C does not wait for work.

    Raises MarlaasError when something does not start or keeps crashing; whatever had started is stopped by then.
    """
    asked, hurry = threading.Event(), threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if asked.is_set():
            hurry.set()
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)

    with ExitStack() as exits:
        stack = exits.enter_context(running_stack(get_settings().state_dir)) if embedded else None
        configure_logging("up")
        environment = prepare(stack, base_model)
        if asked.is_set():
            return
        supervisor = exits.enter_context(Supervisor(procfile.read_text(), environment, hurry))
        _say(
            f"MARLaaS is starting at http://{get_settings().web_host}:{environment['MARLAAS_WEB_PORT']}"
            f" (state in {get_settings().state_dir}); Ctrl-C stops it"
        )
        servers = Restarts()
        ready = False
        while not asked.wait(TICK_SECONDS):
            supervisor.tick()
            if stack is not None:
                revive(stack, servers, asked)
            if not ready and (ready := all_stages_alive()):
                _say("MARLaaS is ready: a worker of every stage is alive")
        _say("stopping; what has started is finished first, Ctrl-C again does not wait")


def all_stages_alive() -> bool:
    try:
        with transaction() as session:
            return {worker.kind for worker in live_workers(session)} == set(WorkerKind)
    except OperationalError:  # a server that is being started again
        return False


@contextmanager
def running_stack(state_dir: Path) -> Iterator[EmbeddedStack]:
    """The embedded servers, with the settings of this process pointing at them."""
    with EmbeddedStack(state_dir) as stack:
        os.environ.update(stack.environment())
        get_settings.cache_clear()
        yield stack


def prepare(stack: EmbeddedStack | None, base_model: str | None) -> dict[str, str]:
    """Schema, logins, base models. Returns the variables that the processes get besides the servers' own."""
    settings = get_settings()
    migrate.upgrade(settings.database_url.get_secret_value())
    if stack is not None:
        stack.create_logins()
    base_model = base_model or settings.base_model
    if base_model is not None or not base_models.pulled(settings.models_path):
        wanted = base_model or base_models.DEFAULT_MODEL
        _say(f"base model {wanted}: fetching it, where it is not here yet")
        base_model = base_models.model_name(base_models.pull(wanted, settings.models_path))
    register_pulled(settings.models_path, first=base_model)
    with transaction() as session:
        served = registry.served_model(session, base_model)
        environment = {"MARLAAS_BASE_MODEL": served.name, "MARLAAS_QUEUE_SUFFIX": served.queue_suffix}
    (port,) = choose_ports([settings.web_port])
    if stack is not None and (password := make_first_operator(stack.state_dir)):
        _say(
            f"console: http://{settings.web_host}:{port}/console/ as {FIRST_OPERATOR} with the password {password}"
            f" (also in {stack.state_dir / PASSWORD_FILE})"
        )
    db.dispose_engines()
    return QUIET | environment | {"MARLAAS_WEB_PORT": str(port)}


def make_first_operator(state_dir: Path) -> str | None:
    """Gives a service without operators its first one; returns the password, which is kept in the state directory."""
    with transaction() as session:
        if operators.list_operators(session):
            return None
        password = operators.new_password()
        operators.create(session, FIRST_OPERATOR, password, OperatorRole.ADMIN)
        audit.record(
            session,
            actor=audit.COMMAND_LINE,
            action="operator.create",
            target_kind="operator",
            target_id=FIRST_OPERATOR,
            data={"role": OperatorRole.ADMIN},
        )
        write_private(state_dir / PASSWORD_FILE, password + "\n")
    return password


def register_pulled(models_dir: Path, first: str | None = None) -> None:
    """Makes all pulled models known to the service, `first` before the others."""
    folders = sorted(base_models.pulled(models_dir), key=lambda f: base_models.model_name(f) != first)
    with transaction() as session:
        for folder in folders:
            description = base_models.describe(folder)
            dtype = base_models.compute_dtype(description)
            registry.register(session, base_models.model_name(folder), folder.name, dtype, description)


def revive(stack: EmbeddedStack, restarts: Restarts, asked: threading.Event) -> None:
    """Starts again servers that ended by themselves. Raises KeepsCrashing when that happens too often."""
    for name in stack.dead():
        now = time.monotonic()
        start_at = restarts.next_start(now, lived=0.0)
        if start_at is None:
            raise KeepsCrashing(f"{name} keeps ending; its log is in {stack.state_dir / 'services'}")
        _say(f"{name} ended by itself; starts again in {start_at - now} s")
        if asked.wait(start_at - now):
            return
        stack.start(name)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
