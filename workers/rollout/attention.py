"""The key/value cache and the two ways to attend to it: one new token a row, or a span of new tokens a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

LENGTH_BUCKET = 32  # decoding attends to the longest live row, rounded up to this many tokens


class KVCache:
    """Keys and values of all layers: `data` [layers, rows, 2 * kv_heads, length, head_dim], keys before values.

    Zeros at the start, and again after a row that went wrong: masked positions weigh 0, and 0 * NaN would be NaN.
    """

    def __init__(self, layers: int, rows: int, kv_heads: int, length: int, head_dim: int, dtype: torch.dtype) -> None:
        self.kv_heads = kv_heads
        self.length = length
        self.data = torch.zeros(layers, rows, 2 * kv_heads, length, head_dim, dtype=dtype)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of one row to another."""
        if source != target and length:
            self.data[:, target, :, :length] = self.data[:, source, :, :length]

    def clear(self, row: int) -> None:
        self.data[:, row].zero_()


class DecodeAttention:
    """One new token in each of the rows 0..n-1, at `positions` [n]."""

    def __init__(self, cache: KVCache, positions: torch.Tensor) -> None:
        self.cache = cache
        self.rows = torch.arange(len(positions))
        self.positions = positions
        length = int(positions.max()) + 1
        self.length = min(-(-length // LENGTH_BUCKET) * LENGTH_BUCKET, cache.length)
        hidden = torch.arange(self.length) > positions[:, None]
        self.mask = torch.zeros(hidden.shape, dtype=cache.data.dtype).masked_fill_(hidden, -torch.inf)[:, None, None]

    def __call__(self, layer: int, query: torch.Tensor, new: torch.Tensor, scale: float) -> torch.Tensor:
        """query [n, heads, head_dim], new keys and values [n, 2 * kv_heads, head_dim] -> [n, heads * head_dim]."""
        n, heads, head_dim = query.shape
        kv = self.cache.data[layer]
        kv[self.rows, :, self.positions] = new
        k, v = kv[:n, :, : self.length].split(self.cache.kv_heads, dim=1)
        # The query heads that share a key head are its rows, so that keys are never repeated.
        grouped = query.reshape(n, self.cache.kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=self.mask, scale=scale)
        return out.reshape(n, heads * head_dim)


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
        self.positions = torch.cat([torch.arange(s.start, s.stop) for s in spans])
        self.rows = torch.cat([torch.full((s.stop - s.start,), s.row) for s in spans])
        self.masks = []
        for span in spans:
            hidden = torch.arange(span.stop) > torch.arange(span.start, span.stop)[:, None]
            mask = torch.zeros(hidden.shape, dtype=cache.data.dtype).masked_fill_(hidden, -torch.inf)
            self.masks.append(mask.repeat(group, 1))

    def __call__(self, layer: int, query: torch.Tensor, new: torch.Tensor, scale: float) -> torch.Tensor:
        """query [tokens, heads, head_dim], new [tokens, 2 * kv_heads, head_dim] -> [tokens, heads * head_dim]."""
        tokens, heads, head_dim = query.shape
        kv = self.cache.data[layer]
        kv[self.rows, :, self.positions] = new
        out = torch.empty(tokens, heads, head_dim, dtype=query.dtype)
        first = 0
        for span, mask in zip(self.spans, self.masks, strict=True):
            last = first + span.stop - span.start
            k, v = kv[span.row : span.row + 1, :, : span.stop].split(self.cache.kv_heads, dim=1)
            grouped = query[first:last].transpose(0, 1).reshape(1, self.cache.kv_heads, -1, head_dim)
            attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
            out[first:last] = attended.reshape(heads, last - first, head_dim).transpose(0, 1)
            first = last
        return out.view(tokens, heads * head_dim)
