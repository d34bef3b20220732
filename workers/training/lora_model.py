"""The frozen base model with LoRA branches: transformers' Llama, Qwen2 or Qwen3 body, logprobs of chosen tokens out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from app.errors import AdapterInvalid, InvalidRequest
from app.specs.job import LINEAR_LAYERS
from workers.lora import tensor_name
from workers.training.packing import Layout, MicroBatch

FAMILIES = ("llama", "qwen2", "qwen3")
HEAD_CHUNK = 256  # positions whose vocabulary row exists at once


class _LoraProduct(torch.autograd.Function):
    """x·Wᵀ + bias + scaling·(x·Aᵀ)·Bᵀ with W and bias frozen; x [rows, in], A [rank, in], B [out, rank].

    Autograd would form the same gradients with one more pass over x's and, for B, with a slower product.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        down = x @ a.t()
        ctx.save_for_backward(x, weight, a, b, down)
        ctx.scaling = scaling
        return F.linear(x, weight, bias).addmm_(down, b.t(), alpha=scaling)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, a, b, down = ctx.saved_tensors
        grad_down = (grad @ b).mul_(ctx.scaling)
        grad_x = (grad @ weight).addmm_(grad_down, a) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, grad_down.t() @ x, (grad.t() @ down).mul_(ctx.scaling), None


