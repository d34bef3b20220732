"""Ports for the embedded servers: the usual one where it is free, another otherwise."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from pathlib import Path

GRPC_OFFSET = 10_000  # SeaweedFS serves gRPC at port + 10000
HIGHEST_WITH_GRPC = 65_535 - GRPC_OFFSET
# Below the range that the kernel gives to outgoing connections (32768 and up), which would race with us.
SEARCH = range(20_000, 22_700)


def is_free(port: int) -> bool:
    """Whether loopback can be bound at `port` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def grpc_sockets_are_ours(port: int) -> bool:
    """Removes sockets that an ended SeaweedFS left behind at this gRPC port; False where they are another user's."""
    # SeaweedFS serves each gRPC port on a socket of this name as well, and does not start where it cannot make it.
    for left in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock"):
        try:
            left.unlink(missing_ok=True)
        except PermissionError:
            return False
    return True


def choose_ports(usual: Sequence[int], *, grpc: bool = False) -> list[int]:
    """One free port for each usual one, all different; with `grpc`, the port 10000 above is free as well.

    Raises OSError when the machine has no free port left in the search range.
    """

    def fits(port: int) -> bool:
        if not grpc:
            return is_free(port)
        above = port + GRPC_OFFSET
        return port <= HIGHEST_WITH_GRPC and is_free(port) and is_free(above) and grpc_sockets_are_ours(above)

    # From a random place on: stacks that start at the same time would else all look at the same ports.
    others = [*SEARCH]
    start = random.randrange(len(others))
    others = others[start:] + others[:start]
    chosen: list[int] = []
    for preferred in usual:
        for port in (preferred, *others):
            if port not in chosen and fits(port):
                chosen.append(port)
                break
        else:
            raise OSError(f"no free port for the usual {preferred} in {SEARCH.start}-{SEARCH.stop - 1}")
    return chosen
