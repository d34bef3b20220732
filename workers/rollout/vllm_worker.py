"""Runs in vLLM's own worker processes (`worker_extension_cls`): tells what an adapter slot holds, by hashes.

vLLM's slots are stacked by module: `lora_a_stacked[part][slot, 0]` is A [max_rank, in], `lora_b_stacked` B
[out, max_rank]; q, k and v are three parts of `qkv_proj`, gate and up two of `gate_up_proj`. Each rank of a tensor
parallel group holds a range of B's rows (column parallel) or of A's columns (row parallel).
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from workers.lora import tensor_name

# Name in the adapter file, axis and range of the part that this rank holds, its SHA-256 ("": all zero).
Part = tuple[str, int, int, int, str]

RANK_PADDING = "not zero past the adapter's rank"


def tensor_hash(tensor: torch.Tensor) -> str:
    """SHA-256 of the bytes; "" for zeros, so that modules without LoRA cost nothing."""
    if not tensor.any():
        return ""
    return hashlib.sha256(tensor.to("cpu").contiguous().view(torch.uint8).numpy().data).hexdigest()


@dataclass(frozen=True)
class Copied:
    """What a rank's slot holds of one tensor of the adapter file, and what lies past the adapter's rank."""

    name: str
    axis: int
    start: int
    tensor: torch.Tensor
    padding: torch.Tensor

    def hashed(self) -> Part:
        found = RANK_PADDING if self.padding.any() else tensor_hash(self.tensor)
        return self.name, self.axis, self.start, self.start + self.tensor.shape[self.axis], found


class WorkerExtension:
    """Methods that the engine calls by name; nothing but names, integers and hashes crosses the process border."""

    def marlaas_keep_cache_finite(self) -> None:
        """Lets no NaN and no infinity into the key/value cache of the CPU.

        Its attention multiplies masked positions by 0 as well, so that a block once used by an adapter that overflowed
        would give NaN to its next owner. The row itself keeps its NaN in the residual stream, and fails.
        """
        from vllm import _custom_ops as ops

        store = ops.cpu_attn_reshape_and_cache

        def store_finite(key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> None:
            store(key.nan_to_num(), value.nan_to_num(), *rest, **named)

        ops.cpu_attn_reshape_and_cache = store_finite

    def marlaas_end_with(self, owner: int) -> None:
        """vLLM's processes outlive an owner that is killed: this ends them with it."""
        core = os.getppid()

        def watch() -> None:
            select.select([os.pidfd_open(owner)], [], [])
            if core != owner:  # else this is the engine core itself
                with suppress(ProcessLookupError):
                    os.kill(core, signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=watch, name="owner", daemon=True).start()

    def marlaas_copy_slot(self, adapter_id: int, rank: int) -> None:
        """Copies the slot that serves the adapter now and begins to hash the copy: decoding waits for the copy alone.

        Raises ValueError when no slot does.
        """
        manager = self._marlaas_manager()
        slot = manager.lora_index_to_id.index(adapter_id)
        copied: list[Copied] = []
        for name, module in manager.modules.items():
            if isinstance(module.lora_a_stacked, torch.Tensor):  # embeddings and head: no adapter of ours has these
                whole = module.lora_a_stacked[slot].clone()
                copied.append(Copied(tensor_name(name, "A"), 0, 0, whole, whole.new_empty(0)))
                continue
            for place, part in enumerate(manager.packed_modules.get(name, [name])):
                a = module.lora_a_stacked[place][slot, 0].clone()
                b = module.lora_b_stacked[place][slot, 0].clone()
                a_start, b_start = a.shape[1] * _a_shard(module), b.shape[0] * _b_shard(module, place)
                copied.append(Copied(tensor_name(part, "A"), 1, a_start, a[:rank], a[rank:]))
                copied.append(Copied(tensor_name(part, "B"), 0, b_start, b[:, :rank], b[:, rank:]))
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # the hashing thread has a stream of its own
        self._marlaas_hashing: Future[list[Part]] = Future()
        threading.Thread(target=_hash, args=(copied, self._marlaas_hashing), name="hashing", daemon=True).start()

    def marlaas_slot_parts(self) -> list[Part] | None:
        """Every part of the slot that was copied last; None: not all are hashed yet."""
        return self._marlaas_hashing.result() if self._marlaas_hashing.done() else None

    def marlaas_free_slot(self, adapter_id: int) -> bool:
        """Takes the adapter out of its slot; vLLM keeps it in its CPU cache."""
        return self._marlaas_manager().deactivate_adapter(adapter_id)

    def _marlaas_manager(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]


def _hash(copied: Sequence[Copied], hashing: Future[list[Part]]) -> None:
    torch.set_num_threads(1)  # of this thread: it must not start a team of its own beside the engine's
    try:
        hashing.set_result([part.hashed() for part in copied])
    except Exception as error:  # is raised where the parts are asked for
        hashing.set_exception(error)


def _a_shard(module: Any) -> int:
    """Which range of A's columns this rank holds: row parallel layers share out their input."""
    return module.tp_rank if _row_parallel(module) else 0


def _b_shard(module: Any, place: int) -> int:
    """Which range of B's rows; ranks may share one, as those of key and value heads."""
    if module.tp_size == 1 or _row_parallel(module):
        return 0
    return module.output_ids[place] if hasattr(module, "output_ids") else module.tp_rank


def _row_parallel(module: Any) -> bool:
    layer = module.base_layer
    return getattr(layer, "input_size_per_partition", layer.input_size) < layer.input_size
