"""Token choice: inverse-CDF sampling, each row from its own random stream and independent of its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from workers.rollout.engine import SamplingParams

BLOCK = 256  # the cumulative sum runs over block sums, then inside one block: two short scans for one long


def random_stream(seed: int, length: int) -> list[float]:
    """The request's uniform numbers in [0, 1), one a token."""
    return np.random.default_rng(seed).random(length, dtype=np.float32).tolist()


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of the rows of a batch."""

    temperature: torch.Tensor | None  # [n, 1]; None: all 1
    greedy: torch.Tensor | None  # [n] bool; None: no row
    top_p_rows: torch.Tensor  # rows that ask for top-p
    top_p: torch.Tensor  # [len(top_p_rows), 1]

    @classmethod
    def of(cls, rows: Sequence[SamplingParams]) -> RowParams:
        temperatures = [p.temperature or 1.0 for p in rows]
        greedy = [p.temperature == 0 for p in rows]
        asking = [i for i, p in enumerate(rows) if p.top_p < 1 and p.temperature > 0]
        return cls(
            temperature=torch.tensor(temperatures)[:, None] if any(t != 1 for t in temperatures) else None,
            greedy=torch.tensor(greedy) if any(greedy) else None,
            top_p_rows=torch.tensor(asking, dtype=torch.long),
            top_p=torch.tensor([rows[i].top_p for i in asking])[:, None],
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens: torch.Tensor  # [n] int64
    logprobs: torch.Tensor  # [n] float32, under the distribution sampled from
    finite: torch.Tensor  # [n] bool; False: the row's logits held NaN or infinity, and its token means nothing


def sample(logits: torch.Tensor, uniforms: torch.Tensor, params: RowParams) -> Sampled:
    """logits [n, vocab] float32 (overwritten), uniforms [n] in [0, 1)."""
    if params.temperature is not None:
        logits.div_(params.temperature)
    probs = torch.softmax(logits, dim=-1)
    if len(params.top_p_rows):
        probs[params.top_p_rows] = nucleus(probs[params.top_p_rows], params.top_p)
    tokens, total = inverse_cdf(probs, uniforms)
    if params.greedy is not None:
        tokens = torch.where(params.greedy, logits.argmax(dim=-1), tokens)
    logprobs = probs.gather(1, tokens[:, None])[:, 0].log()
    return Sampled(tokens, logprobs, total.isfinite())


def nucleus(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the fewest most likely tokens that hold top_p [n, 1] of the mass, renormalised (arXiv 1904.09751)."""
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = torch.where(before < top_p, ordered, 0)
    return torch.zeros_like(probs).scatter_(1, order, kept / kept.sum(dim=-1, keepdim=True))


def inverse_cdf(probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token whose cumulative probability exceeds uniform * total, and total [n].

    Never a token of probability 0, whatever the rounding of the sums.
    """
    n, vocab = probs.shape
    blocks = F.pad(probs, (0, -vocab % BLOCK)) if vocab % BLOCK else probs
    blocks = blocks.view(n, -1, BLOCK)
    outer = blocks.sum(dim=-1).cumsum(dim=-1)
    total = outer[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros(())))
    block = torch.searchsorted(outer, target, right=True).clamp_(max=outer.shape[1] - 1)  # clamp: rows of NaN
    target = target - torch.where(block > 0, outer.gather(1, (block - 1).clamp(min=0)), 0)
    inner = blocks[torch.arange(n), block[:, 0]].cumsum(dim=-1)
    target = torch.minimum(target, inner[:, -1:].nextafter(torch.zeros(())))
    offset = torch.searchsorted(inner, target, right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + offset)[:, 0].clamp_(max=vocab - 1), total[:, 0]
