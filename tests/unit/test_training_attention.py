"""Attention of packed micro-batches against dense attention under a mask, in float64, forward and backward."""

import pytest
import torch

from workers.training import attention
from workers.training.attention import SharedPrefixAttention
from workers.training.packing import Layout

KV_HEADS, DIM, SCALE = 2, 8, 0.3


@pytest.fixture(params=["whole blocks", "small blocks"])
def block_sizes(request, monkeypatch):
    """Small blocks cut every row into several, and rows into several chunks; their scores come in both ways."""
    if request.param == "small blocks":
        monkeypatch.setattr(attention, "BLOCK", 4)
        monkeypatch.setattr(attention, "ROWS_BLOCK", 6)
        monkeypatch.setattr(attention, "NARROW", 4)


def visible(layout):
    """[tokens, tokens] which position sees which; padding sees itself."""
    seen = torch.eye(layout.tokens, dtype=torch.bool)
    start = layout.prefix
    for own in (layout.prefix, *layout.lengths):
        rows = slice(0, own) if start == layout.prefix and own == layout.prefix else slice(start, start + own)
        seen[rows, : layout.prefix] = True
        seen[rows, rows] = torch.ones(own, own, dtype=torch.bool).tril()
        start += own if rows.start >= layout.prefix else 0
    return seen


def dense(qkv, layout, group):
    query, key, value = qkv.split([KV_HEADS * group, KV_HEADS, KV_HEADS], dim=1)
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    weights = scores.masked_fill(~visible(layout), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


LAYOUTS = [
    Layout(5, (6, 6, 6)),
    Layout(5, (7, 3, 3, 1, 0)),
    Layout(0, (6, 2)),
    Layout(9, (0,)),
    Layout(3, (11, 10)),
]


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_attention_equals_dense_attention(block_sizes, layout, group):
    generator = torch.Generator().manual_seed(0)
    heads = KV_HEADS * group
    qkv = torch.randn(layout.tokens, heads + 2 * KV_HEADS, DIM, dtype=torch.float64, generator=generator)
    grad = torch.randn(layout.tokens, heads, DIM, dtype=torch.float64, generator=generator)
    real = layout.tokens - layout.padded
    grad[real:] = 0  # nothing reads padding
    qkv.requires_grad_()
    want = dense(qkv, layout, group)
    (want_grad,) = torch.autograd.grad(want, qkv, grad)

    ours = SharedPrefixAttention(layout, KV_HEADS, group, SCALE)
    before = qkv.detach().clone()
    out = ours.forward(qkv.detach())
    torch.testing.assert_close(out[:real], want.detach()[:real])
    torch.testing.assert_close(ours.backward(grad, qkv.detach()), want_grad)
    assert torch.equal(qkv.detach(), before)
