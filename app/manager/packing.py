"""Token ids and logprobs as bytes: int32 and float32, little endian."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any


def pack_ids(ids: Sequence[int]) -> bytes:
    return _bytes(array("i", ids))


def unpack_ids(data: bytes) -> list[int]:
    return _values("i", data)


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    return _bytes(array("f", logprobs))


def unpack_logprobs(data: bytes) -> list[float]:
    return _values("f", data)


def _bytes(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _values(typecode: str, data: bytes) -> list[Any]:
    values = array(typecode, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
