"""One frozen decoder layer of the Llama, Qwen2 and Qwen3 families with LoRA branches: forward, and backward by hand.

Written out, backward keeps what it needs and no more (norms and SwiGLU are computed again), shares products between
layers that read the same input, and forms gradients of the adapter alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.packed_linear import PackedLinear
from workers.training.attention import SharedPrefixAttention

# Linear layers that read the same input run as one product.
FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class Branch:
    """The LoRA branches of a fused projection."""

    a: Tensor  # [ranks, in]
    b: Tensor  # [out, ranks], block diagonal
    scaling: float


Branches = Mapping[str, Branch]  # by name in FUSED; a projection without adapter has none
Gradients = dict[str, tuple[Tensor, Tensor]]  # by a and b


def frozen(tensors: list[Tensor]) -> nn.Parameter:
    """Copies, end to end, as a parameter: tools that place modules on devices see it."""
    return nn.Parameter(torch.cat(tensors).detach(), requires_grad=False)


class Projection(nn.Module):
    """x [tokens, in] -> x·Wᵀ + bias + scaling·(x·Aᵀ)·Bᵀ, with W [out, in] and bias frozen."""

    def __init__(self, linears: list[Any]) -> None:
        super().__init__()
        self.weight = frozen([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = frozen(biases) if biases else None
        self._packed: tuple[PackedLinear, PackedLinear] | None = None

    def pack(self, rows: int) -> None:
        """Lays the weight out for both directions of about `rows` rows; the plain one is given up."""
        weight, bias = self.weight.data, None if self.bias is None else self.bias.data
        self._packed = PackedLinear(weight, bias, rows), PackedLinear(weight.t(), None, rows)
        self.weight.data = weight.new_empty(0)

    def forward(self, x: Tensor, branch: Branch | None) -> tuple[Tensor, Tensor | None]:
        """The output, and x·Aᵀ for backward."""
        out = F.linear(x, self.weight, self.bias) if self._packed is None else self._packed[0](x)
        if branch is None:
            return out, None
        low = x @ branch.a.t()
        return out.addmm_(low, branch.b.t(), alpha=branch.scaling), low

    def backward(
        self, grad: Tensor, x: Tensor, low: Tensor | None, branch: Branch | None, *, wants_x: bool = True
    ) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """The gradients by x, and by (a, b)."""
        grad_x = None
        if wants_x:
            grad_x = grad @ self.weight if self._packed is None else self._packed[1](grad)
        if branch is None or low is None:
            return grad_x, None
        grad_low = (grad @ branch.b).mul_(branch.scaling)
        if grad_x is not None:
            grad_x.addmm_(grad_low, branch.a)
        return grad_x, (grad_low.t() @ x, (low.t() @ grad).t() * branch.scaling)


@dataclass(frozen=True)
class Rotary:
    """The rotation of each packed position; sine is signed for `roll`."""

    cos: Tensor  # [tokens, 1, dim]
    sin: Tensor  # [tokens, 1, dim]

    def turn_(self, x: Tensor, back: bool = False) -> None:
        """Turns x [tokens, heads, dim] in place; `back`: the inverse, which is the gradient's way."""
        turned = x.roll(x.shape[-1] // 2, -1)
        x.mul_(self.cos).addcmul_(turned, self.sin, value=-1 if back else 1)


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467) over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = frozen([weight]), eps

    def scale(self, x: Tensor) -> Tensor:
        """1 / rms [..., 1], float32 or wider."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        return norm.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x.to(scale.dtype, copy=True).mul_(scale).to(x.dtype).mul_(self.weight)

    def backward(self, grad: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        unit = x.to(scale.dtype, copy=True).mul_(scale)
        grad = (grad * self.weight).to(scale.dtype)
        mean = torch.linalg.vecdot(grad, unit).unsqueeze(-1).div_(-x.shape[-1])
        return grad.addcmul_(unit, mean).mul_(scale).to(x.dtype)


@dataclass(frozen=True)
class Kept:
    """What a layer's backward needs of its forward."""

    x: Tensor  # [tokens, hidden]
    x_scale: Tensor
    raw: Tensor | None  # queries and keys before their own norm (Qwen3)
    raw_scale: Tensor | None
    qkv: Tensor  # [tokens, heads + 2 kv heads, dim], turned
    attended: Tensor  # [tokens, heads, dim]
    middle: Tensor  # [tokens, hidden], after attention
    middle_scale: Tensor
    gate_up: Tensor  # [tokens, 2 intermediate]
    low: dict[str, Tensor | None]  # x·Aᵀ of each projection


