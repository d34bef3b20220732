"""One update: this system's trainer against the training part of TRL's GRPOTrainer with PEFT, on the same tokens.

Each side and shape is a process of its own, so that its peak memory is its own: the most resident memory that it ever
had (VmHWM), less what it held when the model was loaded. TRL's generation and scoring are replaced by given tokens;
what is timed is its loss, backward and AdamW.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import limits
from bench.child import Child, running_child
from bench.machine import machine
from bench.report import Spread, Target, console, save, table

RANK = 8
TARGETS = {
    "trl_speed": Target("trainer against TRL, 4 × 8 × 32", 4.0, "times the tokens/s"),
    "trl_memory": Target("trainer's peak memory against TRL's, 8 × 8 × 128", 0.5, "of it", most=True),
}


@dataclass(frozen=True)
class Shape:
    """`groups` × `size` episodes of `prompt` + `tokens` tokens, of which `measured` groups are trained on a step: time
    and memory a group do not depend on how many follow one another."""

    groups: int
    size: int
    prompt: int
    tokens: int
    measured: int
    batch: int  # episodes a pass of TRL: the quickest that was found (see `--full`)
    turns: int = 3

    @property
    def name(self) -> str:
        return f"{self.groups} × {self.size} × {self.tokens}, prompt {self.prompt}"

    @property
    def episode_tokens(self) -> int:
        """Of a step, the prompt counted for each episode."""
        return self.measured * self.size * (self.prompt + self.tokens)


SHORT = Shape(4, 8, prompt=33, tokens=32, measured=4, batch=8)
LONG = Shape(8, 8, prompt=512, tokens=128, measured=2, batch=2, turns=2)
TINY = Shape(1, 4, prompt=8, tokens=8, measured=1, batch=4, turns=1)
QUICK = (SHORT, LONG)
FULL = (
    replace(SHORT, turns=5),
    replace(LONG, measured=8),
    *(replace(SHORT, batch=batch, turns=2) for batch in (32, 16, 4)),
    *(replace(LONG, batch=batch, measured=1, turns=1) for batch in (8, 4, 1)),
)
SHAPES = {"quick": QUICK, "full": FULL, "tiny": (TINY,)}


def ours(shape: Shape, model: Path, stack: ExitStack, logs: Path) -> Child:
    return start("bench.training_ours", work(shape, model), stack, logs)


def trl(shape: Shape, model: Path, stack: ExitStack, logs: Path) -> Child:
    return start("bench.training_trl", work(shape, model) | {"shots": 0, "batch": shape.batch}, stack, logs)


def work(shape: Shape, model: Path) -> dict[str, Any]:
    """What either side is asked for."""
    return {
        "model": str(model),
        "prompts": shape.measured,
        "group_size": shape.size,
        "prompt": shape.prompt,
        "tokens": shape.tokens,
        "rank": RANK,
        "threads": machine().threads,
    }


def start(module: str, spec: dict[str, Any], stack: ExitStack, logs: Path) -> Child:
    environment = {"OMP_NUM_THREADS": str(spec["threads"]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", module, json.dumps(spec)]
    return stack.enter_context(running_child(module, command, logs, environment))


def run(shape: Shape, model: Path, logs: Path) -> dict[str, list[dict[str, Any]]]:
    """Answers of each side; the first step of each is outside the clock."""
    with ExitStack() as stack:
        sides = {"ours": ours(shape, model, stack, logs), "trl": trl(shape, model, stack, logs)}
        for child in sides.values():
            child.ask()
        turns = [{name: child.ask() for name, child in sides.items()} for _ in range(shape.turns)]
    return {name: [turn[name] for turn in turns] for name in sides}


def main(model: Path, shapes: tuple[Shape, ...]) -> None:
    machine()
    rows = []
    with tempfile.TemporaryDirectory(prefix="marlaas-bench-") as logs:
        for shape in shapes:
            rows.append(figures(shape, model, run(shape, model, Path(logs))))
    report(rows)


def figures(shape: Shape, model: Path, answers: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    sizes = limits.Model.of(model)
    seconds = limits.training(sizes, machine(again=True), shape.measured, shape.size, RANK, shape.prompt, shape.tokens)
    row: dict[str, Any] = {
        "shape": asdict(shape),
        "name": shape.name,
        "limit": shape.episode_tokens / seconds,
        "sides": {},
    }
    for side, found in answers.items():
        rate = Spread.of([shape.episode_tokens / answer["seconds"] for answer in found])
        row["sides"][side] = rate.as_json() | {
            "seconds": Spread.of([answer["seconds"] for answer in found]).median,
            "memory": found[-1]["peak"] - found[-1]["base"],
            "peak": found[-1]["peak"],
            "share": rate.median / row["limit"],
        }
    return row


def report(rows: list[dict[str, Any]]) -> None:
    shown = table(
        f"Training: episode tokens a second (median, least to most), memory over the loaded model; LoRA rank {RANK}",
        "groups × episodes × tokens",
        "ours",
        "TRL (episodes a pass)",
        "ratio",
        "memory",
        "TRL's",
        "ratio",
        "limit",
        "ours of it",
        "TRL of it",
    )
    for row in rows:
        mine, theirs = row["sides"]["ours"], row["sides"]["trl"]
        rates = [f"{s['median']:.0f} ({s['values'][0]:.0f} to {s['values'][-1]:.0f})" for s in (mine, theirs)]
        shown.add_row(
            row["name"],
            rates[0],
            f"{rates[1]} ({row['shape']['batch']})",
            f"{mine['median'] / theirs['median']:.2f}",
            f"{mine['memory'] / 2**30:.2f} GiB",
            f"{theirs['memory'] / 2**30:.2f} GiB",
            f"{mine['memory'] / theirs['memory']:.2f}",
            f"{row['limit']:.0f}",
            f"{mine['share']:.0%}",
            f"{theirs['share']:.0%}",
        )
    console.print(shown)
    targets = reached(rows)
    for key, value in targets.items():
        console.print(TARGETS[key].line(value))
    save("training", {"rows": rows, "targets": targets})


def reached(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Both against TRL's quickest setting of that shape, whatever memory that takes."""
    found = {}
    for key, figure, wanted in (("trl_speed", "median", SHORT), ("trl_memory", "memory", LONG)):
        mine = [row["sides"] for row in rows if row["name"] == wanted.name]
        if mine:
            quickest = max(mine, key=lambda sides: sides["trl"]["median"])
            found[key] = quickest["ours"][figure] / quickest["trl"][figure]
    return found
