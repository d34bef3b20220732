"""Adapters in vLLM: staged as files of our own, given integer ids that are never reused, proved in their slots.

vLLM tells adapters apart by their integer id alone, and multiplies B by alpha / rank in the compute dtype when it loads
a file. So a staged file holds exactly what the slot is to hold, the cast of A and the cast of B times the scaling, with
alpha = rank, so that vLLM changes nothing. After each load the slot is read back, unfused to the names of the file, and
compared part by part with the hashes of the staged tensors. The digest of a result is `weights_digest` of the unscaled
cast, as every other part of the service computes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

import structlog
import torch
from safetensors.torch import load, save
from transformers import AutoConfig, AutoModelForCausalLM

from app.errors import AdapterInvalid, Conflict, InfrastructureFault, MarlaasError, ObjectMissing
from workers.lora import CONFIG_FILE, WEIGHTS_FILE, LoraWeights, read_adapter, tensor_name, weights_digest
from workers.rollout.vllm_worker import Part, tensor_hash

LOADS = 2  # of one adapter, where the first one leaves other weights in the slot

log = structlog.get_logger(__name__)
Shapes = dict[str, tuple[int, int]]
Range = tuple[int, int, int]  # axis, start, stop


class LoraCalls(Protocol):
    """What this file asks of vLLM. Every call raises EngineDeadError when the engine is dead."""

    async def add(self, name: str, adapter_id: int, folder: Path) -> None:
        """Puts the adapter into a slot, from its files if vLLM does not know the id. Raises InfrastructureFault."""
        ...

    async def remove(self, adapter_id: int) -> None: ...

    async def free_slot(self, adapter_id: int) -> None: ...

    async def read_slot(self, adapter_id: int, rank: int) -> list[list[Part]]:
        """One list for each tensor parallel rank. Raises InfrastructureFault."""
        ...


def linear_shapes(model: Path) -> Shapes:
    """(out, in) of every linear layer that an adapter may change, by the module's name."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    head = skeleton.get_output_embeddings()
    return {
        name: (module.out_features, module.in_features)
        for name, module in skeleton.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }


def cast_for_slot(weights: LoraWeights, shapes: Shapes, dtype: torch.dtype, max_rank: int) -> dict[str, torch.Tensor]:
    """The tensors that a slot is to hold: A cast, B cast and scaled. Raises AdapterInvalid where they do not fit."""
    if weights.rank > max_rank:
        raise AdapterInvalid(f"LoRA rank {weights.rank} is over the engine's maximum of {max_rank}", param="rank")
    expected = {tensor_name(module, "A"): (weights.rank, inputs) for module, (_, inputs) in shapes.items()}
    expected |= {tensor_name(module, "B"): (outputs, weights.rank) for module, (outputs, _) in shapes.items()}
    held: dict[str, torch.Tensor] = {}
    for name, tensor in weights.tensors.items():
        if name not in expected:
            raise AdapterInvalid(f"the base model has no linear layer for adapter tensor {name}", param=name)
        if tuple(tensor.shape) != expected[name]:
            raise AdapterInvalid(f"{name} has shape {list(tensor.shape)}, not {list(expected[name])}", param=name)
        held[name] = tensor.to(dtype)
        if ".lora_B." in name:
            held[name] = held[name] * weights.scaling
        if not held[name].isfinite().all():
            raise AdapterInvalid(f"adapter tensor {name} overflows {dtype}", param=name)
    a = {name for name in held if ".lora_A." in name}
    if not held or {name.replace(".lora_A.", ".lora_B.") for name in a} != held.keys() - a:
        raise AdapterInvalid("adapter lacks lora_A or lora_B tensors")
    return held


@dataclass(eq=False)
class Staged:
    """An adapter's files as vLLM reads them, and the hashes that its slot must show."""

    key: str
    source: Path
    folder: Path
    digest: str  # of the unscaled cast
    rank: int
    file_hash: str
    sizes: dict[str, tuple[int, ...]]
    hashes: dict[tuple[str, Range], str] = field(default_factory=dict)

    @property
    def intact(self) -> bool:
        """Whether the weights file is still the one that was written."""
        try:
            return hashlib.sha256((self.folder / WEIGHTS_FILE).read_bytes()).hexdigest() == self.file_hash
        except FileNotFoundError:
            return False

    def is_in(self, slot: Sequence[Sequence[Part]]) -> bool:
        """Whether a slot, as its ranks told it, holds all of this adapter and nothing else."""
        covered: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for name, axis, start, stop, hashed in (part for rank in slot for part in rank):
            if hashed != (self._hash(name, (axis, start, stop)) if name in self.sizes else ""):
                return False
            covered[name].append((start, stop))
        return all(_cover(covered[name], size[1 if ".lora_A." in name else 0]) for name, size in self.sizes.items())

    def _hash(self, name: str, part: Range) -> str:
        if (name, part) not in self.hashes:  # the range of one tensor parallel rank
            axis, start, stop = part
            tensor = load((self.folder / WEIGHTS_FILE).read_bytes())[name]
            self.hashes[name, part] = tensor_hash(tensor.narrow(axis, start, stop - start))
        return self.hashes[name, part]


