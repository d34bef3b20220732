"""One frozen base model over several processes, one a device: accelerate's FSDP 2, each decoder layer a unit.

Accelerate turns FSDP on for accelerators only, but its preparation of a model is the same on any device: the plugin is
set by hand, so that CPUs (gloo) run what GPUs (nccl) run. `Accelerator.prepare` itself wants an optimizer over the
model's parameters; these are frozen, and an adapter's masters are no part of the model. Layers are called without
hooks, so they are gathered by name: `unshard` before one is used, `reshard` after it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.tensor import DTensor

from workers.training.layer import Layer
from workers.training.lora_model import LoraModel

COLLECTIVE_SECONDS = 240.0  # a rank waits this long for the others: less than a worker may make no progress


@dataclass(frozen=True)
class Place:
    """One of `ranks` processes of one machine, which meet at the file `store`."""

    rank: int
    ranks: int
    store: str
    device: str  # "cpu", or "cuda", of which each rank takes the one of its number


class ShardedModel(LoraModel):
    """As LoraModel, with the layers' parameters spread over the ranks, which must all do the same passes.

    Embedding, head and norms are whole in every process. Made once in a process; returns once all ranks are there.
    """

    def __init__(self, model_path: Path, dtype: torch.dtype, checkpointing: bool, place: Place) -> None:
        self._place = place
        super().__init__(model_path, dtype, checkpointing, place.device)

    def place(self, layers: list[Layer]) -> list[Layer]:
        units = Units(layers)
        fsdp2_prepare_model(join(self._place), units)
        units()
        return layers

    def in_turn(self, back: bool = False) -> Iterator[Layer]:
        layers: list[Any] = self.layers[::-1] if back else self.layers  # each an FSDPModule too
        layers[0].unshard(async_op=True)
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            layer.unshard()
            if following is not None:
                following.unshard(async_op=True)  # beside this layer's work
            yield layer
            layer.reshard()

    def held_bytes(self) -> int:
        """Bytes of the layers' parameters in this process."""
        parameters = (p for layer in self.layers for p in layer.parameters())
        return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in parameters)


class Units(nn.Module):
    """The root that FSDP wants above its units; its forward is called once, to have them set up."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self) -> None:
        pass


def join(place: Place) -> Accelerator:
    """Makes this process one of the ranks."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo" if place.device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{place.store}",
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[Layer.__name__]
    )
    variables = {"RANK": place.rank, "LOCAL_RANK": place.rank}
    variables |= {"WORLD_SIZE": place.ranks, "LOCAL_WORLD_SIZE": place.ranks}
    variables |= {"OMP_NUM_THREADS": torch.get_num_threads()}  # or accelerate sets torch's threads
    with environment(variables):
        accelerator = Accelerator(cpu=place.device == "cpu", mixed_precision="no", fsdp_plugin=plugin)
    accelerator.state.fsdp_plugin = plugin
    return accelerator


@contextmanager
def environment(values: dict[str, int]) -> Iterator[None]:
    """Variables for as long as accelerate reads them: no other library shall think that a launcher started this."""
    before = {name: os.environ.get(name) for name in [*values, "ACCELERATE_USE_FSDP"]}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
