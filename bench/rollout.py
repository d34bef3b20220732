"""Tokens a second of decoding, by rows at once and adapters at once: this system's engines and two peers.

Every side gets the same prompts and generates exactly the same number of tokens. For each number of adapters all sides
are running processes that take turns, so that they see the same machine. What counts is the rate while all rows decode;
the rate with the prompts' time is shown beside it. The peers: vLLM as it is, without a line of
this system between (its own engine loop, its quickest settings), and transformers' `generate` with PEFT.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from app.specs.job import LoraSpec
from bench import limits
from bench.child import ROOT, Child, running_child
from bench.machine import machine
from bench.report import Spread, Target, console, save, table
from workers.lora import fresh_adapter, write_adapter

RANK = 8
SIDES = {
    "torch": "torch engine",
    "vllm": "vLLM",
    "vllm-engine": "vLLM engine",
    "transformers": "transformers",
}
COMPARED = ("torch", "vllm")  # in the targets: these alternate, the others take one turn
WARM_TOKENS = 16  # rows start in waves of prefill: so many that all of them decode at some time
SLOWED_BATCH, SLOWED_ADAPTERS = 64, 32  # of the target
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")  # vLLM's advice, if it is installed

TARGETS = {
    "vllm_adapters": Target("torch engine against vLLM, batch 32, 4 adapters", 4.0, "times the tokens/s"),
    "vllm_base": Target("torch engine against vLLM, batch 32, no adapter", 1.5, "times the tokens/s"),
    "slowdown": Target("torch engine, batch 64, 32 adapters against none", 1.5, "times as slow", most=True),
}


@dataclass(frozen=True)
class Size:
    batches: tuple[int, ...]
    adapters: tuple[int, ...]
    prompt: int
    tokens: int
    turns: int  # of the sides that are compared

    @property
    def slowed(self) -> int:
        """The batch at which all adapters are held against none."""
        return SLOWED_BATCH if SLOWED_BATCH in self.batches else max(self.batches)


QUICK = Size(batches=(32, 64), adapters=(0, 4, 32), prompt=32, tokens=32, turns=3)
FULL = Size(batches=(1, 8, 32, 64, 128), adapters=(0, 1, 4, 8, 32), prompt=32, tokens=32, turns=3)
TINY = Size(batches=(4,), adapters=(0, 2), prompt=8, tokens=16, turns=1)
SIZES = {"quick": QUICK, "full": FULL, "tiny": TINY}


def vllm_python() -> Path | None:
    """Of the environment that `make test-vllm` makes, or the one that MARLAAS_BENCH_VLLM_PYTHON names."""
    python = Path(os.environ.get("MARLAAS_BENCH_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
    return python if python.exists() else None


def vllm_environment(python: Path, threads: int) -> dict[str, str]:
    """One process, a thread bound to each core, which sleep soon: what was quickest of what vLLM's manual advises."""
    runtimes = [python.parent.parent / "lib/libiomp5.so", TCMALLOC]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    return {
        "LD_PRELOAD": ":".join(str(runtime) for runtime in runtimes if runtime.exists()),
        "OMP_NUM_THREADS": str(threads),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def write_adapters(folder: Path, model: Path, number: int) -> list[str]:
    """Adapters that differ and change what the model says."""
    folders = []
    weights = fresh_adapter(model, LoraSpec(rank=RANK, alpha=2 * RANK), seed=0)
    for n in range(number):
        random = torch.Generator().manual_seed(n)
        tensors = {
            name: 0.01 * torch.randn(tensor.shape, generator=random) if "lora_B" in name else tensor
            for name, tensor in weights.tensors.items()
        }
        write_adapter(folder / str(n), replace(weights, tensors=tensors), "bench")
        folders.append(str(folder / str(n)))
    return folders


@contextmanager
def children(
    size: Size, adapters: int, sides: Sequence[str], model: Path, folders: list[str], logs: Path
) -> Iterator[dict[tuple[str, int], Child]]:
    """A process for each side and batch; those of vLLM and transformers serve all batches."""
    threads, length, most = machine().threads, size.prompt + size.tokens, max(size.batches)
    here = {"OMP_NUM_THREADS": str(threads)}
    with ExitStack() as stack:

        def start(side: str, slots: int) -> Child:
            name = f"{side}-{adapters}-{slots}"
            if side == "transformers":
                command = [sys.executable, "-m", "bench.rollout_transformers", model, adapters, threads, *folders]
                return stack.enter_context(running_child(name, [*map(str, command)], logs, here))
            python, environment = Path(sys.executable), here
            if side.startswith("vllm"):
                found = vllm_python()
                assert found is not None
                python, environment = found, vllm_environment(found, threads)
            if side == "vllm":
                command = [python, "-m", "bench.rollout_vllm", model, slots, adapters, length, *folders]
            else:
                if side == "vllm-engine":  # it tunes itself, and its engine is a process of its own
                    environment = {"HF_HUB_OFFLINE": "1"}
                kind = side.removesuffix("-engine")
                command = [
                    python,
                    "-m",
                    "bench.rollout_engine",
                    kind,
                    model,
                    slots,
                    adapters,
                    length,
                    threads,
                    *folders,
                ]
            return stack.enter_context(running_child(name, [*map(str, command)], logs, environment))

        found: dict[tuple[str, int], Child] = {}
        for side in sides:
            shared = None if side == "torch" else start(side, most)
            for batch in size.batches:
                found[side, batch] = shared or start(side, batch)
        yield found


def run(size: Size, sides: Sequence[str], model: Path, logs: Path) -> tuple[dict[Any, list[dict[str, Any]]], list[Any]]:
    """Answers by (side, batch, adapters), and pairs of the torch engine's tokens/s (none, all adapters)."""
    answers: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    pairs: list[Any] = []
    folders = write_adapters(logs / "adapters", model, max(size.adapters))
    seed = 0

    def ask(child: Child, batch: int, adapters: int, tokens: int) -> dict[str, Any]:
        nonlocal seed
        seed += batch
        return child.ask(batch=batch, adapters=adapters, prompt=size.prompt, tokens=tokens, seed=seed)

    for adapters in size.adapters:
        started = time.monotonic()
        with children(size, adapters, sides, model, folders, logs) as running:
            for (_, batch), child in running.items():
                ask(child, batch, adapters, WARM_TOKENS)
            ready = time.monotonic()
            for turn in range(size.turns):
                for (side, batch), child in running.items():
                    if turn == 0 or side in COMPARED:
                        answers[side, batch, adapters].append(ask(child, batch, adapters, size.tokens))
            if adapters == max(size.adapters):
                for _ in range(size.turns + 1):
                    pair = [
                        ask(running["torch", size.slowed], size.slowed, number, size.tokens) for number in (0, adapters)
                    ]
                    pairs.append([answer["decoding"] for answer in pair])
        took = ready - started, time.monotonic() - ready
        console.print(f"[dim]{adapters} adapters: {took[0]:.0f} s to start and warm, {took[1]:.0f} s to measure[/]")
    return answers, pairs[1:]


def main(model: Path, size: Size) -> None:
    machine()
    sides = [side for side in SIDES if not side.startswith("vllm") or vllm_python()]
    if len(sides) < len(SIDES):
        console.print("[yellow]no vLLM here: `make test-vllm` makes its environment (docs/benchmarks.md)[/]")
    with tempfile.TemporaryDirectory(prefix="marlaas-bench-") as logs:
        report(size, sides, model, *run(size, sides, model, Path(logs)))


def report(
    size: Size, sides: Sequence[str], model: Path, answers: dict[Any, list[dict[str, Any]]], pairs: list[Any]
) -> None:
    sizes = limits.Model.of(model)
    rates = machine(again=True)
    shown = table(
        "Tokens a second while all rows decode, median (least to most), and with the prompts' time: "
        f"{size.prompt} prompt and {size.tokens} forced tokens a row, LoRA rank {RANK}",
        "batch",
        "adapters",
        *(SIDES[side] for side in sides),
        "limit",
        "torch engine of it",
        "bound",
    )
    rows = []
    for batch in size.batches:
        for adapters in size.adapters:
            context = size.prompt + size.tokens // 2
            limit, bound = limits.decoding(sizes, rates, batch, adapters, RANK, context)
            row: dict[str, Any] = {"batch": batch, "adapters": adapters, "limit": limit, "bound": bound, "sides": {}}
            cells = []
            for side in sides:
                found = answers[side, batch, adapters]
                spread = Spread.of([answer["decoding"] for answer in found])
                whole = Spread.of([answer["tokens"] / answer["seconds"] for answer in found]).median
                row["sides"][side] = spread.as_json() | {"whole": whole}
                cells.append(f"{spread.median:.0f} ({spread.values[0]:.0f} to {spread.values[-1]:.0f}), {whole:.0f}")
            share = row["sides"]["torch"]["median"] / limit
            shown.add_row(str(batch), str(adapters), *cells, f"{limit:.0f}", f"{share:.0%}", bound)
            rows.append(row | {"share": share})
    console.print(shown)
    targets = reached(size, rows, pairs)
    for key, value in targets.items():
        console.print(TARGETS[key].line(value))
    save(
        "rollout",
        {
            "size": asdict(size),
            "machine": asdict(rates),
            "rows": rows,
            "slowdown": {"batch": size.slowed, "adapters": max(size.adapters), "pairs": pairs},
            "targets": targets,
        },
    )


def reached(size: Size, rows: Sequence[dict[str, Any]], pairs: Sequence[Sequence[float]]) -> dict[str, float]:
    """The targets that this size has the figures for."""
    by_cell = {(row["batch"], row["adapters"]): row["sides"] for row in rows}
    found = {}
    for key, cell in (("vllm_base", (32, 0)), ("vllm_adapters", (32, 4))):
        sides = by_cell.get(cell, {})
        if "vllm" in sides:
            found[key] = sides["torch"]["median"] / sides["vllm"]["median"]
    if pairs and (size.slowed, max(size.adapters)) == (SLOWED_BATCH, SLOWED_ADAPTERS):
        found["slowdown"] = Spread.of([without / with_ for without, with_ in pairs]).median
    return found
