"""The embedded stack's parts that need no server: ports, credentials, folders, child processes."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from app.embedded.credentials import load_or_create
from app.embedded.home import reachable, remove_state, services_home
from app.embedded.ports import GRPC_OFFSET, choose_ports
from app.embedded.processes import Identity, wait_until


@pytest.fixture
def taken() -> int:
    """A port that another server has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_usual_port_is_taken_where_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    assert choose_ports([free]) == [free]


def test_a_taken_port_is_replaced(taken: int) -> None:
    (chosen,) = choose_ports([taken])
    assert chosen != taken


def test_ports_of_one_server_differ(taken: int) -> None:
    assert len(set(choose_ports([taken] * 5))) == 5


def test_grpc_ports_stay_in_range_and_are_free() -> None:
    (usual,) = choose_ports([1], grpc=True)
    with socket.create_server(("127.0.0.1", usual + GRPC_OFFSET)):
        (port,) = choose_ports([usual], grpc=True)
        assert port != usual
        assert port + GRPC_OFFSET < 65_536


def test_sockets_that_an_ended_server_left_behind_are_removed() -> None:
    (usual,) = choose_ports([1], grpc=True)
    left = Path(f"/tmp/seaweedfs-master-grpc-{usual + GRPC_OFFSET}.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(left))
    assert choose_ports([usual], grpc=True) == [usual]
    assert not left.exists()


def test_credentials_are_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    first = load_or_create(path)
    assert load_or_create(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_credentials_differ_between_stacks(tmp_path: Path) -> None:
    first, second = load_or_create(tmp_path / "a"), load_or_create(tmp_path / "b")
    assert not set(first.model_dump().values()) & set(second.model_dump().values())


def test_a_private_folder_is_not_reachable_for_others(tmp_path: Path) -> None:
    inner = tmp_path / "private" / "inner"
    inner.mkdir(parents=True)
    inner.parent.chmod(0o700)
    assert not reachable(inner)


def test_data_lies_where_the_servers_user_reaches_it(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir(mode=0o700)
    home, identity = services_home(state_dir)
    try:
        assert services_home(state_dir) == (home, identity)
        assert identity.uid != 0
        assert identity == Identity.current() or reachable(home.parent)
    finally:
        remove_state(state_dir)
    assert not home.exists()


PARENT = """
import signal, subprocess, sys
from app.embedded.processes import spawn
child = spawn([sys.executable, "-c", "import time; time.sleep(600)"], output=subprocess.DEVNULL)
print(child.pid, flush=True)
signal.pause()
"""


def test_a_child_dies_with_its_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: ended(child), 20, "the child to end")


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
