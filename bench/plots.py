"""Pictures of the figures in bench/results, as PNG beside them. Colours are told apart with any kind of sight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no screen is needed

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from bench.report import console, load, results  # noqa: E402
from bench.rollout import SIDES  # noqa: E402

COLOURS = ("#0072b2", "#e69f00", "#56b4e9", "#999999")  # Okabe and Ito
WIDTH, HEIGHT, DPI = 9.0, 3.6, 120


def bars(axes: Axes, labels: Sequence[str], series: Mapping[str, Sequence[float | None]], unit: str) -> None:
    """Grouped bars, each with its value on top."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [place - 0.4 + width * (number + 0.5) for place in range(len(labels))]
        drawn = axes.bar(places, [value or 0 for value in values], width, label=name, color=COLOURS[number])
        shown = ["" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.2g}" for value in values]
        axes.bar_label(drawn, shown, fontsize=7, padding=1)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylabel(unit, fontsize=9)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)


def rollout(figures: dict[str, Any]) -> None:
    rows = figures["rows"]
    sides = [side for side in SIDES if side in rows[0]["sides"]]
    figure, axes = plt.subplots(figsize=(max(WIDTH, 0.75 * len(rows)), HEIGHT), layout="constrained")
    labels = [f"{row['batch']} rows\n{row['adapters']} adapters" for row in rows]
    bars(axes, labels, {SIDES[s]: [row["sides"][s]["median"] for row in rows] for s in sides}, "tokens a second")
    axes.set_title("Decoding, forced tokens", fontsize=10)
    figure.legend(fontsize=8, frameon=False, ncols=len(sides), loc="outside lower center")
    write(figure, "rollout")


def training(figures: dict[str, Any]) -> None:
    quickest: dict[str, dict[str, Any]] = {}
    for row in figures["rows"]:
        known = quickest.setdefault(row["name"], row)
        if row["sides"]["trl"]["median"] > known["sides"]["trl"]["median"]:
            quickest[row["name"]] = row
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, HEIGHT), layout="constrained")
    for axes, key, divisor, unit in ((left, "median", 1, "tokens a second"), (right, "memory", 2**30, "GiB of memory")):
        series = {
            name: [row["sides"][side][key] / divisor for row in quickest.values()]
            for side, name in (("ours", "this system"), ("trl", "TRL"))
        }
        bars(axes, [name.replace(", ", "\n") for name in quickest], series, unit)
    left.set_title("Training: episode tokens a second", fontsize=10)
    right.set_title("Peak memory over the loaded model", fontsize=10)
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, frameon=False, ncols=2, loc="outside lower center")
    write(figure, "training")


def rounds(figures: dict[str, Any]) -> None:
    rows = figures["rows"]
    figure, axes = plt.subplots(figsize=(WIDTH / 1.5, HEIGHT), layout="constrained")
    labels = [f"{row['shots']} solved examples" for row in rows]
    series = {
        "this system": [row["ours_median"]["round"] for row in rows],
        "TRL": [row["trl_median"] for row in rows],
    }
    bars(axes, labels, series, "seconds a round")
    axes.set_title("One job: a whole round, 4 × 8 × 32 tokens", fontsize=10)
    figure.legend(fontsize=8, frameon=False, ncols=2, loc="outside lower center")
    write(figure, "round")


def skyrl(figures: dict[str, Any]) -> None:
    rows = figures["rows"]
    figure, axes = plt.subplots(figsize=(WIDTH / 1.5, HEIGHT), layout="constrained")
    labels = [f"{row['jobs']} job{'s' if row['jobs'] > 1 else ''}\n{row['peer']}" for row in rows]
    middle = {key: [median(row[key]) for row in rows] for key in ("ours", "skyrl")}
    bars(axes, labels, {"this system": middle["ours"], "SkyRL": middle["skyrl"]}, "steps an hour in all")
    axes.set_title("Jobs at once, 4 × 8 × 24 tokens", fontsize=10)
    figure.legend(fontsize=8, frameon=False, ncols=2, loc="outside lower center")
    write(figure, "skyrl")


def roofline(figures: dict[str, Any]) -> None:
    """Decoding on the roof: what the products alone reach, and what the engine does, by rows at once."""
    rows = figures["products"]
    figure, axes = plt.subplots(figsize=(WIDTH / 1.5, HEIGHT), layout="constrained")
    at = [row["rows"] for row in rows]
    axes.plot(at, [row["limit"] for row in rows], color="black", label="limit: bandwidth, then arithmetic")
    axes.plot(
        at,
        [max(row["plain"], row["blocked"]) for row in rows],
        "o-",
        color=COLOURS[2],
        label="products of a step alone",
    )
    measured = load("rollout")
    for side, marker, colour in (("torch", "s", COLOURS[0]), ("vllm", "^", COLOURS[1])):
        found = [row for row in (measured or {"rows": []})["rows"] if not row["adapters"] and side in row["sides"]]
        if found:
            points = [row["sides"][side]["median"] for row in found]
            axes.plot([row["batch"] for row in found], points, marker, color=colour, label=f"{SIDES[side]}, no adapter")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("rows at once", fontsize=9)
    axes.set_ylabel("tokens a second", fontsize=9)
    axes.set_title("Roofline of decoding", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    write(figure, "roofline")


def write(figure: Any, name: str) -> None:
    path = results() / f"{name}.png"
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    console.print(f"[dim]{path}[/]")


PLOTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "rollout": rollout,
    "training": training,
    "round": rounds,
    "skyrl": skyrl,
    "roofline": roofline,
}


def main() -> None:
    for name, plot in PLOTS.items():
        figures = load(name)
        if figures is not None:
            plot(figures)
