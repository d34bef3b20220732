"""One job's round through all of the real service, against a step of TRL's GRPOTrainer: same model, prompts, tokens."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from app import base_models as files
from app.db import transaction
from app.models import Round, StepMetrics, Turn
from app.models.round import TurnKind
from app.settings import get_settings
from bench import service
from bench.peer import PeerSpec, running_peer
from bench.report import Spread, console, save, table, verdict

PROMPTS, GROUP_SIZE, TOKENS, RANK = 4, 8, 32, 8
TARGET = 0.5  # of the peer's step
ROUNDS_A_TURN = 2  # of ours, then as many steps of the peer
JOB_SECONDS = 600


def job_document(name: str, shots: int, rounds: int) -> dict[str, Any]:
    return {
        "name": name,
        "environment": {"type": "bench_sums", "params": {"shots": shots}},
        "sampling": {"max_tokens": TOKENS},
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
    spec = PeerSpec(str(model), shots, PROMPTS, GROUP_SIZE, TOKENS, RANK, threads)
    ours: list[dict[str, float]] = []
    theirs: list[float] = []
    with warm_service(state_dir, setup(threads), shots) as owner, running_peer(spec, state_dir / "trl.log") as peer:
        peer.step()
        for turn in range(turns):
            ours += phases(run_rounds(owner, shots, ROUNDS_A_TURN))
            theirs += [peer.step() for _ in range(ROUNDS_A_TURN)]
            if (peer.tokens, peer.without_signal) != (TOKENS, 0):
                raise RuntimeError(f"the peer generated {peer.tokens} tokens, {peer.without_signal} without signal")
            console.print(f"[dim]{turn + 1}/{turns}: ours {ours[-1]['round']:.2f} s, TRL {theirs[-1]:.2f} s[/]")
    return {"shots": shots, "ours": ours, "trl": theirs, "peer": asdict(spec), "threads": threads}


def main(state_dir: Path, turns: int) -> None:
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
    ratios = [ours["round"].median / peer.median for ours, peer in zip(spreads, peers, strict=True)]
    names = {
        "round": "round, from opening to commit",
        "rollout": "  opening to all episodes graded",
        "waiting": "  waiting for the trainer",
        "training": "  training claim to commit",
    }
    for key, name in names.items():
        shown.add_row(name, *(str(spread[key]) for spread in spreads))
    shown.add_row("TRL GRPOTrainer, a step", *map(str, peers))
    shown.add_row(
        f"ours / TRL (target: at most {TARGET})", *(f"{ratio:.2f} {verdict(ratio <= TARGET)}" for ratio in ratios)
    )
    console.print(shown)
    save(
        "round",
        {
            "ratio": ratios,
            "target": TARGET,
            "rows": [
                row | {"ours_median": {k: s.median for k, s in spread.items()}, "trl_median": peer.median}
                for row, spread, peer in zip(rows, spreads, peers, strict=True)
            ],
        },
    )
