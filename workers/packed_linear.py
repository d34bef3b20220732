"""Products with frozen weights, in oneDNN's blocked layout where the machine has it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class PackedLinear:
    """x [n, in] -> x·Wᵀ + bias [n, out].

    The blocked layout is up to 1.5 times as fast as the plain one for few rows and a tenth for many, in bfloat16 to
    the same bits. It is a copy of the weight, which may be dropped.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        """weight [out, in]; `rows`: about how many x will have."""
        packs = weight.dtype == torch.float32 or (
            weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        self._packed = packs and weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows) if self._packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)
