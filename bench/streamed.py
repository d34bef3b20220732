"""What it is worth to compute closed groups ahead of their round: calculator jobs, alone and four at once.

The same jobs with the same seeds run with and without streamed groups, in turn: no result depends on it. Rollout and
training have a core each, and a tool call takes 0.3 to 2 s, so that the groups of a round end at different times.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from sqlalchemy import select

from app.db import transaction
from app.models import StepMetrics
from bench import service
from bench.mixed import SETUP, documents, figures
from bench.mixed import Size as Jobs
from bench.report import Spread, Target, console, save, table

JOBS = (1, 4)
SIDE_SECONDS = 600
TARGETS = {"streamed": Target("a round with streamed groups against one without", 1.0, "of the time", most=True)}


@dataclass(frozen=True)
class Size:
    turns: int = 2
    steps: int = 4  # of each job and turn
    prompts: int = 4
    group: int = 8


def run(state_dir: Path, streaming: bool, size: Size) -> dict[int, dict[str, Any]]:
    """By the number of jobs at once: seconds of the rounds, steps an hour of all, and streamed groups a round."""
    settings = dict(SETUP.settings) | {"MARLAAS_TRAIN_STREAMING": "1" if streaming else "0"}
    jobs = documents(Jobs(size.steps, size.prompts, size.group))[-max(JOBS) :]
    found = {}
    with service.running_workers(replace(SETUP, settings=settings), state_dir):
        work([{**jobs[0], "hyperparameters": jobs[0]["hyperparameters"] | {"n_steps": 1}}])  # warm
        for number in JOBS:
            job_ids = work(jobs[:number])
            told = figures(job_ids)
            found[number] = {
                "rounds": [seconds for rounds in told["round_seconds"].values() for seconds in rounds],
                "steps_an_hour": 3600 * told["steps"] / told["seconds"],
                "streamed": streamed(job_ids),
            }
    return found


def work(jobs: list[dict[str, Any]]) -> list[uuid.UUID]:
    owner = service.tenant()
    job_ids = [service.submit(owner, document) for document in jobs]
    service.wait_for(job_ids, SIDE_SECONDS)
    return job_ids


def streamed(job_ids: list[uuid.UUID]) -> float:
    with transaction() as session:
        metrics = session.scalars(select(StepMetrics.metrics).where(StepMetrics.job_id.in_(job_ids))).all()
    return mean(m.get("streamed_groups", 0.0) for m in metrics)


def main(state_dir: Path, size: Size) -> None:
    turns: list[Mapping[bool, dict[int, dict[str, Any]]]] = []
    for turn in range(size.turns):
        order = (True, False) if turn % 2 else (False, True)
        turns.append({streaming: run(state_dir, streaming, size) for streaming in order})
        console.print(f"[dim]{turn + 1}/{size.turns} turns[/]")
    report(size, turns)


def report(size: Size, turns: list[Mapping[bool, dict[int, dict[str, Any]]]]) -> None:
    shown = table(
        f"Rounds of {size.prompts} × {size.group} episodes that call a tool of 0.3 to 2 s",
        "jobs at once",
        "seconds a round, streamed",
        "not streamed",
        "of the time",
        "groups streamed a round",
        "steps an hour, streamed",
        "not streamed",
    )
    rows = []
    for number in JOBS:
        sides = {
            streaming: {
                "rounds": [s for turn in turns for s in turn[streaming][number]["rounds"]],
                "steps_an_hour": [turn[streaming][number]["steps_an_hour"] for turn in turns],
                "streamed": mean(turn[streaming][number]["streamed"] for turn in turns),
            }
            for streaming in (True, False)
        }
        with_, without = (mean(sides[streaming]["rounds"]) for streaming in (True, False))
        rates = [str(Spread.of(sides[streaming]["steps_an_hour"])) for streaming in (True, False)]
        shown.add_row(
            str(number),
            *(str(Spread.of(sides[streaming]["rounds"])) for streaming in (True, False)),
            f"{with_ / without:.2f}",
            f"{sides[True]['streamed']:.1f}",
            *rates,
        )
        rows.append({"jobs": number, "ratio": with_ / without, "streamed": sides[True], "not_streamed": sides[False]})
    console.print(shown)
    targets = {"streamed": rows[0]["ratio"]}
    console.print(TARGETS["streamed"].line(targets["streamed"]))
    save("streamed", {"size": asdict(size), "rows": rows, "targets": targets})
