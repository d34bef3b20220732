"""The key/value cache and the two ways to attend to it: one new token a row, or a span of new tokens a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

LENGTH_BUCKET = 32  # rows grow by this many tokens at once, or by an eighth of their length


class KVCache:
    """Keys and values of all layers: `data` [layers, 2, rows, kv_heads, reach, head_dim], keys first.

    Decoding reads every row up to `reach`, the length of the longest one. The rows in use lie densely: batched
    products on strided rows take twice the time. So the cache is laid out again in its memory when `reach` changes.
    What a row holds beyond its tokens is finite: masked positions weigh 0, and 0 * NaN would be NaN.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """`length`: most tokens of a row."""
        self.kv_heads = kv_heads
        self.length = length
        self._shape = (layers, 2, rows, kv_heads, -1, head_dim)
        self._memory = torch.zeros(layers, 2 * rows * kv_heads * head_dim * length, dtype=dtype, device=device)
        self._lay_out(min(LENGTH_BUCKET, length))

    def _lay_out(self, reach: int) -> None:
        self.reach = reach
        self.data = self._memory[:, : self._memory.shape[1] // self.length * reach].view(self._shape)
        self._vectors = self.data.flatten(1, 4)  # [layers, 2 * rows * kv_heads * reach, head_dim]

    def fit(self, length: int, rows: int) -> None:
        """Makes the reach fit a longest row of `length` tokens; rows 0 to `rows` are in use and keep theirs."""
        step = max(LENGTH_BUCKET, length // 8 // LENGTH_BUCKET * LENGTH_BUCKET)
        reach = min(-(-length // step) * step, self.length)
        if self.reach // 2 < reach <= self.reach:
            return
        old, kept = self.data, min(self.reach, reach)
        self._lay_out(reach)
        for before, after in zip(old, self.data, strict=True):
            after[:, :rows, :, :kept] = before[:, :rows, :, :kept].clone()
            after[:, :rows, :, kept:] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of one row to another, and clears the rest of that."""
        if source != target or not length:
            self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]
            self.data[:, :, target, :, length:] = 0

    def places(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where `write` puts the keys and values of tokens in `rows` [n] at `positions` [n]."""
        _, _, all_rows, heads, reach, _ = self.data.shape
        halves = torch.arange(2, device=rows.device)[:, None]
        vectors = (halves * all_rows + rows[:, None, None]) * heads + torch.arange(heads, device=rows.device)
        return (vectors * reach + positions[:, None, None]).flatten()

    def write(self, layer: int, places: torch.Tensor, new: torch.Tensor) -> None:
        """new [n, 2 * kv_heads, head_dim], keys first."""
        self._vectors[layer].index_copy_(0, places, new.reshape(-1, new.shape[-1]))


class DecodeAttention:
    """One new token in each of the rows 0..n-1, at `positions` [n]."""

    def __init__(self, cache: KVCache, positions: torch.Tensor) -> None:
        self.cache = cache
        self.positions = positions
        self.places = cache.places(torch.arange(len(positions), device=positions.device), positions)
        hidden = torch.arange(cache.reach, device=positions.device) > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=cache.data.dtype, device=positions.device)
        mask = mask.masked_fill_(hidden, -torch.inf)
        self.mask = mask.repeat_interleave(cache.kv_heads, dim=0)[:, None]

    def __call__(self, layer: int, query: torch.Tensor, new: torch.Tensor, scale: float) -> torch.Tensor:
        """query [n, heads, head_dim], new keys and values [n, 2 * kv_heads, head_dim] -> [n, heads * head_dim].

        Two batched products: PyTorch's fused attention for CPUs takes three times as long for one query a head.
        """
        n, heads, head_dim = query.shape
        self.cache.write(layer, self.places, new)
        keys, values = self.cache.data[layer, :, :n].flatten(1, 2)
        # The query heads that share a key head are its rows, so that keys are never repeated.
        grouped = query.reshape(len(keys), -1, head_dim)
        scores = torch.baddbmm(self.mask, grouped, keys.transpose(1, 2), alpha=scale)
        return torch.bmm(scores.softmax(dim=-1), values).view(n, heads * head_dim)


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one row: positions `start` to `stop`; those before `start` are in the cache."""

    row: int
    start: int
    stop: int


class PrefillAttention:
    """Spans of new tokens, packed one after the other without padding; each attends to its own row only."""

    def __init__(self, cache: KVCache, spans: Sequence[Span], group: int) -> None:
        """`group`: query heads a key head."""
        self.cache = cache
        self.spans = spans
        device = cache.data.device
        self.positions = torch.cat([torch.arange(s.start, s.stop, device=device) for s in spans])
        rows = torch.cat([torch.full((s.stop - s.start,), s.row, device=device) for s in spans])
        self.places = cache.places(rows, self.positions)
        self.masks = []
        for span in spans:
            new = torch.arange(span.start, span.stop, device=device)
            hidden = torch.arange(span.stop, device=device) > new[:, None]
            mask = torch.zeros(hidden.shape, dtype=cache.data.dtype, device=device).masked_fill_(hidden, -torch.inf)
            self.masks.append(mask.repeat(group, 1))

    def __call__(self, layer: int, query: torch.Tensor, new: torch.Tensor, scale: float) -> torch.Tensor:
        """query [tokens, heads, head_dim], new [tokens, 2 * kv_heads, head_dim] -> [tokens, heads * head_dim]."""
        tokens, heads, head_dim = query.shape
        self.cache.write(layer, self.places, new)
        out = torch.empty_like(query)
        first = 0
        for span, mask in zip(self.spans, self.masks, strict=True):
            last = first + span.stop - span.start
            k, v = self.cache.data[layer, :, span.row : span.row + 1, :, : span.stop]
            grouped = query[first:last].transpose(0, 1).reshape(1, self.cache.kv_heads, -1, head_dim)
            attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
            out[first:last] = attended.reshape(heads, last - first, head_dim).transpose(0, 1)
            first = last
        return out.view(tokens, heads * head_dim)