def _cover(ranges: Sequence[tuple[int, int]], size: int) -> bool:
    end = 0
    for start, stop in sorted(ranges):
        if start > end:
            return False
        end = max(end, stop)
    return end == size


class Staging:
    """Writes adapters for vLLM into folders of their own below `root`. Called from any thread."""

    def __init__(self, root: Path, shapes: Shapes, dtype: torch.dtype, max_rank: int) -> None:
        self._root, self._shapes, self._dtype, self._max_rank = root, shapes, dtype, max_rank
        self._folders = count(1)

    def stage(self, key: str, source: Path) -> Staged:
        """Raises ObjectMissing or AdapterInvalid as `read_adapter`, and AdapterInvalid for what does not fit."""
        with torch.inference_mode():
            weights = read_adapter(source)
            held = cast_for_slot(weights, self._shapes, self._dtype, self._max_rank)
            folder = self._root / str(next(self._folders))
            folder.mkdir()
            data = save(held)
            (folder / WEIGHTS_FILE).write_bytes(data)
            config = {"peft_type": "LORA", "r": weights.rank, "lora_alpha": weights.rank, "bias": "none"}
            config |= {"target_modules": sorted({name.rsplit(".", 3)[1] for name in held})}
            (folder / CONFIG_FILE).write_text(json.dumps(config))
            return Staged(
                key=key,
                source=source,
                folder=folder,
                digest=weights_digest(weights.tensors, self._dtype),
                rank=weights.rank,
                file_hash=hashlib.sha256(data).hexdigest(),
                sizes={name: tuple(tensor.shape) for name, tensor in held.items()},
                hashes={(name, _whole(name, tensor)): tensor_hash(tensor) for name, tensor in held.items()},
            )


def _whole(name: str, tensor: torch.Tensor) -> Range:
    axis = 1 if ".lora_A." in name else 0
    return axis, 0, tensor.shape[axis]


@dataclass(eq=False)
class Loaded:
    """An adapter that vLLM knows under an id."""

    staged: Staged
    id: int
    in_slot: bool = False  # it is in one, or may be
    proved: bool = False  # the slot was read back
    pins: int = 0  # live requests that run on it


