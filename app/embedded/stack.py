"""The three servers as one: started together, stopped together, one state directory, one stack a directory."""

from __future__ import annotations

import fcntl
import os
import random
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

from app.embedded.credentials import load_or_create, write_private
from app.embedded.home import services_home
from app.embedded.ports import SEARCH
from app.embedded.postgres import OWNER, Postgres
from app.embedded.processes import ServiceFailed
from app.embedded.seaweedfs import BUCKET, REGION, SeaweedFS
from app.embedded.service import Service
from app.embedded.valkey import Valkey
from app.settings import ENVIRONMENT_FILE

ServiceName = Literal["postgres", "valkey", "seaweedfs"]


class EmbeddedStack:
    """`with EmbeddedStack(state_dir) as stack:` starts the servers and stops them at the end.

    Data and credentials stay in the state directory, and the next stack of the same directory continues with them.
    A server keeps its ports for the life of the stack, also over `stop`, `kill` and `start`.
    """

    def __init__(self, state_dir: Path, *, usual_ports: bool = True) -> None:
        """`usual_ports`: tries the ports that such servers usually have first; else any, out of others' way."""
        self.state_dir = state_dir.resolve()
        self.usual_ports = usual_ports
        self._services: dict[ServiceName, Service] = {}
        self._lock: IO[str] | None = None

    def __enter__(self) -> EmbeddedStack:
        """Raises ServiceFailed when the directory is in use by another stack, or a server does not start."""
        self.state_dir.mkdir(mode=0o755 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
        self._lock = _lock(self.state_dir / "lock")
        try:
            credentials = load_or_create(self.state_dir / "credentials.json")
            home, identity = services_home(self.state_dir)
            self.postgres = Postgres(home, identity, credentials)
            self.valkey = Valkey(home, identity, credentials)
            self.seaweedfs = SeaweedFS(home, identity, credentials)
            # Postgres last: the others start while initdb runs.
            self._services = {"seaweedfs": self.seaweedfs, "valkey": self.valkey, "postgres": self.postgres}
            for service in self._services.values():
                if not self.usual_ports:
                    service.preferred_ports = random.sample(SEARCH, len(service.preferred_ports))
                service.launch()
            for service in self._services.values():
                service.wait_ready()
            lines = (f"{name}={value}\n" for name, value in self.environment().items())
            write_private(self.state_dir / ENVIRONMENT_FILE, "".join(lines))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops the servers and frees the state directory."""
        (self.state_dir / ENVIRONMENT_FILE).unlink(missing_ok=True)
        for service in self._services.values():
            service.ask_to_stop()
        for service in self._services.values():
            service.stop()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def environment(self) -> dict[str, str]:
        """The MARLAAS_* variables with which `app.settings` finds these servers."""
        credentials = self.postgres.credentials
        return {
            "MARLAAS_STATE_DIR": str(self.state_dir),
            "MARLAAS_DATABASE_URL": self.postgres.url(OWNER, credentials.postgres_owner),
            "MARLAAS_DATABASE_SERVICE_URL": self.postgres.url("marlaas_service_login", credentials.postgres_service),
            "MARLAAS_DATABASE_API_URL": self.postgres.url("marlaas_api_login", credentials.postgres_api),
            "MARLAAS_REDIS_URL": self.valkey.url(),
            "MARLAAS_S3_ENDPOINT_URL": self.seaweedfs.url(),
            "MARLAAS_S3_REGION": REGION,
            "MARLAAS_S3_ACCESS_KEY": credentials.s3_access_key,
            "MARLAAS_S3_SECRET_KEY": credentials.s3_secret_key,
            "MARLAAS_S3_BUCKET": BUCKET,
            "MARLAAS_SECRET_KEY": credentials.web_sessions,
        }

    def create_logins(self) -> None:
        """Lets the service and api roles log in. To be called after the migrations, which make these roles."""
        self.postgres.create_logins()

    def start(self, name: ServiceName) -> None:
        """Starts a server that was stopped or killed, and waits until it answers."""
        self._services[name].launch()
        self._services[name].wait_ready()

    def stop(self, name: ServiceName) -> None:
        self._services[name].stop()

    def kill(self, name: ServiceName) -> None:
        """Ends a server with SIGKILL, as a crash would."""
        self._services[name].kill()

    def restart(self, name: ServiceName) -> None:
        self.stop(name)
        self.start(name)

    def dead(self) -> list[ServiceName]:
        """Servers that ended by themselves."""
        return [name for name, service in self._services.items() if service.died]


def _lock(path: Path) -> IO[str]:
    """Holds the directory until the file is closed or this process ends, however it ends."""
    try:
        file = open(path, "w")  # noqa: SIM115  # open for as long as the lock is held
    except PermissionError as error:
        raise ServiceFailed(f"{path.parent} belongs to another user: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ServiceFailed(
            f"{path.parent} is in use by another `marlaas up`: stop that one, or name another "
            "directory with --state-dir"
        ) from error
    return file
