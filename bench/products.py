"""One decode step's products with the base's weights, and nothing else. `python -m bench.products MODEL` prints JSON.

What attention, norms, adapters, sampling and Python add is missing, so no engine with these kernels is quicker.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.limits import Model
from bench.machine import best

ROWS = (1, 8, 32, 64, 128, 1024)


def all_of(linears: Sequence[Callable[[Any], Any]], inputs: Sequence[Any]) -> None:
    for linear, x in zip(linears, inputs, strict=True):
        linear(x)


def measure(model: Model) -> dict[str, dict[int, float]]:
    """Seconds a step by kind of kernel and number of rows: weights as they lie, and in oneDNN's blocked layout."""
    import torch
    import torch.nn.functional as F

    def plain(weight: torch.Tensor, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: F.linear(x, weight)

    def blocked(weight: torch.Tensor, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    found: dict[str, dict[int, float]] = {"plain": {}, "blocked": {}}
    shapes = [*model.shapes.values()] * model.layers + [(model.vocabulary, model.hidden)]
    with torch.inference_mode():
        for name, kernel in (("plain", plain), ("blocked", blocked)):
            for rows in ROWS:
                found[name][rows] = best(
                    partial(
                        all_of,
                        [kernel(torch.randn(shape).bfloat16(), rows) for shape in shapes],
                        [torch.randn(rows, in_).bfloat16() for _, in_ in shapes],
                    )
                )
    return found


if __name__ == "__main__":
    print(json.dumps(measure(Model.of(Path(sys.argv[1])))))
