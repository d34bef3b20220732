"""A TCP proxy on loopback that can lose an answer: what a network does between two live processes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class LossyProxy:
    """Forwards to `target`. While `loses` says so of bytes that a client sent, they still arrive, but the connection
    is cut before the server's answer comes back."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.loses: Callable[[bytes], bool] = lambda sent: False
        self.lost = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(self.target)
        cut = threading.Event()
        threading.Thread(target=self._answer, args=(server, client, cut), daemon=True).start()
        while data := _receive(client):
            if self.loses(data):
                self.lost += 1
                cut.set()
                server.sendall(data)
                break
            server.sendall(data)
        if not cut.is_set():
            _close(server)
            _close(client)

    def _answer(self, server: socket.socket, client: socket.socket, cut: threading.Event) -> None:
        while data := _receive(server):
            if cut.is_set():  # the server has done it, the client is never told
                break
            client.sendall(data)
        _close(client)
        _close(server)

    def close(self) -> None:
        self._listener.close()


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 20)
    except OSError:
        return b""


def _close(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
