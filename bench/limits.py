"""The roofline: the least time that a piece of work can take on this machine, from its operations and its bytes.

Everything is counted as bfloat16, perfectly overlapped, with each weight read once a step: no program gets there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.machine import Machine

BFLOAT16 = 2  # bytes


@dataclass(frozen=True)
class Model:
    """A decoder's sizes, from its config.json."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @classmethod
    def of(cls, folder: Path) -> Model:
        c = json.loads((folder / "config.json").read_text())
        heads = c["num_attention_heads"]
        return cls(
            layers=c["num_hidden_layers"],
            hidden=c["hidden_size"],
            heads=heads,
            kv_heads=c["num_key_value_heads"],
            head_dim=c.get("head_dim") or c["hidden_size"] // heads,
            intermediate=c["intermediate_size"],
            vocabulary=c["vocab_size"],
        )

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of a layer's products, as they can be run: those of one input together."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q + 2 * kv, self.hidden),
            "o": (self.hidden, q),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    @property
    def linear(self) -> int:
        """Parameters of the linear layers."""
        return self.layers * sum(out * in_ for out, in_ in self.shapes.values())

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    def lora(self, rank: int) -> int:
        """Parameters of an adapter on all linear layers."""
        h, q, kv, i = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.intermediate
        return self.layers * rank * ((h + q) + 2 * (h + kv) + (q + h) + 2 * (h + i) + (i + h))


@dataclass(frozen=True)
class Limit:
    seconds: float
    bound: Literal["arithmetic", "memory"]

    @classmethod
    def of(cls, operations: float, moved: float, machine: Machine) -> Limit:
        """The machine computes while it reads: the slower of the two is the limit."""
        arithmetic, memory = operations / machine.bfloat16, moved / machine.read
        return cls(max(arithmetic, memory), "arithmetic" if arithmetic > memory else "memory")


def decoding(
    model: Model, machine: Machine, batch: int, adapters: int, rank: int, context: float
) -> tuple[float, Literal["arithmetic", "memory"]]:
    """Tokens a second at most of `batch` rows that each see `context` tokens, and what bounds a step."""
    lora = model.lora(rank)
    step = Limit.of(
        operations=batch
        * (
            2 * (model.linear + model.head + (lora if adapters else 0))
            + 4 * model.layers * model.heads * model.head_dim * context
        ),
        moved=BFLOAT16
        * (
            model.linear
            + model.head
            + adapters * lora
            + batch * context * model.layers * 2 * model.kv_heads * model.head_dim
        ),
        machine=machine,
    )
    return batch / step.seconds, step.bound


def training(model: Model, machine: Machine, groups: int, size: int, rank: int, prompt: int, tokens: int) -> float:
    """Seconds at least of one update: a group's prompt computed once, the vocabulary at response positions only.

    Forward, and backward to the inputs and to the adapter alone: the base's weights are frozen.
    """
    computed = prompt + size * tokens
    linear = computed * (4 * model.linear + 6 * model.lora(rank))
    head = size * tokens * 4 * model.head
    visible = prompt * prompt / 2 + size * tokens * (prompt + tokens / 2)
    attention = 14 * model.layers * model.heads * model.head_dim * visible  # 2 products forward, 5 backward
    return groups * (linear + head + attention) / machine.bfloat16


def round_(model: Model, machine: Machine, groups: int, size: int, rank: int, prompt: int, tokens: int) -> float:
    """Seconds at least of a round of one job: its prompts read once a group, its tokens decoded, one update."""
    rate, _ = decoding(model, machine, groups * size, 1, rank, prompt + tokens / 2)
    prefill = 2 * (model.linear + model.lora(rank)) * groups * prompt / machine.bfloat16
    return prefill + groups * size * tokens / rate + training(model, machine, groups, size, rank, prompt, tokens)
