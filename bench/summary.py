"""The targets, with what the latest run of each benchmark reached."""

from __future__ import annotations

from bench import rollout, rounds, skyrl, streamed, training
from bench.report import console, load, save, table, verdict

BENCHMARKS = {
    "rollout": rollout.TARGETS,
    "training": training.TARGETS,
    "round": rounds.TARGETS,
    "skyrl": skyrl.TARGETS,
    "streamed": streamed.TARGETS,
}


def main() -> None:
    shown = table("Targets", "what", "target", "reached", "", "measured")
    rows = []
    for name, targets in BENCHMARKS.items():
        figures = load(name) or {}
        for key, target in targets.items():
            figure = figures.get("targets", {}).get(key)
            if figure is None:
                shown.add_row(target.what, target.bound, "", "[dim]not measured[/]", "")
                continue
            at = figures["made"]["at"]
            shown.add_row(target.what, target.bound, f"{figure:.2f}", verdict(target.reached(figure)), at[:16])
            rows.append(
                {
                    "what": target.what,
                    "target": target.bound,
                    "figure": figure,
                    "unit": target.unit,
                    "reached": target.reached(figure),
                    "at": at,
                }
            )
    console.print(shown)
    save("summary", {"targets": rows})
