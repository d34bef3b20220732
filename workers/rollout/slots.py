"""Adapter slots: which LoRA adapters are in memory, and the products of all adapters of a batch at once.

A slot holds the adapter's tensors in the compute dtype, unscaled. A batch stacks the slots that its rows use, and
batched products run each row through its own adapter alone: their cost hardly depends on how many adapters there are.
"""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from app.errors import AdapterInvalid, Conflict, ObjectMissing
from workers.lora import LoraWeights, read_adapter, weights_digest
from workers.rollout.decoder import FUSED, on_device

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
        self,
        limit: int,
        shapes: dict[str, tuple[int, int]],
        layers: int,
        dtype: torch.dtype,
        max_rank: int,
        device: str = "cpu",
    ) -> None:
        self._limit, self._device = limit, device
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
        with torch.inference_mode(), on_device(self._device):
            return fill_slot(key, read_adapter(folder), self._shapes, self._layers, self._dtype, self._max_rank)


class AdapterBatch:
    """The LoRA branches of a batch's adapters: stacks of the adapters of one rank, so that none is padded."""

    def __init__(self, shapes: dict[str, tuple[int, int]], layers: int) -> None:
        self._shapes, self._layers = shapes, layers
        self._stacks: dict[int, Stack] = {}

    def hold(self, slots: Collection[Slot]) -> None:
        """Takes in the slots that it lacks and drops the others; what `rows` gave before is void."""
        for rank in {slot.rank for slot in slots} - self._stacks.keys():
            self._stacks[rank] = Stack(rank, self._shapes, self._layers)
        for rank, stack in self._stacks.items():
            stack.hold([slot for slot in slots if slot.rank == rank])
        self._stacks = {rank: stack for rank, stack in self._stacks.items() if stack.slots}

    def rows(self, slots: Sequence[Slot | None]) -> AdapterRows:
        """The branch for rows that use these slots; None: the base model."""
        products: dict[str, list[Product]] = {}
        for stack in self._stacks.values():
            for first, rows, width in stack.divide(slots):
                for fused in stack.used:
                    products.setdefault(fused, []).append(stack.product(fused, len(slots), first, rows, width))
        return AdapterRows(products)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    _products: dict[str, list[Product]]

    def add(self, fused: str, layer: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [n, in]; out [n, out] += each row's own adapter's share."""
        for product in self._products.get(fused, ()):
            product.add(layer, x, out)


@dataclass(frozen=True, slots=True)
class Product:
    """The share of some adapters in a fused projection, of equally many rows for each, as one pair of products.

    Vectors of `out` are its rows cut into blocks, of which each belongs to one module.
    """

    a: Sequence[torch.Tensor]  # a layer: [adapters, in, modules * rank]
    b: Sequence[torch.Tensor]  # [adapters * blocks, rank, block]
    gather: torch.Tensor  # [adapters * width]: their rows; any row where an adapter has fewer
    spread: torch.Tensor | None  # [adapters * blocks * width]: the low-rank vector of each block; None: as they are
    order: torch.Tensor  # the resulting vectors that are wanted, in the order of `out`
    targets: torch.Tensor | None  # the vectors of `out` that they belong to; None: all of it

    def add(self, layer: int, x: torch.Tensor, out: torch.Tensor) -> None:
        a, b = self.a[layer], self.b[layer]
        low = torch.bmm(x.index_select(0, self.gather).view(len(a), -1, x.shape[1]), a).view(-1, b.shape[1])
        if self.spread is not None:
            low = low.index_select(0, self.spread)
        share = torch.bmm(low.view(len(b), -1, b.shape[1]), b).view(-1, b.shape[2]).index_select(0, self.order)
        vectors = out.view(-1, b.shape[2])
        if self.targets is None:
            vectors.add_(share)
        else:
            vectors.index_add_(0, self.targets, share)


class Stack:
    """Adapters of one rank, one behind the other: batched products run each row through its own adapter.

    The modules of a fused projection share one A. B is cut into blocks of a common size, so that nothing is
    multiplied with zeros: query, key and value of 576, 192 and 192 outputs make the blocks q q q k v.
    """

    def __init__(self, rank: int, shapes: dict[str, tuple[int, int]], layers: int) -> None:
        self.slots: list[Slot] = []
        self._rank, self._layers, self._shapes = rank, layers, shapes
        self._capacity = 0
        self._a: dict[str, torch.Tensor] = {}  # fused projection -> [layers, capacity, modules * rank, in]
        self._b: dict[str, torch.Tensor] = {}  # [layers, capacity, blocks, block, rank], times the scaling
        self._module: dict[str, list[int]] = {}  # which of the fused modules each block belongs to
        self.used: set[str] = set()  # fused projections that any of the adapters has

    def hold(self, slots: Sequence[Slot]) -> None:
        """Takes in and drops adapters; the last one moves into the gap of one that leaves."""
        for place in reversed(range(len(self.slots))):
            if self.slots[place] not in slots:
                last = self.slots.pop()
                if place < len(self.slots):
                    self.slots[place] = last
                    for stacked in (*self._a.values(), *self._b.values()):
                        stacked[:, place] = stacked[:, len(self.slots)]
        for slot in slots:
            if slot not in self.slots:
                if len(self.slots) == self._capacity:
                    self._grow(next(iter(slot.a.values())))
                self._fill(len(self.slots), slot)
                self.slots.append(slot)
        self.used = {fused for fused, names in FUSED.items() if any(n in slot.a for slot in slots for n in names)}

    def _grow(self, like: torch.Tensor) -> None:
        old = self._a, self._b
        self._capacity = max(4, 2 * self._capacity)
        for fused, modules in FUSED.items():
            outs = [self._shapes[module][0] for module in modules]
            block = math.gcd(*outs)
            module = self._module[fused] = [i for i, out in enumerate(outs) for _ in range(out // block)]
            inputs = self._shapes[modules[0]][1]
            a = like.new_zeros(self._layers, self._capacity, len(modules) * self._rank, inputs)
            b = like.new_zeros(self._layers, self._capacity, len(module), block, self._rank)
            for stacked, new in zip(old, (a, b), strict=True):
                if fused in stacked:
                    new[:, : len(self.slots)] = stacked[fused]
                stacked[fused] = new

    def _fill(self, place: int, slot: Slot) -> None:
        for fused, modules in FUSED.items():
            a, b = self._a[fused][:, place].zero_(), self._b[fused][:, place].zero_()
            for i, module in enumerate(modules):
                if module in slot.a:
                    a[:, i * self._rank : (i + 1) * self._rank] = slot.a[module]
                    own = [k for k, owner in enumerate(self._module[fused]) if owner == i]
                    b[:, own[0] : own[-1] + 1] = (slot.b[module] * slot.scaling).unflatten(1, (len(own), b.shape[2]))

    def divide(self, slots: Sequence[Slot | None]) -> list[tuple[int, list[list[int]], int]]:
        """Rows as products: the place of the first adapter, each adapter's rows, and how many at most.

        One product of equal width over all adapters, and one for each adapter with more rows than that.
        """
        place = {slot: i for i, slot in enumerate(self.slots)}
        rows: list[list[int]] = [[] for _ in self.slots]
        for row, slot in enumerate(slots):
            if slot in place:
                rows[place[slot]].append(row)
        lengths = [len(mine) for mine in rows]
        # Measured: as much time as 10 rows for an adapter to be in a product, and as 50 for another product.
        width = min({0, *lengths}, key=lambda w: (10 + w) * len(rows) * (w > 0) + 50 * sum(n > w for n in lengths))
        tails = [(i, [mine[width:]], len(mine) - width) for i, mine in enumerate(rows) if len(mine) > width]
        return ([(0, [mine[:width] for mine in rows], width)] if width else []) + tails

    def product(self, fused: str, n: int, first: int, rows: list[list[int]], width: int) -> Product:
        """Of `n` rows in all; see `divide`."""
        a, b = (stacked[fused][:, first : first + len(rows)] for stacked in (self._a, self._b))
        module = self._module[fused]
        modules, blocks = len(FUSED[fused]), len(module)
        # Cells are the resulting vectors: an adapter, a block, one of the adapter's rows.
        cells = [(i, k, j) for i in range(len(rows)) for k in range(blocks) for j in range(width)]
        targets = {rows[i][j] * blocks + k: cell for cell, (i, k, j) in enumerate(cells) if j < len(rows[i])}

        def index(values: Iterable[int]) -> torch.Tensor:
            return torch.tensor(list(values), device=a.device)

        return Product(
            a=a.transpose(2, 3).unbind(),
            b=b.flatten(1, 2).transpose(2, 3).unbind(),
            gather=index(row for mine in rows for row in mine + [0] * (width - len(mine))),
            spread=index((i * width + j) * modules + module[k] for i, k, j in cells) if blocks > 1 else None,
            order=index(targets[target] for target in sorted(targets)),
            targets=index(sorted(targets)) if len(targets) < n * blocks else None,
        )
