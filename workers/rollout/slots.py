"""Adapter slots: which LoRA adapters are in memory, and the product of all adapters of a batch at once.

A slot holds the adapter's tensors in the compute dtype, unscaled. A batch concatenates the slots that its rows
use into one A and one B product for each fused projection; a mask leaves each row the columns of its own adapter.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from app.errors import AdapterInvalid, Conflict, ObjectMissing
from workers.lora import LoraWeights, read_adapter, weights_digest
from workers.rollout.decoder import FUSED

TENSOR_NAME = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight")


@dataclass(eq=False)
class Slot:
    """One resident adapter; `a[module]` [layers, rank, in], `b[module]` [layers, out, rank], in the compute dtype."""

    key: str
    digest: str  # of the tensors below, read back in the file's names
    rank: int
    scaling: float
    a: dict[str, torch.Tensor]
    b: dict[str, torch.Tensor]
    pins: int = 0  # live requests that run on it


def fill_slot(
    key: str, weights: LoraWeights, shapes: dict[str, tuple[int, int]], layers: int, dtype: torch.dtype, max_rank: int
) -> Slot:
    """Copies an adapter into a new slot and hashes what the slot holds. Raises AdapterInvalid where it does not fit."""
    if weights.rank > max_rank:
        raise AdapterInvalid(f"LoRA rank {weights.rank} is over the engine's maximum of {max_rank}", param="rank")
    stacks: dict[str, dict[str, torch.Tensor]] = {"A": {}, "B": {}}
    held: dict[str, torch.Tensor] = {}
    for name, tensor in weights.tensors.items():
        match = TENSOR_NAME.fullmatch(name)
        layer, module, side = match.groups() if match else ("", "", "")
        if module not in shapes or int(layer) >= layers:
            raise AdapterInvalid(f"the base model has no linear layer for adapter tensor {name}", param=name)
        out_features, in_features = shapes[module]
        expected = (weights.rank, in_features) if side == "A" else (out_features, weights.rank)
        if tuple(tensor.shape) != expected:
            raise AdapterInvalid(f"{name} has shape {list(tensor.shape)}, not {list(expected)}", param=name)
        stack = stacks[side].setdefault(module, torch.zeros(layers, *expected, dtype=dtype))
        held[name] = stack[int(layer)].copy_(tensor)
        # Times the scaling, as the batch uses it: 0 times infinity in a neighbour's row would be NaN.
        if not (held[name].float() * weights.scaling).to(dtype).isfinite().all():
            raise AdapterInvalid(f"adapter tensor {name} overflows {dtype}", param=name)
    if stacks["A"].keys() != stacks["B"].keys() or not held:
        raise AdapterInvalid("adapter lacks lora_A or lora_B tensors")
    digest = weights_digest(held, dtype)
    return Slot(key, digest, weights.rank, weights.scaling, stacks["A"], stacks["B"])


class AdapterSlots:
    """Registered adapters, of which at most `limit` are in memory.

    The least recently used one without live requests makes room. Called from any thread.
    """

    def __init__(
        self, limit: int, shapes: dict[str, tuple[int, int]], layers: int, dtype: torch.dtype, max_rank: int
    ) -> None:
        self._limit = limit
        self._shapes, self._layers, self._dtype, self._max_rank = shapes, layers, dtype, max_rank
        self._lock = threading.Lock()
        self._registered: dict[str, tuple[Path, str]] = {}  # key -> folder, digest
        self._resident: OrderedDict[str, Slot] = OrderedDict()  # least recently used first

    def register(self, key: str, folder: Path) -> str:
        """Reads the folder, makes the adapter resident if a slot is free of live requests, and returns its digest."""
        with self._lock:
            known = self._registered.get(key)
            if known is not None and known[0] == folder:
                return known[1]
        slot = self._read(key, folder)
        with self._lock:
            known = self._registered.get(key)
            if known is not None and known[1] != slot.digest:
                raise Conflict(f"adapter key {key} already names other weights", param="key")
            self._registered[key] = (folder, slot.digest)
            if key not in self._resident and self._has_room():
                self._place(slot)
        return slot.digest

    def acquire(self, key: str) -> Slot | None:
        """Pins the adapter for one request, reading its folder again if need be; None: all slots have live requests.

        Raises ObjectMissing (not registered, file gone or changed) or AdapterInvalid.
        """
        with self._lock:
            if key not in self._registered:
                raise ObjectMissing(f"adapter {key} is not loaded", param="adapter")
            folder, digest = self._registered[key]
            slot = self._resident.get(key)
            if slot is None and not self._has_room():
                return None
        if slot is None:
            slot = self._read(key, folder)
            if slot.digest != digest:
                raise ObjectMissing(f"the files of adapter {key} changed since it was loaded", param="adapter")
        with self._lock:
            if key not in self._resident:
                if not self._has_room():
                    return None
                self._place(slot)
            slot = self._resident[key]
            self._resident.move_to_end(key)
            slot.pins += 1
        return slot

    def release(self, slot: Slot) -> None:
        with self._lock:
            slot.pins -= 1
            if not slot.pins and slot.key not in self._registered:
                del self._resident[slot.key]

    def remove(self, key: str) -> None:
        """Forgets the adapter; live requests end on it, later ones are refused."""
        with self._lock:
            self._registered.pop(key, None)
            if key in self._resident and not self._resident[key].pins:
                del self._resident[key]

    def resident(self) -> dict[str, str]:
        with self._lock:
            return {key: slot.digest for key, slot in self._resident.items()}

    def _has_room(self) -> bool:
        return len(self._resident) < self._limit or any(not slot.pins for slot in self._resident.values())

    def _place(self, slot: Slot) -> None:
        if len(self._resident) >= self._limit:
            del self._resident[next(key for key, other in self._resident.items() if not other.pins)]
        self._resident[slot.key] = slot

    def _read(self, key: str, folder: Path) -> Slot:
        with torch.inference_mode():
            return fill_slot(key, read_adapter(folder), self._shapes, self._layers, self._dtype, self._max_rank)


class AdapterBatch:
    """The LoRA branch of several adapters, concatenated: y += mask(x A^T) B, with each adapter's scaling in its B."""

    def __init__(self, slots: Sequence[Slot], shapes: dict[str, tuple[int, int]], layers: int) -> None:
        self.slots = tuple(slots)
        self._a: dict[str, torch.Tensor] = {}  # fused projection -> [layers, columns, in]
        self._b: dict[str, torch.Tensor] = {}  # [layers, columns, out]
        self._owner: dict[str, torch.Tensor] = {}  # [columns]: index of the slot that a column belongs to
        for fused, modules in FUSED.items():
            parts = [(i, slot, m) for i, slot in enumerate(slots) for m in modules if m in slot.a]
            if not parts:
                continue
            a = torch.cat([slot.a[module] for _, slot, module in parts], dim=1)
            b = torch.zeros(layers, a.shape[1], sum(shapes[m][0] for m in modules), dtype=a.dtype)
            offsets = dict(zip(modules, _starts([shapes[m][0] for m in modules]), strict=True))
            column = 0
            for _, slot, module in parts:
                out = slice(offsets[module], offsets[module] + shapes[module][0])
                torch.mul(slot.b[module].transpose(1, 2), slot.scaling, out=b[:, column : column + slot.rank, out])
                column += slot.rank
            self._a[fused], self._b[fused] = a, b
            self._owner[fused] = torch.tensor([i for i, slot, _ in parts for _ in range(slot.rank)])

    def rows(self, slots: Sequence[Slot | None]) -> AdapterRows:
        """The branch for rows that use these slots; None: the base model."""
        place = {slot: i for i, slot in enumerate(self.slots)}
        index = torch.tensor([-1 if slot is None else place[slot] for slot in slots])
        foreign = {fused: owner != index[:, None] for fused, owner in self._owner.items()}
        return AdapterRows(self._a, self._b, foreign)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    _a: dict[str, torch.Tensor]
    _b: dict[str, torch.Tensor]
    _foreign: dict[str, torch.Tensor]  # fused projection -> [n, columns]: columns of other rows' adapters

    def add(self, fused: str, layer: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [n, in]; out [n, out] += each row's own adapter's share."""
        if fused in self._a:
            # Filled, not multiplied by 0: another row's adapter may have overflowed.
            low = F.linear(x, self._a[fused][layer]).masked_fill_(self._foreign[fused], 0)
            out.addmm_(low, self._b[fused][layer])


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]
