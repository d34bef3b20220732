"""A rank beside rank 0: `python -m workers.training.rank DESCRIPTION PIPE`, started by workers.training.ranks.

It does what rank 0 says, micro-batch by micro-batch, and ends when rank 0's end of the pipe closes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.errors import NonFinite
from app.specs.job import HyperparametersSpec
from workers.lora import LoraWeights
from workers.training.lora_model import LoraModel
from workers.training.sharding import Place, ShardedModel
from workers.training.trainer import Policy
from workers.training.wire import Channel, Message, unpack_batch


@dataclass(frozen=True)
class Description:
    """What a rank is told at its start."""

    model: str
    dtype: str
    threads: int
    gradient_checkpointing: bool
    place: dict[str, Any]


def serve(description: Description, channel: Channel) -> None:
    """Until the pipe closes. A loss that is not finite is an answer as another; any other error ends the process."""
    d = description
    torch.set_num_threads(d.threads)
    model = ShardedModel(Path(d.model), getattr(torch, d.dtype), d.gradient_checkpointing, Place(**d.place))
    channel.send({"bytes": model.held_bytes()})
    policy: Policy | None = None
    while True:
        try:
            document, tensors = channel.receive()
        except EOFError:
            return
        if document["do"] == "policy":
            policy = unpack_policy(model, document, tensors)
            continue
        assert policy is not None
        answer = WORK[document["do"]](policy, document["layout"], tensors)
        if document["wanted"]:
            channel.send(*answer)


def unpack_policy(model: LoraModel, document: dict[str, Any], tensors: dict[str, Tensor]) -> Policy:
    hyperparameters = HyperparametersSpec.model_validate(document["hyperparameters"])
    return Policy(model, LoraWeights(**document["weights"], tensors=tensors), hyperparameters, document["temperature"])


def logprobs(policy: Policy, layout: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
    return {}, {"logprobs": policy.batch_logprobs(unpack_batch(layout, tensors))}


def sums(policy: Policy, layout: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
    try:
        result = policy.batch_sums(unpack_batch(layout, tensors), tensors.get("old_logprobs"))
    except NonFinite as error:
        return {"not_finite": error.message, "param": error.param}, {}
    return {"tokens": asdict(result.tokens)}, {"gradient": result.gradient}


WORK = {"logprobs": logprobs, "sums": sums}  # what a rank does with a micro-batch

if __name__ == "__main__":
    serve(Description(**json.loads(sys.argv[1])), Channel(Connection(int(sys.argv[2]))))
