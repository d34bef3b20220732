"""Eight jobs at once against the same eight one after another, on the same system and workers.

The rollout worker has one core and the training worker another, as two accelerators would be. Half of the jobs are
tool jobs, whose calculator takes 0.3 to 2 s a call.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import select

from app.db import transaction
from app.models import PhaseSpan, Round
from bench import service
from bench.intervals import Interval, covered, overlap
from bench.report import console, save, table, verdict

TARGET = 2.0  # times the steps an hour
SIDE_SECONDS = 900

SETUP = service.Setup(
    settings={"OMP_NUM_THREADS": "1", "MARLAAS_ENGINE_SLOTS": "128", "MARLAAS_ENGINE_KV_TOKENS": str(128 * 512)},
    by_stage={
        "rollout": {"MARLAAS_CPU_AFFINITY": "0"},
        "training": {"MARLAAS_CPU_AFFINITY": "1"},
    },
)

GYM = {
    "letters": {"task": "letter_counting", "config": {"min_words": 1, "max_words": 2}},
    "primes": {"task": "count_primes", "config": {"max_n": 10}},
    "bases": {"task": "base_conversion", "config": {"max_value": 10}},
    "gcd": {"task": "gcd", "config": {"max_value": 10}},
}


@dataclass(frozen=True)
class Size:
    """How much each of the eight jobs does."""

    steps: int
    prompts: int
    group: int


def documents(size: Size) -> list[dict[str, Any]]:
    """The eight jobs: four of reasoning-gym, one turn each, and four that call the calculator and answer."""
    shared = {
        "lora": {"rank": 8, "alpha": 16},
        "hyperparameters": {
            "n_steps": size.steps,
            "prompts_per_round": size.prompts,
            "group_size": size.group,
            "learning_rate": 1e-4,
        },
    }
    gym = [
        {
            "name": name,
            "environment": {"type": "reasoning_gym", "params": {"shots": 3, **params}},
            "sampling": {"max_tokens": 32},
        }
        for name, params in GYM.items()
    ]
    calculator = [
        {
            "name": f"calculator-{number}",
            "environment": {"type": "calculator", "max_turns": 3},
            "sampling": {"max_tokens": 40},
        }
        for number in range(1, 5)
    ]
    return [{**shared, "seed": seed, **document} for seed, document in enumerate([*gym, *calculator])]


def figures(job_ids: Sequence[uuid.UUID]) -> dict[str, Any]:
    """Steps and time from the first round's opening to the last commit, and what went on at the same time."""
    with transaction() as session:
        rounds = session.scalars(select(Round).where(Round.job_id.in_(job_ids))).all()
        spans = session.scalars(select(PhaseSpan).where(PhaseSpan.round_id.in_([r.id for r in rounds]))).all()
    job_of = {r.id: r.job_id for r in rounds}
    by_job: dict[str, dict[uuid.UUID, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        interval = (span.started_at.timestamp(), span.ended_at.timestamp())
        by_job[span.phase][job_of[span.round_id]].append(interval)
    trained = covered(i for found in by_job["training"].values() for i in found)
    beside = 0.0
    for job, mine in by_job["training"].items():
        beside += overlap(mine, (i for other, found in by_job["rollout"].items() if other != job for i in found))
    ends = [r.finished_at.timestamp() for r in rounds if r.finished_at]
    window = max(ends) - min(r.created_at.timestamp() for r in rounds)
    waits = [(r.training_at - r.ready_at).total_seconds() for r in rounds if r.training_at and r.ready_at]
    return {
        "steps": len(rounds),
        "seconds": window,
        "training_seconds": trained,
        "generating_seconds": covered(i for found in by_job["rollout"].values() for i in found),
        "environment_seconds": covered(i for found in by_job["environment"].values() for i in found),
        "training_beside_generation": beside / trained if trained else 0.0,
        "mean_wait_for_trainer": sum(waits) / len(waits),
        "round_seconds": {
            str(job): [
                (r.finished_at - r.created_at).total_seconds() for r in rounds if r.job_id == job and r.finished_at
            ]
            for job in job_ids
        },
    }


def one_after_another(size: Size) -> dict[str, Any]:
    """The eight jobs, each from its first opening to its last commit: no time between jobs is counted."""
    owner = service.tenant()
    alone = []
    for document in documents(size):
        job_id = service.submit(owner, document)
        service.wait_for([job_id], SIDE_SECONDS)
        alone.append(figures([job_id]) | {"name": document["name"]})
        console.print(f"[dim]{document['name']} alone: {alone[-1]['seconds']:.1f} s for {alone[-1]['steps']} steps[/]")
    summed = {
        key: sum(a[key] for a in alone)
        for key in ("steps", "seconds", "training_seconds", "generating_seconds", "environment_seconds")
    }
    return summed | {"training_beside_generation": 0.0, "jobs": alone}


def all_at_once(size: Size) -> dict[str, Any]:
    owner = service.tenant()
    job_ids = [service.submit(owner, document) for document in documents(size)]
    service.wait_for(job_ids, SIDE_SECONDS)
    return figures(job_ids)


def main(state_dir: Path, size: Size) -> None:
    with service.running_workers(SETUP, state_dir):
        once = documents(replace(size, steps=1))
        service.wait_for([service.submit(service.tenant(), once[i]) for i in (0, 4)], SIDE_SECONDS)  # warm
        together = all_at_once(size)
        console.print(f"[dim]all eight at once: {together['seconds']:.1f} s for {together['steps']} steps[/]")
        alone = one_after_another(size)
    report(size, alone, together)


def report(size: Size, alone: dict[str, Any], together: dict[str, Any]) -> None:
    sides = (alone, together)
    shown = table(
        f"Eight jobs of {size.prompts} × {size.group} episodes a round, half of them with tool calls of 0.3 to 2 s",
        "",
        "one after another",
        "all at once",
    )
    shown.add_row("steps", *(str(side["steps"]) for side in sides))
    shown.add_row("seconds", *(f"{side['seconds']:.1f}" for side in sides))
    rates = [3600 * side["steps"] / side["seconds"] for side in sides]
    shown.add_row("steps an hour", *(f"{rate:.0f}" for rate in rates))
    for key, name in (
        ("generating_seconds", "time with a generation under way"),
        ("training_seconds", "time with an update under way"),
        ("environment_seconds", "time with an environment call under way"),
    ):
        shown.add_row(name, *(f"{side[key] / side['seconds']:.0%}" for side in sides))
    shown.add_row(
        "training time in which other jobs generate", *(f"{side['training_beside_generation']:.0%}" for side in sides)
    )
    ratio = rates[1] / rates[0]
    shown.add_row(f"ratio (target: at least {TARGET:g})", "", f"{ratio:.2f} {verdict(ratio >= TARGET)}")
    console.print(shown)
    save(
        "jobs",
        {"size": asdict(size), "ratio": ratio, "target": TARGET, "one_after_another": alone, "all_at_once": together},
    )
