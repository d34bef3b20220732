"""A trainer whose base model is spread over several processes of one machine, one a device.

Rank 0 is this process; it starts the others, sends each micro-batch of a wave to a rank, and adds up what they give in
the order of one rank alone, so that the result is the same bit for bit. Every wave is the same passes on every rank,
which the gathering of parameters asks for; a rank without a micro-batch repeats one, and nobody asks for its result.
A rank that ends, or falls out of step, ends this process: a supervisor starts it anew, leases give the round back.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import structlog
import torch
from torch import Tensor

from app.embedded.processes import spawn
from app.errors import InvalidRequest, NonFinite
from app.specs.job import HyperparametersSpec
from workers.lora import LoraWeights
from workers.runtime import EXIT_STUCK
from workers.training.grpo import TokenSums
from workers.training.lora_model import LoraModel
from workers.training.packing import MicroBatch
from workers.training.rank import WORK, Description
from workers.training.sharding import COLLECTIVE_SECONDS, Place, ShardedModel
from workers.training.trainer import GroupSums, Policy, Trainer
from workers.training.wire import Channel, Message, pack_batch

log = structlog.get_logger(__name__)

STDERR = 2
START_SECONDS = 600.0  # that a rank may take to read the model
PRIVATE = ("MARLAAS_", "DATABASE_URL", "REDIS_URL", "AWS_")  # variables that a rank has no use for


def make_trainer(*of_trainer: Any, ranks: int, **options: Any) -> Trainer:
    """The trainer of a worker, over as many processes as there are ranks."""
    return Trainer(*of_trainer, **options) if ranks == 1 else RankedTrainer(*of_trainer, **options, ranks=ranks)


class RankedTrainer(Trainer):
    """As Trainer, over `ranks` processes with `threads` each. One in a process, as there is one process group."""

    def __init__(
        self,
        model_path: Path,
        dtype: torch.dtype,
        *,
        threads: int,
        microbatch_tokens: int,
        gradient_checkpointing: bool = False,
        device: str = "cpu",
        ranks: int,
    ) -> None:
        """Returns once all ranks hold their part. Raises InvalidRequest where there are fewer devices."""
        if device == "cuda" and ranks > torch.cuda.device_count():
            raise InvalidRequest(f"{ranks} ranks (MARLAAS_TRAINING_RANKS), but {torch.cuda.device_count()} devices")
        self._folder = tempfile.TemporaryDirectory(prefix="marlaas-ranks-")
        self._place = Place(0, ranks, str(Path(self._folder.name) / "store"), device)
        name = str(dtype).removeprefix("torch.")
        self.others = []
        for rank in range(1, ranks):
            place = asdict(replace(self._place, rank=rank))
            self.others.append(
                Rank(rank, Description(str(model_path), name, threads, gradient_checkpointing, place), self._end)
            )
        super().__init__(
            model_path,
            dtype,
            threads=threads,
            microbatch_tokens=microbatch_tokens,
            gradient_checkpointing=gradient_checkpointing,
            device=device,
        )

    def load_model(self, model_path: Path, dtype: torch.dtype, gradient_checkpointing: bool, device: str) -> LoraModel:
        model = ShardedModel(model_path, dtype, gradient_checkpointing, self._place)
        theirs = [other.receive(START_SECONDS)[0]["bytes"] for other in self.others]
        self.held_bytes = [model.held_bytes(), *theirs]  # of decoder layers, by rank
        log.info("ranks_ready", device=device, layer_bytes=self.held_bytes)
        return model

    def policy(self, adapter: LoraWeights, hyperparameters: HyperparametersSpec, temperature: float) -> Policy:
        return RankedPolicy(self, adapter, hyperparameters, temperature)

    def close(self) -> None:
        for other in self.others:
            other.end()
        self._folder.cleanup()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Ends the process at any error: ranks wait for each other in the middle of something."""
        try:
            yield
        except Exception:
            self._end("ranks_out_of_step", exc_info=True)

    def _end(self, event: str, **details: Any) -> NoReturn:
        log.critical(event, **details)
        self._folder.cleanup()
        os._exit(EXIT_STUCK)


class Rank:
    """Another rank's process. It ends with this one, however this one ends."""

    def __init__(self, number: int, description: Description, on_end: Callable[..., NoReturn]) -> None:
        self.number, self._on_end, self._ending = number, on_end, False
        ours, theirs = socket.socketpair()
        deadline = struct.pack("ll", int(COLLECTIVE_SECONDS), 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, deadline)  # of a rank that has stopped reading
        self._channel = Channel(Connection(ours.detach()))
        command = [sys.executable, "-m", "workers.training.rank", json.dumps(asdict(description)), str(theirs.fileno())]
        env = {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)}
        self.process = spawn(command, env=env, output=STDERR, pass_fds=[theirs.fileno()])
        theirs.close()
        threading.Thread(target=self._watch, name=f"rank-{number}", daemon=True).start()

    def send(self, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._channel.send(document, tensors)

    def receive(self, seconds: float = COLLECTIVE_SECONDS) -> Message:
        return self._channel.receive(seconds)

    def end(self) -> None:
        """Lets it end by itself."""
        self._ending = True
        self._channel.close()
        self.process.wait(COLLECTIVE_SECONDS)

    def _watch(self) -> None:
        code = self.process.wait()
        if not self._ending:
            self._on_end("rank_ended", rank=self.number, code=code)


class RankedPolicy(Policy):
    """As Policy, with as many micro-batches at once as there are ranks."""

    def __init__(
        self, trainer: RankedTrainer, adapter: LoraWeights, hyperparameters: HyperparametersSpec, temperature: float
    ) -> None:
        super().__init__(trainer.model, adapter, hyperparameters, temperature)
        self.others, self.in_step = trainer.others, trainer.in_step

    def logprobs_of(self, batches: Sequence[MicroBatch]) -> Iterator[Tensor]:
        for _, tensors in self._work("logprobs", [pack_batch(batch) for batch in batches]):
            yield tensors["logprobs"]

    def sums_of(self, batches: Sequence[MicroBatch], old_logprobs: Sequence[Tensor] | None) -> Iterator[GroupSums]:
        items = [pack_batch(batch) for batch in batches]
        for (_, tensors), old in zip(items, old_logprobs or [], strict=False):
            tensors["old_logprobs"] = old
        for document, tensors in self._work("sums", items):
            if "not_finite" in document:
                raise NonFinite(document["not_finite"], param=document["param"])
            yield GroupSums(tensors["gradient"], TokenSums(**document["tokens"]))

    def _work(self, kind: str, items: Sequence[Message]) -> Iterator[Message]:
        """What each micro-batch gives, in order. Between waves, and only there, the caller may stop."""
        if items:
            self._tell_policy()
        for start in range(0, len(items), 1 + len(self.others)):
            wave = items[start : start + 1 + len(self.others)]
            with self.in_step():
                for other in self.others:
                    layout, tensors = wave[min(other.number, len(wave) - 1)]
                    other.send({"do": kind, "layout": layout, "wanted": other.number < len(wave)}, tensors)
                answers = [WORK[kind](self, *wave[0]), *(other.receive() for other in self.others[: len(wave) - 1])]
            yield from answers

    def _tell_policy(self) -> None:
        weights = self.weights
        document = {
            "do": "policy",
            "weights": {"rank": weights.rank, "alpha": weights.alpha, "target_modules": weights.target_modules},
            "hyperparameters": self.h.model_dump(mode="json"),
            "temperature": self.temperature,
        }
        masters = self.layout.unflatten(self.master)  # as they are now, after the steps taken
        with self.in_step():
            for other in self.others:
                other.send(document, masters)
