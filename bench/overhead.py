"""What the database and the queues cost in a round of the size of `bench.rounds`.

Two shares of the round. The sum over all processes of every wait for the database and of every message's publishing and
way counts also what runs beside the engine and the trainer. The time in which nothing else goes on (no generation, no
environment call, no update, no file) is what the round would be shorter by without them; the service's own Python is in
it. Whole sessions, with the Python between their statements, and what the service does whatever the number of rounds
(heartbeats, sweeps, lease renewals) are shown apart.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from sqlalchemy import select

from app.db import transaction
from app.models import Round
from bench.intervals import Interval, clip, covered, merge, overlap, total, without
from bench.report import Spread, console, save, table, verdict
from bench.rounds import GROUP_SIZE, PROMPTS, TOKENS, phases, run_rounds, setup, warm_service
from bench.service import STAGES

TARGET = 0.05  # of the round
WORK = ("generate", "environment", "update")

ROWS = {
    "round": "round, from opening to commit",
    "generate": "generation",
    "environment": "environment calls",
    "update": "updates of the trainer, groups computed ahead included",
    "files": "adapter and checkpoint files: S3 and local cache",
    "alone": "nothing of these: database, queues, hand-overs",
    "alone_opening": "  from opening to the first call",
    "alone_rollout": "  during the rollout",
    "alone_handover": "  from the last episode's end to the trainer's claim",
    "alone_training": "  during training and commit",
    "overhead": "database and queues, sum over all processes",
    "statement": "  waits for the database",
    "publish": "  publishing of messages",
    "message": "  messages from publishing to start",
    "transaction": "whole database sessions, sum over all processes",
    "upkeep": "sessions of heartbeats, sweeps and lease renewals, sum",
}
UPKEEP = ("manager.sweep", "manager.retain", "heartbeat", "leases")


def run(state_dir: Path, rounds: int, shots: int) -> list[dict[str, float]]:
    """Seconds by kind of each round."""
    folder = state_dir / "intervals"
    folder.mkdir(exist_ok=True)
    os.environ["MARLAAS_BENCH_INTERVALS"] = str(folder)
    include: dict[str, Sequence[str]] = {stage: ["bench.probe"] for stage in STAGES}
    include["rollout"] = ["bench.forced", "bench.probe"]
    with warm_service(state_dir, setup(len(os.sched_getaffinity(0)), **include), shots) as owner:
        job_id = run_rounds(owner, shots, rounds)
    phases(job_id)  # raises where rounds were not of the size that is meant
    with transaction() as session:
        found = session.scalars(select(Round).where(Round.job_id == job_id).order_by(Round.policy_version)).all()
    intervals: dict[str, list[Interval]] = defaultdict(list)
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            kind, where, start, end = json.loads(line)
            if where not in UPKEEP:
                intervals[kind].append((start, end))
                intervals[f"{kind} in {where}"].append((start, end))
            elif kind in ("transaction", "message"):
                intervals["upkeep"].append((start, end))
    return [account(round_, intervals) for round_ in found]


def account(round_: Round, intervals: Mapping[str, Sequence[Interval]]) -> dict[str, float]:
    """Where the round's time went."""
    assert round_.ready_at and round_.training_at and round_.finished_at
    created, ready, training, finished = (
        t.timestamp() for t in (round_.created_at, round_.ready_at, round_.training_at, round_.finished_at)
    )
    window = (created, finished)
    mine = {kind: clip(found, window) for kind, found in intervals.items()}
    # A message to a trainer that is at work waits for the work, not for the queue.
    mine["message"] = [part for sent in mine["message"] for part in without([sent], mine["update"])]
    work = [interval for kind in WORK for interval in mine[kind]]
    busy = merge([*work, *without(mine["files"], mine["transaction"])])  # these are announced in the database

    def alone(start: float, end: float) -> float:
        return end - start - overlap([(start, end)], busy)

    first = busy[0][0]
    seconds = {kind: covered(mine[kind]) for kind in (*WORK, "files")}
    seconds |= {kind: total(found) for kind, found in mine.items() if kind not in seconds}
    return seconds | {
        "round": finished - created,
        "alone": alone(*window),
        "alone_opening": first - created,
        "alone_rollout": alone(first, ready),
        "alone_handover": alone(ready, training),
        "alone_training": alone(training, finished),
        "overhead": sum(seconds.get(kind, 0.0) for kind in ("statement", "publish", "message")),
    }


def main(state_dir: Path, rounds: int) -> None:
    report(run(state_dir, rounds, shots=0))


def report(rounds: list[dict[str, float]]) -> None:
    length = Spread.of([r["round"] for r in rounds])
    shown = table(
        f"Where a round's time goes: {PROMPTS} prompts x {GROUP_SIZE} episodes x {TOKENS} tokens, {len(rounds)} rounds",
        "",
        "seconds, median",
        "share of the round",
    )
    shares = {key: Spread.of([r[key] / r["round"] for r in rounds]).median for key in ROWS}
    for key, name in ROWS.items():
        goal = f" {verdict(shares[key] < TARGET)} (target: under {TARGET:.0%})" if key in ("alone", "overhead") else ""
        shown.add_row(name, f"{Spread.of([r[key] for r in rounds]).median:.3f}", f"{shares[key]:.1%}{goal}")
    console.print(shown)
    save("overhead", {"target": TARGET, "round": length.as_json(), "median_shares": shares, "rounds": rounds})
