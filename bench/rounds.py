"""One job's round through all of the real service, against a step of TRL's GRPOTrainer: same model, prompts, tokens."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from transformers import AutoTokenizer

from app import base_models as files
from app.db import transaction
from app.models import Round, StepMetrics, Turn
from app.models.round import TurnKind
from app.settings import get_settings
from bench import limits, service
from bench.child import running_child
from bench.machine import machine
from bench.peer import PeerSpec
from bench.report import Spread, Target, console, save, table
from bench.sums import messages

PROMPTS, GROUP_SIZE, TOKENS, RANK = 4, 8, 32, 8
TARGETS = {"round": Target("whole round of one job against TRL", 5.0, "times as fast")}
ROUNDS_A_TURN = 2  # of ours, then as many steps of the peer
JOB_SECONDS = 600


def prompt_tokens(model: Path, shots: int) -> int:
    """As many as every prompt has."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return len(tokenizer.apply_chat_template(messages(0, shots), add_generation_prompt=True, return_dict=False))


def limit(model: Path, shots: int, tokens: int) -> float:
    """Seconds at least of a round on this machine."""
    prompt = prompt_tokens(model, shots)
    return limits.round_(limits.Model.of(model), machine(again=True), PROMPTS, GROUP_SIZE, RANK, prompt, tokens)


def job_document(name: str, shots: int, rounds: int, tokens: int = TOKENS) -> dict[str, Any]:
    return {
        "name": name,
        "environment": {"type": "bench_sums", "params": {"shots": shots}},
        "sampling": {"max_tokens": tokens},
        "lora": {"rank": RANK, "alpha": 2 * RANK},
        "hyperparameters": {
            "n_steps": rounds,
            "prompts_per_round": PROMPTS,
            "group_size": GROUP_SIZE,
            "learning_rate": 1e-4,
        },
    }


def setup(threads: int, **include: Any) -> service.Setup:
    """One job's phases follow one another, so rollout and training may each have all cores."""
    return service.Setup(
        settings={
            "OMP_NUM_THREADS": "1",  # of the threads that neither decode nor train
            "MARLAAS_ROLLOUT_THREADS": str(threads),
            "MARLAAS_TRAINING_THREADS": str(threads),
        },
        include={"rollout": ["bench.forced"], **include},
    )


def run_rounds(owner: Any, shots: int, rounds: int) -> uuid.UUID:
    """One job of so many rounds, to its end."""
    job_id = service.submit(owner, job_document("rounds", shots, rounds))
    service.wait_for([job_id], JOB_SECONDS)
    return job_id


def phases(job_id: uuid.UUID) -> list[dict[str, float]]:
    """Seconds of each round of a job: from its opening to its commit, and of its phases. Raises RuntimeError when a
    round was not of the forced size, or had groups without signal, which are not trained on."""
    with transaction() as session:
        rounds = session.scalars(select(Round).where(Round.job_id == job_id).order_by(Round.policy_version)).all()
        sampled = session.execute(
            select(func.count(), func.sum(func.octet_length(Turn.sampled_ids) / 4))
            .where(Turn.round_id.in_([r.id for r in rounds]), Turn.kind == TurnKind.POLICY)
            .group_by(Turn.round_id)
        ).all()
        metrics = session.scalars(select(StepMetrics.metrics).where(StepMetrics.job_id == job_id)).all()
    episodes = PROMPTS * GROUP_SIZE
    if any(tuple(row) != (episodes, episodes * TOKENS) for row in sampled):
        raise RuntimeError(f"rounds of {episodes} turns and {episodes * TOKENS} tokens were wanted, not {sampled}")
    if any(m["loss_tokens"] != episodes * TOKENS or m["zero_variance_share"] for m in metrics):
        raise RuntimeError(f"a round was not trained on as a whole: {metrics}")
    found = []
    for r in rounds:
        assert r.ready_at and r.training_at and r.finished_at
        found.append(
            {
                "round": (r.finished_at - r.created_at).total_seconds(),
                "rollout": (r.ready_at - r.created_at).total_seconds(),
                "waiting": (r.training_at - r.ready_at).total_seconds(),
                "training": (r.finished_at - r.training_at).total_seconds(),
            }
        )
    return found


