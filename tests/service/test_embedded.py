"""The embedded stack: starts, restarts, continues with its data, recovers from kills, shares the machine."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import boto3
import psycopg
import pytest
import redis

from app.embedded import EmbeddedStack
from app.embedded.credentials import Credentials
from app.embedded.home import remove_state, services_home
from app.embedded.processes import ServiceFailed, processes_in, wait_until
from app.embedded.valkey import Valkey
from app.settings import ENVIRONMENT_FILE

SERVICES = ("postgres", "valkey", "seaweedfs")


@pytest.fixture
def own_dir() -> Iterator[Path]:
    """A state directory of this test alone, which the servers' user can reach."""
    path = Path(tempfile.mkdtemp(prefix="marlaas-test-"))
    path.chmod(0o711)
    yield path
    remove_state(path)


def write(stack: EmbeddedStack, value: str) -> None:
    with connect(stack) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS embedded_test (value text)")
        connection.execute("INSERT INTO embedded_test VALUES (%s)", (value,))
    valkey(stack).set(f"embedded_test:{value}", value)
    s3(stack).put_object(Bucket="marlaas", Key=f"embedded_test/{value}", Body=value.encode())


def read(stack: EmbeddedStack, value: str) -> list[str]:
    """What each of the three servers knows of `value`."""
    with connect(stack) as connection:
        rows = connection.execute("SELECT value FROM embedded_test WHERE value = %s", (value,)).fetchall()
    cached = valkey(stack).get(f"embedded_test:{value}")
    body = s3(stack).get_object(Bucket="marlaas", Key=f"embedded_test/{value}")["Body"].read()
    return [*(row[0] for row in rows), cached.decode(), body.decode()]


def connect(stack: EmbeddedStack) -> psycopg.Connection:
    return psycopg.connect(stack.environment()["MARLAAS_DATABASE_URL"].replace("+psycopg", ""))


def valkey(stack: EmbeddedStack) -> redis.Redis:
    return redis.Redis.from_url(stack.environment()["MARLAAS_REDIS_URL"])


def s3(stack: EmbeddedStack):
    environment = stack.environment()
    return boto3.client(
        "s3",
        endpoint_url=environment["MARLAAS_S3_ENDPOINT_URL"],
        region_name=environment["MARLAAS_S3_REGION"],
        aws_access_key_id=environment["MARLAAS_S3_ACCESS_KEY"],
        aws_secret_access_key=environment["MARLAAS_S3_SECRET_KEY"],
    )


@pytest.mark.parametrize("stop", [EmbeddedStack.stop, EmbeddedStack.kill], ids=["stop", "kill"])
def test_servers_keep_data_and_ports_over_a_restart(stack: EmbeddedStack, stop) -> None:
    before = stack.environment()
    write(stack, stop.__name__)
    for name in SERVICES:
        stop(stack, name)
        stack.start(name)
    assert stack.environment() == before
    assert read(stack, stop.__name__) == [stop.__name__] * 3


def test_secrets_are_private_files(stack: EmbeddedStack, state_dir: Path) -> None:
    modes = {name: stat.S_IMODE((state_dir / name).stat().st_mode) for name in ("credentials.json", ENVIRONMENT_FILE)}
    assert modes == {"credentials.json": 0o600, ENVIRONMENT_FILE: 0o600}


def test_secrets_are_not_on_command_lines(stack: EmbeddedStack) -> None:
    secrets = set(stack.postgres.credentials.model_dump().values())
    lines = [
        Path(f"/proc/{pid}/cmdline").read_text()
        for service in (stack.postgres, stack.valkey, stack.seaweedfs)
        for pid in processes_in(service.data, service.process_name)
    ]
    assert len(lines) >= 3
    assert not [line for line in lines if any(secret in line for secret in secrets)]


def test_a_login_without_password_is_refused(stack: EmbeddedStack) -> None:
    with pytest.raises(psycopg.OperationalError, match="no password supplied"):
        psycopg.connect(host="127.0.0.1", port=stack.postgres.port, user="marlaas", dbname="marlaas")
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=stack.valkey.port).ping()


def test_the_servers_are_not_run_by_root(stack: EmbeddedStack) -> None:
    assert stack.postgres.identity.uid != 0


def test_a_second_stack_of_the_directory_is_refused(stack: EmbeddedStack, state_dir: Path) -> None:
    with pytest.raises(ServiceFailed, match="in use by another"), EmbeddedStack(state_dir):
        pass
    valkey(stack).ping()  # and the first one is untouched


def test_a_later_stack_continues_with_data_and_credentials_on_other_ports(own_dir: Path) -> None:
    with EmbeddedStack(own_dir) as first:
        write(first, "kept")
        credentials = first.postgres.credentials
        taken = [service.port for service in (first.postgres, first.valkey, first.seaweedfs)]
    with (
        socket.create_server(("127.0.0.1", taken[0])),
        socket.create_server(("127.0.0.1", taken[1])),
        EmbeddedStack(own_dir) as second,
    ):
        assert second.postgres.credentials == credentials
        assert second.postgres.port != taken[0]
        assert second.valkey.port != taken[1]
        assert read(second, "kept") == ["kept"] * 3
    assert not (own_dir / ENVIRONMENT_FILE).exists()


HOLD = """
import signal, sys
from pathlib import Path
from app.embedded.credentials import Credentials
from app.embedded.home import services_home
from app.embedded.valkey import Valkey
home, identity = services_home(Path(sys.argv[1]))
server = Valkey(home, identity, Credentials(valkey="secret"))
server.launch()
server.wait_ready()
print(server.port, flush=True)
signal.pause()
"""


@pytest.fixture
def parent(own_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that started a Valkey server in `own_dir`."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(own_dir)], stdout=subprocess.PIPE, text=True) as parent:
        yield parent
        parent.kill()


def test_a_server_dies_with_its_killed_parent(own_dir: Path, parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None and parent.stdout.readline()
    data = (own_dir / "services/valkey").resolve()
    assert len(list(processes_in(data, "valkey-server"))) == 1
    parent.kill()
    wait_until(lambda: not any(processes_in(data, "valkey-server")), 30, "the server to end")


def test_a_server_that_an_earlier_run_left_is_replaced(own_dir: Path, parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    left_port = int(parent.stdout.readline())
    with redis.Redis(port=left_port, password="secret") as client:
        client.set("written", "before")
    home, identity = services_home(own_dir)
    server = Valkey(home, identity, Credentials(valkey="secret"))
    server.launch()
    try:
        server.wait_ready()
        with redis.Redis.from_url(server.url()) as client:
            assert client.get("written") == b"before"
        assert len(list(processes_in(server.data, "valkey-server"))) == 1
    finally:
        server.stop()


def test_a_server_that_cannot_start_is_reported_with_its_log(stack: EmbeddedStack) -> None:
    stack.stop("postgres")
    version = stack.postgres.data / "PG_VERSION"
    version.write_text("9\n")
    try:
        with pytest.raises(ServiceFailed, match="not compatible"):
            stack.start("postgres")
    finally:
        version.write_text("18\n")
        stack.start("postgres")


def test_a_server_that_ended_by_itself_is_noticed(stack: EmbeddedStack) -> None:
    assert stack.dead() == []
    (pid,) = processes_in(stack.valkey.data, "valkey-server")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: stack.dead() == ["valkey"], 10, "the stack to notice")
    stack.start("valkey")
    assert stack.dead() == []