class LoraLinear(nn.Module):
    """A frozen linear layer with, while an adapter is set, a LoRA branch."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.branch: tuple[Tensor, Tensor, float] | None = None  # A [rank, in], B [out, rank], scaling

    def forward(self, x: Tensor) -> Tensor:
        if self.branch is None:
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = _LoraProduct.apply(rows, self.weight, self.bias, *self.branch)
        return out.view(*x.shape[:-1], -1)


def shared_prefix_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, layout: Layout, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention over a packed micro-batch: each suffix row sees the prefix and itself, never another row.

    query [1, heads, layout.tokens, dim], key and value [1, kv heads, layout.tokens, dim];
    returns [1, layout.tokens, heads, dim], as transformers' attention interface wants it.
    """
    scale = kwargs["scaling"]
    prefix, rows, width = layout.prefix, layout.rows, layout.width
    (shared_q, q), (shared_k, k), (shared_v, v) = (x.split([prefix, rows * width], dim=2) for x in (query, key, value))
    parts = []
    if prefix:
        out = F.scaled_dot_product_attention(shared_q, shared_k, shared_v, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(out.transpose(1, 2))
    if width:

        def suffixes(x: Tensor) -> Tensor:  # [rows, heads, width, dim]
            return x.squeeze(0).unflatten(1, (rows, width)).transpose(0, 1)

        def behind(shared: Tensor, own: Tensor) -> Tensor:  # [rows, kv heads, prefix + width, dim]
            return torch.cat([shared.expand(rows, -1, -1, -1), suffixes(own)], dim=2)

        visible = torch.ones(width, prefix + width, dtype=torch.bool).tril(diagonal=prefix)
        out = F.scaled_dot_product_attention(
            suffixes(q), behind(shared_k, k), behind(shared_v, v), attn_mask=visible, scale=scale, enable_gqa=True
        )
        parts.append(out.transpose(1, 2).reshape(1, rows * width, *out.shape[1::2]))
    return torch.cat(parts, dim=1), None


ALL_ATTENTION_FUNCTIONS.register("marlaas_shared_prefix", shared_prefix_attention)


class _ChosenLogprobs(torch.autograd.Function):
    """Logprob of each target and entropy of each row's softmax, in chunks, without a vocabulary row kept for backward.

    The gradient of a logprob by its own hidden state, (onehot - p)·W / T, needs no upstream value but a factor, so the
    forward pass computes it while p is at hand. Entropy is a figure, not part of the graph.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, head: Tensor, wide_head: Tensor, temperature: float) -> Any:
        logprobs = torch.empty(len(hidden), dtype=wide_head.dtype)
        entropies = torch.empty_like(logprobs)
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Two buffers for all chunks: fresh memory of this size costs more than the arithmetic on it.
        buffers = torch.empty(2, min(HEAD_CHUNK, len(hidden)), len(wide_head), dtype=wide_head.dtype)
        for start in range(0, len(hidden), HEAD_CHUNK):
            chunk = slice(start, start + HEAD_CHUNK)
            scaled = hidden[chunk].to(wide_head.dtype) / temperature
            p, log_p = buffers[0, : len(scaled)], buffers[1, : len(scaled)]
            torch.log_softmax(torch.mm(scaled, wide_head.t(), out=p), dim=-1, out=log_p)
            torch.exp(log_p, out=p)
            chosen = targets[chunk].unsqueeze(-1)
            logprobs[chunk] = log_p.gather(-1, chosen).squeeze(-1)
            entropies[chunk] = -torch.bmm(p.unsqueeze(1), log_p.unsqueeze(2)).view(-1)
            if slopes is not None:
                p.scatter_add_(-1, chosen, torch.full_like(chosen, -1, dtype=p.dtype))
                slopes[chunk] = (p.to(head.dtype) @ head) * (-1 / temperature)
        ctx.slopes = slopes
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return grad.unsqueeze(-1).to(ctx.slopes.dtype) * ctx.slopes, None, None, None, None


class LoraModel:
    """One base model in `dtype`, frozen; adapters are set by tensor, nothing is rebuilt."""

    def __init__(self, model_path: Path, dtype: torch.dtype) -> None:
        """Raises InvalidRequest for a model outside the Llama, Qwen2 and Qwen3 families or with sliding windows."""
        config = AutoConfig.from_pretrained(model_path)
        if config.model_type not in FAMILIES:
            raise InvalidRequest(
                f"model type {config.model_type} is not one of {', '.join(FAMILIES)}", param="base_model"
            )
        if getattr(config, "use_sliding_window", False):
            raise InvalidRequest("models with sliding window attention are not served", param="base_model")
        self.model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=dtype, attn_implementation="marlaas_shared_prefix"
        ).requires_grad_(False)
        self.dtype = dtype
        self.head = self.model.lm_head.weight
        self.wide_head = self.head.to(torch.promote_types(dtype, torch.float32))
        self.linears: dict[str, LoraLinear] = {}
        for name, module in list(self.model.named_modules()):
            parent, _, kind = name.rpartition(".")
            if kind in LINEAR_LAYERS:
                self.linears[name] = LoraLinear(module)
                setattr(self.model.get_submodule(parent), kind, self.linears[name])

    def check_fits(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Raises AdapterInvalid naming a tensor that has no place in this model, the wrong shape, or no partner."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, linear in self.linears.items():
            shapes[tensor_name(name, "A")] = (rank, linear.weight.shape[1])
            shapes[tensor_name(name, "B")] = (linear.weight.shape[0], rank)
        for name, tensor in tensors.items():
            partner = name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("lora_B", "lora_A")
            if tuple(tensor.shape) != shapes.get(name) or partner not in tensors:
                raise AdapterInvalid(
                    f"adapter tensor {name} {tuple(tensor.shape)} does not fit the base model: wants "
                    f"{shapes.get(name, 'nothing of that name')}, lora_A and lora_B in pairs",
                    param=name,
                )

    def set_adapter(self, tensors: Mapping[str, Tensor], scaling: float) -> None:
        """Sets the branches, by PEFT name, in the model's dtype; modules without tensors have none."""
        for name, linear in self.linears.items():
            a, b = tensors.get(tensor_name(name, "A")), tensors.get(tensor_name(name, "B"))
            linear.branch = None if a is None or b is None else (a, b, scaling)

    def chosen_logprobs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs (differentiable) and entropies of the batch's n loss tokens, float32 or wider, each [n]."""
        output = self.model.model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, layout=batch.layout
        )
        hidden = output.last_hidden_state[0].index_select(0, batch.sources)
        return _ChosenLogprobs.apply(hidden, batch.targets, self.head, self.wide_head, temperature)
