"""AdamW on a flat vector, and its state as one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from app.errors import ObjectMissing
from app.specs.job import HyperparametersSpec

OPTIMIZER_FILE = "optimizer.safetensors"
FORMAT = "marlaas-adamw-1"


@dataclass(frozen=True)
class OptimizerState:
    """AdamW's moments in float32, by the adapter's tensor names, and the number of steps taken."""

    step: int
    exp_avg: Mapping[str, Tensor]
    exp_avg_sq: Mapping[str, Tensor]


def initial_state(tensors: Mapping[str, Tensor]) -> OptimizerState:
    """Zero moments for an adapter's tensors."""

    def zeros() -> dict[str, Tensor]:
        return {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}

    return OptimizerState(0, zeros(), zeros())


def write_optimizer(path: Path, state: OptimizerState) -> None:
    path.write_bytes(optimizer_file(state))


def optimizer_file(state: OptimizerState) -> bytes:
    """One file; the same state gives the same bytes."""
    tensors = {f"exp_avg.{name}": t.contiguous() for name, t in state.exp_avg.items()}
    tensors |= {f"exp_avg_sq.{name}": t.contiguous() for name, t in state.exp_avg_sq.items()}
    # One metadata key: safetensors writes several in arbitrary order.
    document = json.dumps({"format": FORMAT, "step": state.step}, sort_keys=True)
    return save(tensors, metadata={"marlaas": document})


def read_optimizer(path: Path) -> OptimizerState:
    """Raises ObjectMissing when the file is gone or is not an optimizer state."""
    try:
        with safe_open(path, framework="pt") as file:
            document = json.loads((file.metadata() or {}).get("marlaas", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (FileNotFoundError, SafetensorError) as error:
        raise ObjectMissing(f"optimizer state {path} cannot be read: {error}") from error
    if document.get("format") != FORMAT:
        raise ObjectMissing(f"{path} is not an optimizer state of format {FORMAT}")

    def moments(kind: str) -> dict[str, Tensor]:
        return {name.removeprefix(kind): t for name, t in tensors.items() if name.startswith(kind)}

    return OptimizerState(int(document["step"]), moments("exp_avg."), moments("exp_avg_sq."))


def clip_gradient(gradient: Tensor, max_norm: float) -> float:
    """Scales a flat gradient in place to at most `max_norm`; returns the norm that it had (as clip_grad_norm_)."""
    norm = float(torch.linalg.vector_norm(gradient))
    gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


def adamw_step(
    master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, h: HyperparametersSpec
) -> None:
    """One AdamW step (arXiv 1711.05101) in place on flat float32 vectors; `step` counts from 1."""
    master.mul_(1 - h.learning_rate * h.weight_decay)
    exp_avg.lerp_(gradient, 1 - h.adam_beta1)
    exp_avg_sq.mul_(h.adam_beta2).addcmul_(gradient, gradient, value=1 - h.adam_beta2)
    denominator = exp_avg_sq.sqrt().div_((1 - h.adam_beta2**step) ** 0.5).add_(h.adam_eps)
    master.addcdiv_(exp_avg, denominator, value=-h.learning_rate / (1 - h.adam_beta1**step))
