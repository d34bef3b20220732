"""Attention of a packed micro-batch, forward and backward: each row sees the shared prefix and itself.

Keys of the prefix are neither copied nor expanded: all queries of a block of rows meet them in one product, their own
keys in another, under one softmax. Backward recomputes the scores, as FlashAttention does (arXiv 2205.14135, section
3.1), so that nothing of size queries x keys outlives a block, and a block fits a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from workers.training.packing import Layout

BLOCK = 256  # most positions of a row whose scores exist at once
ROWS_BLOCK = 512  # and of several short rows
SCORES = 1 << 20  # of several heads at once
NARROW = 64  # columns


@dataclass(frozen=True)
class Block:
    """`rows` times `width` positions that see all of `seen` and, causally, those before them in their own row."""

    seen: tuple[slice, ...]
    own: slice | Tensor  # packed positions [rows * width], padding included
    rows: int
    width: int

    @property
    def visible(self) -> int:
        """Keys of a row."""
        return sum(piece.stop - piece.start for piece in self.seen) + self.width


def blocks(layout: Layout) -> Iterator[Block]:
    """The positions of a micro-batch, each in one block. Rows come longest first, so a block's first sets its width."""
    prefix = slice(0, layout.prefix)
    yield from _blocks_of_row((), prefix)
    rows = [slice(stop - n, stop) for n, stop in zip(layout.lengths, _stops(layout), strict=True) if n]
    seen = (prefix,) if layout.prefix else ()
    while rows:
        width = rows[0].stop - rows[0].start
        if width > BLOCK:
            yield from _blocks_of_row(seen, rows.pop(0))
            continue
        count = max(1, ROWS_BLOCK // width)
        chunk, rows = rows[:count], rows[count:]
        own: slice | Tensor = slice(chunk[0].start, chunk[-1].stop)
        if chunk[-1].stop - chunk[-1].start < width:
            pad = layout.tokens - 1
            own = torch.tensor(
                [t if t < row.stop else pad for row in chunk for t in range(row.start, row.start + width)]
            )
        yield Block(seen, own, len(chunk), width)


def _blocks_of_row(seen: tuple[slice, ...], row: slice) -> Iterator[Block]:
    for start in range(row.start, row.stop, BLOCK):
        own = slice(start, min(start + BLOCK, row.stop))
        before = (slice(row.start, start),) if start > row.start else ()
        yield Block((*seen, *before), own, 1, own.stop - own.start)


def _stops(layout: Layout) -> list[int]:
    return list(accumulate(layout.lengths, initial=layout.prefix))[1:]


class SharedPrefixAttention:
    """The attention of one micro-batch, for all layers. Heads are grouped: query head h reads key head h // group."""

    def __init__(self, layout: Layout, kv_heads: int, group: int, scale: float) -> None:
        self.blocks = list(blocks(layout))
        self.kv_heads, self.group, self.scale = kv_heads, group, scale
        self._futures: dict[int, Tensor] = {}

    def forward(self, qkv: Tensor) -> Tensor:
        """qkv [tokens, heads + 2 kv heads, dim] -> [tokens, heads, dim]."""
        query, key, value = self._split(qkv)
        out = torch.zeros_like(query)
        for block in self.blocks:
            queries = self._gather(query, block).to(key.dtype) * self.scale
            results = value.new_empty(queries.shape)
            for h in self._heads(block):
                weights = self._scores(block, queries[h], key[h]).softmax(-1)
                results[h] = _weighted(block, weights.to(value.dtype), value[h])
            self._scatter(results, block, out)
        return out

    def backward(self, grad: Tensor, qkv: Tensor) -> Tensor:
        """The gradient by qkv, of its shape, from that by the output."""
        query, key, value = self._split(qkv)
        low_key = key.to(qkv.dtype)
        result = torch.zeros_like(qkv)
        grad_query, grad_key, grad_value = self._parts(result)
        key_sums, value_sums = torch.zeros_like(key), torch.zeros_like(key)
        for block in self.blocks:
            low_queries, grads = self._gather(query, block), self._gather(grad, block)
            queries = low_queries.to(key.dtype) * self.scale
            grad_queries = torch.empty_like(low_queries)
            for h in self._heads(block):
                weights = self._scores(block, queries[h], key[h]).softmax(-1)
                _collect(block, weights.to(value.dtype), grads[h], value_sums[h])
                slopes = _products(block, grads[h], value[h]).to(key.dtype)
                slopes = torch.ops.aten._softmax_backward_data(slopes, weights, -1, slopes.dtype).to(qkv.dtype)
                torch.mul(_weighted(block, slopes, low_key[h]), self.scale, out=grad_queries[h])
                _collect(block, slopes, low_queries[h], key_sums[h])
            self._scatter(grad_queries, block, grad_query)
        grad_key.copy_(key_sums.mul_(self.scale).transpose(0, 1))
        grad_value.copy_(value_sums.transpose(0, 1))
        return result

    def _parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values as views."""
        return qkv.split([self.kv_heads * self.group, self.kv_heads, self.kv_heads], dim=1)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries as they are; keys (wide, for exact scores) and values as [kv heads, tokens, dim]."""
        query, key, value = self._parts(qkv)
        wide = torch.promote_types(qkv.dtype, torch.float32)
        return query, key.transpose(0, 1).to(wide).contiguous(), value.transpose(0, 1).contiguous()

    def _heads(self, block: Block) -> Iterator[slice]:
        """Key heads, as many at once as the block's scores allow."""
        scores = block.rows * block.width * self.group * block.visible
        step = max(1, SCORES // scores)
        return (slice(h, h + step) for h in range(0, self.kv_heads, step))

    def _scores(self, block: Block, queries: Tensor, keys: Tensor) -> Tensor:
        """As `_products`, -inf where a key comes after the query."""
        scores = _products(block, queries, keys)
        if (future := self._futures.get(block.width)) is None:
            future = scores.new_full((block.width, block.width), -torch.inf).triu_(1)
            self._futures[block.width] = future
        scores[..., -block.width :].unflatten(1, (-1, block.width)).add_(future)
        return scores

    def _gather(self, x: Tensor, block: Block) -> Tensor:
        """[tokens, heads, dim] -> [kv heads, rows * group * width, dim]."""
        x = x[block.own].view(block.rows, block.width, self.kv_heads, self.group, x.shape[-1])
        return x.permute(2, 0, 3, 1, 4).reshape(self.kv_heads, -1, x.shape[-1])

    def _scatter(self, x: Tensor, block: Block, out: Tensor) -> None:
        """The way back, into `out` [tokens, heads, dim]."""
        x = x.view(self.kv_heads, block.rows, self.group, block.width, x.shape[-1])
        out[block.own] = x.permute(1, 3, 0, 2, 4).reshape(-1, *out.shape[1:]).to(out.dtype)


# Some heads of a block's queries [heads, n, dim] against what they see [heads, tokens, dim]; the products' columns are
# m = block.visible: all of `seen`, then their own row's `width`.


def _products(block: Block, queries: Tensor, keys: Tensor) -> Tensor:
    """Each query times each key that its row may see, [heads, n, m]."""
    out = queries.new_empty(*queries.shape[:2], block.visible)
    for piece, columns in _columns(block, out):
        _product(queries, keys[:, piece], columns)
    _product(_by_row(block, queries), _by_row(block, keys[:, block.own]), _own_columns(block, out))
    return out


def _product(queries: Tensor, keys: Tensor, out: Tensor) -> None:
    """Into columns of a wider tensor; where they are few, a dense product and a copy take a third of the time."""
    if out.shape[-1] < NARROW:
        out.copy_(torch.bmm(queries, keys.transpose(1, 2)))
    else:
        torch.bmm(queries, keys.transpose(1, 2), out=out)


def _weighted(block: Block, weights: Tensor, values: Tensor) -> Tensor:
    """Weighted sums of values by query, [heads, n, dim]."""
    out = torch.bmm(_own_columns(block, weights), _by_row(block, values[:, block.own])).view(*weights.shape[:2], -1)
    for piece, columns in _columns(block, weights):
        out.baddbmm_(columns, values[:, piece])
    return out


def _collect(block: Block, weights: Tensor, queries: Tensor, total: Tensor) -> None:
    """Adds to `total` [heads, tokens, dim] the weighted sums of queries by key."""
    # Queries are transposed, not weights: of the two, the product copies what is.
    for piece, columns in _columns(block, weights):
        total[:, piece] += torch.bmm(queries.transpose(1, 2), columns).transpose(1, 2)
    own = torch.bmm(_by_row(block, queries).transpose(1, 2), _own_columns(block, weights)).transpose(1, 2)
    total[:, block.own] += own.reshape(total.shape[0], -1, total.shape[-1])


def _columns(block: Block, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The pieces of `seen` with their columns of x [heads, n, m]."""
    at = 0
    for piece in block.seen:
        yield piece, x[..., at : (at := at + piece.stop - piece.start)]


def _own_columns(block: Block, x: Tensor) -> Tensor:
    return _by_row(block, x[..., -block.width :])


def _by_row(block: Block, x: Tensor) -> Tensor:
    """[heads, rows * n, ...] -> [heads * rows, n, ...]."""
    return x.unflatten(1, (block.rows, -1)).flatten(0, 1)
