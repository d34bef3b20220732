"""Logprobs of chosen tokens, and entropies, without a row over the vocabulary outliving its chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workers.packed_linear import PackedLinear

CHUNK = 128  # positions whose vocabulary rows exist at once
PIECE = 16  # and of those, how many go through softmax at once, which a CPU's cache holds


class Head:
    """The frozen projection onto the vocabulary: float32 (or wider) logits, gradients in the model's dtype."""

    def __init__(self, weight: Tensor) -> None:
        """weight [vocab, hidden]."""
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        self._wide = PackedLinear(weight.to(self.dtype), None, CHUNK)
        self._back = PackedLinear(weight.t(), None, CHUNK)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""
        return self._wide(hidden.to(self.dtype))

    def back(self, errors: Tensor) -> Tensor:
        """[n, vocab] -> [n, hidden], in the weight's dtype."""
        return self._back(errors)


class ChosenLogprobs(torch.autograd.Function):
    """(hidden [n, dim], targets [n], head, temperature) -> logprobs [n], entropies [n].

    The gradient of a logprob by its own hidden state, (onehot - p)·W / T, needs no upstream value but a factor, so the
    forward pass computes it while p is at hand. Entropy is a figure, not part of the graph.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, head: Head, temperature: float) -> Any:
        chunks = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        parts = [_chunk(x, chosen, head, temperature, ctx.needs_input_grad[0]) for x, chosen in chunks]
        logprobs, entropies, slopes = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.slopes = slopes
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return grad.unsqueeze(-1).to(ctx.slopes.dtype) * ctx.slopes, None, None, None


def _chunk(
    hidden: Tensor, targets: Tensor, head: Head, temperature: float, wants_slopes: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropies and slopes (empty if not wanted) of some positions."""
    logits = head.logits(hidden.to(head.dtype) / temperature)
    errors = logits.new_empty(logits.shape if wants_slopes else (0, 0), dtype=hidden.dtype)  # p - onehot
    logprobs, entropies = [], []
    pieces = zip(logits.split(PIECE), targets.unsqueeze(-1).split(PIECE), strict=True)
    for i, (some, chosen) in enumerate(pieces):
        p = some.softmax(-1)
        # The greatest p is never 0: its logarithm gives log(sum(exp)) without another pass of exponentials.
        total = some.amax(-1, keepdim=True) - p.amax(-1, keepdim=True).log()
        logprobs.append((some.gather(-1, chosen) - total).squeeze(-1))
        if wants_slopes:
            error = errors[i * PIECE : i * PIECE + len(p)].copy_(p)
            error.scatter_(-1, chosen, (p.gather(-1, chosen) - 1).to(error.dtype))  # subtracted before it is rounded
        entropies.append(total.squeeze(-1) - p.mul_(some).sum(-1))
    slopes = head.back(errors).mul_(-1 / temperature) if wants_slopes else hidden.new_empty(0)
    return torch.cat(logprobs), torch.cat(entropies), slopes