class Layer(nn.Module):
    """A transformers decoder layer, taken over."""

    def __init__(self, block: Any, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.projections = nn.ModuleDict(
            {fused: Projection([block.get_submodule(name) for name in names]) for fused, names in FUSED.items()}
        )
        self.heads, self.kv_heads, self.dim = heads, kv_heads, block.self_attn.head_dim
        self.norm = Norm(block.input_layernorm.weight, block.input_layernorm.variance_epsilon)
        self.mlp_norm = Norm(block.post_attention_layernorm.weight, block.post_attention_layernorm.variance_epsilon)
        self.qk_norm: Norm | None = None
        if hasattr(block.self_attn, "q_norm"):
            q, k = block.self_attn.q_norm, block.self_attn.k_norm
            weight = torch.cat((q.weight.expand(heads, -1), k.weight.expand(kv_heads, -1)))
            self.qk_norm = Norm(weight, q.variance_epsilon)

    def pack(self, rows: int) -> None:
        """For products on this machine alone, in the layout in which they are quickest."""
        for projection in self.projections.values():
            cast(Projection, projection).pack(rows)

    def forward(
        self, x: Tensor, branches: Branches, rotary: Rotary, attention: SharedPrefixAttention
    ) -> tuple[Tensor, Kept]:
        """x [tokens, hidden] -> the next layer's, and what backward needs."""
        low: dict[str, Tensor | None] = {}

        def project(fused: str, inputs: Tensor) -> Tensor:
            out, low[fused] = self.projections[fused].forward(inputs, branches.get(fused))
            return out

        x_scale = self.norm.scale(x)
        qkv = project("qkv", self.norm.forward(x, x_scale)).unflatten(-1, (-1, self.dim))
        qk, raw, raw_scale = qkv[:, : -self.kv_heads], None, None
        if self.qk_norm is not None:
            raw, raw_scale = qk.clone(), self.qk_norm.scale(qk)
            qk.copy_(self.qk_norm.forward(raw, raw_scale))
        rotary.turn_(qk)
        attended = attention.forward(qkv)
        middle = project("o", attended.flatten(1)).add_(x)

        middle_scale = self.mlp_norm.scale(middle)
        gate_up = project("gate_up", self.mlp_norm.forward(middle, middle_scale))
        gate, up = gate_up.chunk(2, dim=-1)
        out = project("down", F.silu(gate).mul_(up)).add_(middle)
        kept = Kept(x, x_scale, raw, raw_scale, qkv, attended, middle, middle_scale, gate_up, low)
        return out, kept

    def backward(
        self,
        grad: Tensor,
        kept: Kept,
        branches: Branches,
        rotary: Rotary,
        attention: SharedPrefixAttention,
        *,
        wants_x: bool,
    ) -> tuple[Tensor | None, Gradients]:
        """The gradient by x from that by the output, which is used up, and those by the branches."""
        gradients: Gradients = {}

        def project_back(fused: str, grad: Tensor, inputs: Tensor, wants_x: bool = True) -> Any:
            back = cast(Projection, self.projections[fused]).backward
            grad_x, pair = back(grad, inputs, kept.low[fused], branches.get(fused), wants_x=wants_x)
            if pair is not None:
                gradients[fused] = pair
            return grad_x

        gate, up = kept.gate_up.chunk(2, dim=-1)
        active = F.silu(gate)
        grad_product = project_back("down", grad, active * up)
        grad_gate_up = torch.empty_like(kept.gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad_product, active, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_product.mul_(up), gate, grad_input=grad_gate)
        del active, grad_product
        normed = self.mlp_norm.forward(kept.middle, kept.middle_scale)
        grad_normed = project_back("gate_up", grad_gate_up, normed)
        del grad_gate_up, normed
        grad = grad.add_(self.mlp_norm.backward(grad_normed, kept.middle, kept.middle_scale))

        grad_attended = project_back("o", grad, kept.attended.flatten(1)).view_as(kept.attended)
        grad_qkv = attention.backward(grad_attended, kept.qkv)
        grad_qk = grad_qkv[:, : -self.kv_heads]
        rotary.turn_(grad_qk, back=True)
        if self.qk_norm is not None:
            assert kept.raw is not None and kept.raw_scale is not None
            grad_qk.copy_(self.qk_norm.backward(grad_qk, kept.raw, kept.raw_scale))
        normed = self.norm.forward(kept.x, kept.x_scale)
        grad_normed = project_back("qkv", grad_qkv.flatten(1), normed, wants_x)
        if not wants_x:
            return None, gradients
        return grad.add_(self.norm.backward(grad_normed, kept.x, kept.x_scale)), gradients