class VllmAdapters:
    """Registered adapters, of which vLLM knows at most `cached`, `slots` of these in slots.

    The least recently used ones without live requests make room. vLLM never loads or moves an adapter by itself, since
    it is never given more than it can hold. For the engine's event loop, but for what says otherwise.
    """

    calls: LoraCalls  # of the vLLM that lives now

    def __init__(self, staging: Staging, slots: int, cached: int) -> None:
        self._staging, self._slots, self._cached = staging, slots, max(slots, cached)
        self._registered: dict[str, Staged] = {}
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()  # least recently used first
        self._ids = count(1)
        self._one_load = asyncio.Lock()

    async def register(self, staged: Staged) -> str:
        """Returns the digest, proved by a slot if one is free of live requests. Raises Conflict, or as `acquire`."""
        key = staged.key
        loaded = self._loaded.get(key)
        known = self._registered.get(key) or (loaded.staged if loaded else None)
        if known is not None:
            self._discard(staged)
            if known.digest != staged.digest:
                raise Conflict(f"adapter key {key} already names other weights", param="key")
            known.source = staged.source
            self._registered[key] = known
            return known.digest
        self._registered[key] = staged
        try:
            async with self._one_load:
                if self._free_for(key):
                    await self._load(key)
        except MarlaasError:
            self.withdraw(key)
            await self.forget(staged)
            raise
        return staged.digest

    async def acquire(self, key: str) -> Loaded:
        """Pins the adapter in a slot for one request; the caller sees to it that one is free.

        Raises ObjectMissing (not registered; staged and source files gone or changed), AdapterInvalid, or
        InfrastructureFault where the slot holds other weights again and again.
        """
        async with self._one_load:
            loaded = self._loaded.get(key)
            if loaded is None or not loaded.proved or key not in self._registered:
                loaded = await self._load(key)
            self._loaded.move_to_end(key)
            loaded.pins += 1
            return loaded

    async def release(self, loaded: Loaded) -> None:
        loaded.pins -= 1
        if self._registered.get(loaded.staged.key) is not loaded.staged:
            await self.forget(loaded.staged)

    def withdraw(self, key: str) -> Staged | None:
        """Later requests are refused, from now on; live ones end on the adapter. Called from any thread."""
        return self._registered.pop(key, None)

    async def forget(self, staged: Staged) -> None:
        """Removes a withdrawn adapter, first from vLLM and then its files, once no live request runs on it."""
        async with self._one_load:
            key = staged.key
            loaded = self._loaded.get(key)
            if self._registered.get(key) is staged:
                return
            if loaded is not None and loaded.staged is staged:
                if loaded.pins:
                    return
                await self._drop(key)
            self._discard(staged)

    def lost(self) -> None:
        """The engine is new: it knows none of them, and gets them again under new ids."""
        for key, loaded in self._loaded.items():
            if key not in self._registered:
                self._discard(loaded.staged)
        self._loaded.clear()

    def in_slots(self) -> dict[str, str]:
        """Key -> digest of those that are proved. Called from any thread."""
        return {key: loaded.staged.digest for key, loaded in list(self._loaded.items()) if loaded.proved}

    def known(self, key: str, source: Path) -> str | None:
        """The digest, where the key is registered from this very folder. Called from any thread."""
        staged = self._registered.get(key)
        return staged.digest if staged is not None and staged.source == source else None

    def _free_for(self, key: str) -> bool:
        held = [loaded for other, loaded in self._loaded.items() if loaded.in_slot and other != key]
        return len(held) < self._slots or any(not loaded.pins for loaded in held)

    async def _load(self, key: str) -> Loaded:
        """Puts a registered adapter into a slot and proves it there."""
        for _ in range(LOADS):
            if key not in self._registered:
                raise ObjectMissing(f"adapter {key} is not loaded", param="adapter")
            staged = await self._intact(key)
            loaded = self._loaded.get(key)
            await self._make_room(new=loaded is None)
            if loaded is None:
                loaded = self._loaded[key] = Loaded(staged, next(self._ids))
            try:
                loaded.in_slot = True
                # The name is part of vLLM's prefix cache keys: the same weights find their prefixes again.
                await self.calls.add(f"{key}:{staged.digest}", loaded.id, staged.folder)
                loaded.proved = staged.is_in(await self.calls.read_slot(loaded.id, staged.rank))
                if loaded.proved:
                    return loaded
            except InfrastructureFault:
                await self._drop(key)
                raise
            log.error("slot holds other weights", adapter=key, id=loaded.id)
            await self._drop(key)
        raise InfrastructureFault(f"the engine's slot holds other weights than those of adapter {key}")

    async def _intact(self, key: str) -> Staged:
        """The staged adapter, written anew from its source if its own files are damaged."""
        staged = self._registered[key]
        if await asyncio.to_thread(lambda: staged.intact):
            return staged
        again = await asyncio.to_thread(self._staging.stage, key, staged.source)
        if again.digest != staged.digest:
            self._discard(again)
            raise ObjectMissing(f"the files of adapter {key} changed since it was loaded", param="adapter")
        self._discard(staged)
        staged.folder, staged.file_hash = again.folder, again.file_hash
        return staged

    async def _make_room(self, new: bool) -> None:
        """For one more in a slot, and, if new, one more known to vLLM."""
        unpinned = [loaded for loaded in self._loaded.values() if not loaded.pins]
        in_slots = [loaded for loaded in self._loaded.values() if loaded.in_slot]
        if len(in_slots) == self._slots:
            victim = next(loaded for loaded in unpinned if loaded.in_slot)
            await self.calls.free_slot(victim.id)
            victim.in_slot = victim.proved = False
        if new and len(self._loaded) == self._cached:
            await self._drop(next(loaded.staged.key for loaded in unpinned if not loaded.in_slot))

    async def _drop(self, key: str) -> None:
        await self.calls.remove(self._loaded.pop(key).id)

    def _discard(self, staged: Staged) -> None:
        shutil.rmtree(staged.folder, ignore_errors=True)
