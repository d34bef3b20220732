"""What ranks say to each other beside the model's own collectives: JSON and safetensors over a pipe, no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from multiprocessing.connection import Connection
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from workers.training.packing import Layout, MicroBatch

Message = tuple[dict[str, Any], dict[str, Tensor]]
TENSORS = [field.name for field in fields(MicroBatch) if field.name != "layout"]


class Channel:
    """One end of a pipe. A message is a JSON document and tensors of any dtype; both arrive bit for bit."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, document: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Raises OSError when the other end is gone."""
        self._connection.send_bytes(json.dumps(document).encode())
        self._connection.send_bytes(save(dict(tensors or {})))

    def receive(self, seconds: float | None = None) -> Message:
        """Waits, `seconds` at most. Raises TimeoutError (nothing came), EOFError (the other end is gone)."""
        if not self._connection.poll(seconds):
            raise TimeoutError(f"no message in {seconds} s")
        return json.loads(self._connection.recv_bytes()), load(self._connection.recv_bytes())

    def close(self) -> None:
        self._connection.close()


def pack_batch(batch: MicroBatch) -> Message:
    return asdict(batch.layout), {name: getattr(batch, name) for name in TENSORS}


def unpack_batch(layout: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> MicroBatch:
    """Tensors of other names are the sender's own."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in layout.items()
    }
    return MicroBatch(layout=Layout(**values), **{name: tensors[name] for name in TENSORS})