@contextmanager
def warm_service(state_dir: Path, setup_: service.Setup, shots: int) -> Iterator[Any]:
    """Workers that have done a job already; yields the tenant."""
    with service.running_workers(setup_, state_dir):
        owner = service.tenant()
        run_rounds(owner, shots, 2)
        yield owner


def run(state_dir: Path, turns: int, shots: int) -> dict[str, Any]:
    """Alternates `turns` times; returns the figures of one kind of prompt."""
    threads = len(os.sched_getaffinity(0))
    model = get_settings().models_path / files.folder_name(files.DEFAULT_MODEL)
    spec = PeerSpec(str(model), shots, PROMPTS, GROUP_SIZE, TOKENS, RANK, threads, batch=PROMPTS * GROUP_SIZE)
    command = [sys.executable, "-m", "bench.trl_peer", json.dumps(asdict(spec))]
    ours: list[dict[str, float]] = []
    theirs: list[float] = []
    with (
        warm_service(state_dir, setup(threads), shots) as owner,
        running_child("trl", command, state_dir, {"OMP_NUM_THREADS": str(threads)}) as peer,
    ):
        peer.ask()
        for turn in range(turns):
            ours += phases(run_rounds(owner, shots, ROUNDS_A_TURN))
            steps = [peer.ask() for _ in range(ROUNDS_A_TURN)]
            theirs += [step["seconds"] for step in steps]
            for log in (step["log"] for step in steps):
                if float(log["completions/mean_length"]) != TOKENS or float(log["frac_reward_zero_std"]):
                    raise RuntimeError(f"the peer's step was not of the forced size, or without signal: {log}")
            console.print(f"[dim]{turn + 1}/{turns}: ours {ours[-1]['round']:.2f} s, TRL {theirs[-1]:.2f} s[/]")
    least = limit(model, shots, TOKENS)
    return {"shots": shots, "ours": ours, "trl": theirs, "peer": asdict(spec), "threads": threads, "limit": least}


def main(state_dir: Path, turns: int) -> None:
    machine()
    rows = [run(state_dir, turns, shots) for shots in (0, 3)]
    report(rows)


def report(rows: list[dict[str, Any]]) -> None:
    shown = table(
        f"One job: {PROMPTS} prompts x {GROUP_SIZE} episodes x {TOKENS} forced tokens, LoRA rank {RANK}",
        "seconds: median (least to most, n)",
        *(f"{row['shots']} solved examples in the prompt" for row in rows),
    )
    spreads = [{key: Spread.of([r[key] for r in row["ours"]]) for key in row["ours"][0]} for row in rows]
    peers = [Spread.of(row["trl"]) for row in rows]
    ratios = [peer.median / ours["round"].median for ours, peer in zip(spreads, peers, strict=True)]
    names = {
        "round": "round, from opening to commit",
        "rollout": "  opening to all episodes graded",
        "waiting": "  waiting for the trainer",
        "training": "  training claim to commit",
    }
    for key, name in names.items():
        shown.add_row(name, *(str(spread[key]) for spread in spreads))
    shown.add_row("TRL GRPOTrainer, a step", *map(str, peers))
    shown.add_row("times as fast as TRL", *(f"{ratio:.2f}" for ratio in ratios))
    shown.add_row("least that this machine could need", *(f"{row['limit']:.2f}" for row in rows))
    shares = [row["limit"] / spread["round"].median for row, spread in zip(rows, spreads, strict=True)]
    shown.add_row("share of that limit", *(f"{share:.0%}" for share in shares))
    console.print(shown)
    targets = {"round": ratios[0]}
    console.print(TARGETS["round"].line(ratios[0]))
    save(
        "round",
        {
            "ratio": ratios,
            "targets": targets,
            "rows": [
                row | {"ours_median": {k: s.median for k, s in spread.items()}, "trl_median": peer.median}
                for row, spread, peer in zip(rows, spreads, peers, strict=True)
            ],
        },
    )
