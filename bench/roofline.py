"""What this machine can do: rates, bandwidth, and how near bare matrix products of the model's sizes come to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.child import ROOT
from bench.limits import Model, decoding
from bench.machine import machine
from bench.report import console, save, table


def main(model_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.products", str(model_path)],
        env={**os.environ, "OMP_NUM_THREADS": str(machine().threads)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rates, model = machine(again=True), Model.of(model_path)
    shown = table(f"This machine, {rates.threads} threads (best of several)", "", "")
    shown.add_row("product of two bfloat16 matrices", f"{rates.bfloat16 / 1e12:.2f} TFLOP/s")
    shown.add_row("product of two float32 matrices", f"{rates.float32 / 1e12:.2f} TFLOP/s")
    for name in ("read", "copy", "triad"):
        shown.add_row(f"memory, {name}", f"{getattr(rates, name) / 1e9:.1f} GB/s")
    console.print(shown)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    rows = [row(model, int(n), found["plain"][n], found["blocked"][n]) for n in found["plain"]]
    shown = table(
        "One step's products alone, by rows", "rows", "limit tok/s", "bound", "plain tok/s", "blocked tok/s", "of limit"
    )
    for r in rows:
        shown.add_row(
            str(r["rows"]),
            f"{r['limit']:.0f}",
            r["bound"],
            f"{r['plain']:.0f}",
            f"{r['blocked']:.0f}",
            f"{max(r['plain'], r['blocked']) / r['limit']:.0%}",
        )
    console.print(shown)
    save("roofline", {"machine": asdict(rates), "products": rows})


def row(model: Model, rows: int, plain: float, blocked: float) -> dict[str, Any]:
    limit, bound = decoding(model, machine(), rows, adapters=0, rank=8, context=0)
    return {"rows": rows, "limit": limit, "bound": bound, "plain": rows / plain, "blocked": rows / blocked}
