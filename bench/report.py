"""Figures as tables on the screen and as JSON in bench/results."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
RESULTS_VARIABLE = "MARLAAS_BENCH_RESULTS"  # another folder
PACKAGES = ("torch", "transformers", "peft", "trl")

console = Console(width=None if sys.stdout.isatty() else 150)


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and extremes of a few measurements."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(tuple(sorted(values)))

    @property
    def median(self) -> float:
        return median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.values[0]:.2f} to {self.values[-1]:.2f}, n={len(self.values)})"

    def as_json(self) -> dict[str, Any]:
        return {"median": self.median, "values": list(self.values)}


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    return made


@dataclass(frozen=True)
class Target:
    """A figure that is to be reached: at least `value` times, or at most where `most`."""

    what: str
    value: float
    unit: str
    most: bool = False

    def reached(self, figure: float) -> bool:
        return figure < self.value if self.most else figure >= self.value

    @property
    def bound(self) -> str:
        return f"{'under' if self.most else 'at least'} {self.value:g}"

    def line(self, figure: float) -> str:
        return f"{self.what}: {figure:.2f} {self.unit} (target: {self.bound}) {verdict(self.reached(figure))}"


def verdict(reached: bool) -> str:
    return "[green]reached[/]" if reached else "[red]missed[/]"


def results() -> Path:
    """The folder of figures and plots, made if need be."""
    folder = Path(os.environ.get(RESULTS_VARIABLE, RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save(name: str, figures: dict[str, Any]) -> Path:
    """Writes bench/results/<name>.json, with what the figures depend on beside them."""
    path = results() / f"{name}.json"
    path.write_text(json.dumps({"made": made_on()} | figures, indent=2) + "\n")
    console.print(f"[dim]{path}[/]")
    return path


def load(name: str) -> dict[str, Any] | None:
    """What `save` wrote last; None where it never did."""
    path = results() / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def made_on() -> dict[str, Any]:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }
