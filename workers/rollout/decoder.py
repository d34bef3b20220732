"""A decoder forward of the Llama, Qwen2 and Qwen3 families, over packed tokens and a static key/value cache.

Weights, configuration and rotary embedding come from transformers; the forward here fuses the projections,
leaves out padding, and takes the LoRA branch of many adapters at once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from app.errors import InvalidRequest
from workers.packed_linear import PackedLinear

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies do not depend on the length so far

# Linear layers that share an input run as one product.
FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


class Attention(Protocol):
    """Writes new keys and values into the cache and attends; see workers/rollout/attention.py."""

    positions: torch.Tensor

    def __call__(self, layer: int, query: torch.Tensor, new: torch.Tensor, scale: float) -> torch.Tensor: ...


class LoraBranch(Protocol):
    """Adds the adapters' share to the output of a fused projection, in place; see workers/rollout/slots.py."""

    def add(self, fused: str, layer: int, x: torch.Tensor, out: torch.Tensor) -> None: ...


def on_device(device: str) -> AbstractContextManager[object]:
    """Where tensors are made inside; nothing to be done, and no time lost on each call, for the CPU."""
    return nullcontext() if device == "cpu" else torch.device(device)


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: torch.Tensor
    qkv: PackedLinear
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]: each head's own norm weight (Qwen3)
    o: PackedLinear
    post_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


class Decoder:
    """The base model, frozen, in `dtype`; the final projection onto the vocabulary is float32."""

    def __init__(self, path: Path, dtype: torch.dtype, rows: int) -> None:
        """Loads a transformers folder. Raises InvalidRequest for a model of another family or kind of attention."""
        config = AutoConfig.from_pretrained(path)
        if config.model_type not in FAMILIES:
            raise InvalidRequest(f"model type {config.model_type} is not one of {', '.join(FAMILIES)}", param="model")
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()) or config.hidden_act != "silu":
            raise InvalidRequest("sliding-window attention and activations but SiLU are not supported", param="model")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        rotary = model.model.rotary_emb
        if rotary.rope_type not in ROPE_TYPES:
            raise InvalidRequest(f"rope type {rotary.rope_type} is not one of {', '.join(ROPE_TYPES)}", param="model")

        self.dtype = dtype
        self.context: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = model.model.layers[0].self_attn.head_dim
        self.eps: float = config.rms_norm_eps
        self.scale: float = model.model.layers[0].self_attn.scaling
        # (out, in) of each linear layer of one block: what an adapter must fit.
        self.shapes: dict[str, tuple[int, int]] = {
            name: (linear.out_features, linear.in_features)
            for names in FUSED.values()
            for name in names
            for linear in [_linear(model.model.layers[0], name)]
        }
        with torch.inference_mode():
            cos, sin = rotary(torch.zeros(1), torch.arange(self.context)[None])
            half = self.head_dim // 2
            self.cos = cos[0].to(dtype)
            self.sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1).to(dtype)  # signed for `roll`
            self.embedding = model.model.embed_tokens.weight.detach()
            self.layers = [self._layer(block, rows) for block in model.model.layers]
            self.norm = model.model.norm.weight.detach()
            self.head = PackedLinear(model.lm_head.weight.detach().float(), None, rows)

    def _layer(self, block: Any, rows: int) -> Layer:
        def fuse(fused: str) -> PackedLinear:
            linears = [_linear(block, name) for name in FUSED[fused]]
            biased = linears[0].bias is not None
            weight = torch.cat([linear.weight.detach() for linear in linears])
            return PackedLinear(weight, torch.cat([x.bias.detach() for x in linears]) if biased else None, rows)

        attention = block.self_attn
        qk_norm = None
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
            qk_norm = torch.cat((q.expand(self.heads, -1), k.expand(self.kv_heads, -1)))
        return Layer(
            input_norm=block.input_layernorm.weight.detach(),
            qkv=fuse("qkv"),
            qk_norm=qk_norm,
            o=fuse("o"),
            post_norm=block.post_attention_layernorm.weight.detach(),
            gate_up=fuse("gate_up"),
            down=fuse("down"),
        )

    def forward(self, tokens: torch.Tensor, attend: Attention, lora: LoraBranch | None) -> torch.Tensor:
        """Hidden states [n, hidden] after the last norm, of tokens [n] at `attend.positions` [n]."""
        x = self.embedding[tokens]
        cos, sin = self.cos[attend.positions][:, None], self.sin[attend.positions][:, None]
        rotated = self.heads + self.kv_heads
        for index, layer in enumerate(self.layers):

            def project(fused: str, linear: PackedLinear, inputs: torch.Tensor, index: int = index) -> torch.Tensor:
                out = linear(inputs)
                if lora is not None:
                    lora.add(fused, index, inputs, out)
                return out

            normed = F.rms_norm(x, (self.hidden_size,), layer.input_norm, self.eps)
            qkv = project("qkv", layer.qkv, normed).view(len(tokens), -1, self.head_dim)
            qk = qkv[:, :rotated]
            if layer.qk_norm is not None:
                qk.copy_(F.rms_norm(qk, (self.head_dim,), None, self.eps).mul_(layer.qk_norm))
            turned = qk.roll(self.head_dim // 2, -1)
            qk.mul_(cos).addcmul_(turned, sin)
            attended = attend(index, qkv[:, : self.heads], qkv[:, self.heads :], self.scale)
            x = x + project("o", layer.o, attended)

            normed = F.rms_norm(x, (self.hidden_size,), layer.post_norm, self.eps)
            gate, up = project("gate_up", layer.gate_up, normed).chunk(2, dim=-1)
            x = x + project("down", layer.down, F.silu(gate).mul_(up))
        return F.rms_norm(x, (self.hidden_size,), self.norm, self.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] -> float32 [n, vocab]."""
        return self.head(hidden.float())


def _linear(block: Any, name: str) -> torch.nn.Linear:
    parent = block.self_attn if name in ("q_proj", "k_proj", "v_proj", "o_proj") else block.mlp
    return getattr(parent, name)
