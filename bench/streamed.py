"""What it is worth to compute closed groups ahead of their round: calculator jobs, alone and four at once.

The same jobs with the same seeds run with and without streamed groups, in turn. Rollout and training have a core each,
and a tool call takes 0.3 to 2 s, so that the groups of a round end at different times. Answers end where they end, and
which rows decode together moves their last bits, so what counts is tokens trained on a second.
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
from bench.mixed import SETUP, SIDE_SECONDS, documents, figures
from bench.mixed import Size as Jobs
from bench.report import Spread, Target, console, save, table

JOBS = (1, 4)
TARGETS = {"streamed": Target("one job with streamed groups against without", 1.0, "times the tokens/s")}


@dataclass(frozen=True)
class Size:
    turns: int = 2
    steps: int = 4  # of each job and turn
    prompts: int = 4
    group: int = 8


def run(state_dir: Path, streaming: bool, size: Size) -> dict[int, dict[str, Any]]:
    """By the number of jobs at once: seconds of the rounds, tokens a second of all, and streamed groups a round."""
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
                "tokens_per_second": mean_metric(job_ids, "loss_tokens") * told["steps"] / told["seconds"],
                "streamed": mean_metric(job_ids, "streamed_groups"),
            }
    return found


def work(jobs: list[dict[str, Any]]) -> list[uuid.UUID]:
    owner = service.tenant()
    job_ids = [service.submit(owner, document) for document in jobs]
    service.wait_for(job_ids, SIDE_SECONDS)
    return job_ids


def mean_metric(job_ids: list[uuid.UUID], name: str) -> float:
    """Over all steps of the jobs; 0 for those that lack it."""
    with transaction() as session:
        metrics = session.scalars(select(StepMetrics.metrics).where(StepMetrics.job_id.in_(job_ids))).all()
    return mean(m.get(name, 0.0) for m in metrics)


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
        "groups streamed a round",
        "tokens a second, streamed",
        "not streamed",
        "ratio",
    )
    rows = []
    for number in JOBS:
        sides = {
            streaming: {
                "rounds": [s for turn in turns for s in turn[streaming][number]["rounds"]],
                "tokens_per_second": [turn[streaming][number]["tokens_per_second"] for turn in turns],
                "streamed": mean(turn[streaming][number]["streamed"] for turn in turns),
            }
            for streaming in (True, False)
        }
        rates = [Spread.of(sides[streaming]["tokens_per_second"]) for streaming in (True, False)]
        ratio = rates[0].median / rates[1].median
        shown.add_row(
            str(number),
            *(str(Spread.of(sides[streaming]["rounds"])) for streaming in (True, False)),
            f"{sides[True]['streamed']:.1f}",
            *map(str, rates),
            f"{ratio:.2f}",
        )
        rows.append({"jobs": number, "ratio": ratio, "streamed": sides[True], "not_streamed": sides[False]})
    console.print(shown)
    targets = {"streamed": rows[0]["ratio"]}
    console.print(TARGETS["streamed"].line(targets["streamed"]))
    save("streamed", {"size": asdict(size), "rows": rows, "targets": targets})
