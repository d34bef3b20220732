"""Steps an hour of one job and of four at once, against SkyRL's Tinker backend on JAX on this CPU.

Its server and client run in an environment of their own (MARLAAS_BENCH_SKYRL_PYTHON; docs/benchmarks.md says how it is
made). Its shapes are fixed, by its own settings, to a job's 32 sequences, so that all compilation is over after the
first step; as it comes, each new mix of requests compiles anew (`--full` measures that too).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select

from app import base_models as files
from app.db import transaction
from app.embedded.ports import choose_ports
from app.models import Round, Tenant
from app.settings import get_settings
from bench import service
from bench.child import ROOT, Child, running_child
from bench.machine import machine
from bench.report import Spread, Target, console, save, table
from bench.rounds import GROUP_SIZE, PROMPTS, RANK, job_document, limit, setup

TOKENS = 24  # with the prompt 64 tokens, which is a size that its padding adds nothing to
JOBS = (1, 4)
START_SECONDS = 180
JOB_SECONDS = 900
TARGETS = {"skyrl": Target("four jobs at once against SkyRL", 12.0, "times the steps an hour")}


@dataclass(frozen=True)
class Size:
    turns: int = 2
    steps: int = 2  # of each job and turn
    ours: int = 4  # rounds of each job and turn: they are shorter


@dataclass(frozen=True)
class Peer:
    name: str
    config: dict[str, int] = field(default_factory=dict)


FIXED = Peer(
    "SkyRL, fixed shapes",
    {"train_micro_batch_size": PROMPTS * GROUP_SIZE, "sample_max_num_sequences": PROMPTS * GROUP_SIZE},
)
AS_IT_COMES = Peer("SkyRL, as it comes")


def skyrl_python() -> Path | None:
    python = Path(os.environ.get("MARLAAS_BENCH_SKYRL_PYTHON", ROOT / ".venv-skyrl/bin/python"))
    return python.absolute() if python.exists() else None


@contextmanager
def running_skyrl(peer: Peer, python: Path, model: Path, jobs: int, logs: Path) -> Iterator[Child]:
    """Its server, with so many adapters, and its client with a training run for each."""
    folder = logs / f"skyrl-{jobs}"
    folder.mkdir(exist_ok=True)
    (port,) = choose_ports([18_200])
    environment = {
        **os.environ,
        "VIRTUAL_ENV": str(python.parent.parent),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }
    for name in ("OMP_NUM_THREADS", "PYTHONPATH"):
        environment.pop(name, None)
    config = {"max_lora_adapters": jobs + 1, "max_lora_rank": RANK} | peer.config  # one is the base model's
    # The server finds the arguments for its engine in the command line of `uv run` above it.
    command = [str(python.parent / "uv"), "run", "--active", "--no-project", "-m", "skyrl.tinker.api"]
    command += ["--base-model", str(model), "--host", "127.0.0.1", "--port", str(port), "--backend", "jax"]
    command += ["--backend-config", json.dumps(config), "--checkpoints-base", str(folder / "checkpoints")]
    command += ["--database-url", f"sqlite:///{folder / 'tinker.db'}"]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/docs", server, folder / "server.log")
        sizes = map(str, (jobs, RANK, PROMPTS, GROUP_SIZE, TOKENS))
        client = [str(python), "-m", "bench.skyrl_client", f"http://127.0.0.1:{port}", str(model), *sizes]
        with running_child("skyrl-client", client, folder, environment) as child:
            yield child
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, OSError) as error:
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"SkyRL's server did not start:\n{log.read_text()[-3000:]}") from error
        time.sleep(0.5)


def workers(jobs: int) -> service.Setup:
    """One job's phases follow one another, so each may have all cores; of four, some train while others generate."""
    if jobs == 1:
        return setup(len(os.sched_getaffinity(0)))
    one_core_each = {"rollout": {"MARLAAS_CPU_AFFINITY": "0"}, "training": {"MARLAAS_CPU_AFFINITY": "1"}}
    return service.Setup(
        settings={
            "OMP_NUM_THREADS": "1",
            "MARLAAS_ENGINE_SLOTS": str(jobs * PROMPTS * GROUP_SIZE),
            "MARLAAS_ENGINE_KV_TOKENS": str(jobs * PROMPTS * GROUP_SIZE * 256),
        },
        by_stage=one_core_each,
        include={"rollout": ["bench.forced"]},
    )


def our_rate(owner: Tenant, jobs: int, rounds: int) -> float:
    """Rounds an hour of all jobs, from the first opening to the last commit."""
    job_ids = [service.submit(owner, {**job_document(f"job-{n}", 0, rounds, TOKENS), "seed": n}) for n in range(jobs)]
    service.wait_for(job_ids, JOB_SECONDS)
    with transaction() as session:
        found = session.scalars(select(Round).where(Round.job_id.in_(job_ids))).all()
    ends = [r.finished_at for r in found if r.finished_at is not None]
    return 3600 * len(ends) / (max(ends) - min(r.created_at for r in found)).total_seconds()


def run(state_dir: Path, peer: Peer, python: Path, jobs: int, size: Size) -> dict[str, Any]:
    model = get_settings().models_path.resolve() / files.folder_name(files.DEFAULT_MODEL)
    ours, theirs = [], []
    with (
        service.running_workers(workers(jobs), state_dir),
        running_skyrl(peer, python, model, jobs, state_dir) as skyrl,
    ):
        owner = service.tenant()
        our_rate(owner, jobs, 1)
        skyrl.ask(jobs=jobs, steps=1)
        for turn in range(size.turns):
            ours.append(our_rate(owner, jobs, size.ours))
            theirs.append(3600 * jobs * size.steps / skyrl.ask(jobs=jobs, steps=size.steps)["seconds"])
            rates = f"ours {ours[-1]:.0f}, {peer.name} {theirs[-1]:.0f} steps/h"
            console.print(f"[dim]{jobs} jobs, {turn + 1}/{size.turns}: {rates}[/]")
    return {
        "jobs": jobs,
        "peer": peer.name,
        "ours": ours,
        "skyrl": theirs,
        "limit": 3600 / limit(model, shots=0, tokens=TOKENS),  # both cores busy all the time
    }


def main(state_dir: Path, full: bool, size: Size) -> None:
    python = skyrl_python()
    if python is None:
        console.print("[yellow]no SkyRL here: docs/benchmarks.md says how its environment is made[/]")
        return
    machine()
    rows = [run(state_dir, FIXED, python, jobs, size) for jobs in JOBS]
    if full:
        rows += [run(state_dir, AS_IT_COMES, python, jobs, size) for jobs in JOBS]
    report(size, rows)


def report(size: Size, rows: list[dict[str, Any]]) -> None:
    shown = table(
        f"Steps an hour in all: {PROMPTS} prompts × {GROUP_SIZE} episodes × {TOKENS} forced tokens, LoRA rank {RANK}",
        "jobs at once",
        "ours",
        "peer",
        "its steps an hour",
        "ratio",
        "limit",
        "ours of it",
    )
    for row in rows:
        ours, theirs = Spread.of(row["ours"]), Spread.of(row["skyrl"])
        row["ratio"] = ours.median / theirs.median
        share = ours.median / row["limit"]
        figures = (f"{row['ratio']:.1f}", f"{row['limit']:.0f}", f"{share:.0%}")
        shown.add_row(str(row["jobs"]), str(ours), row["peer"], str(theirs), *figures)
    console.print(shown)
    targets = {"skyrl": next(row["ratio"] for row in rows if row["jobs"] == max(JOBS))}
    console.print(TARGETS["skyrl"].line(targets["skyrl"]))
    save("skyrl", {"size": asdict(size), "rows": rows, "targets": targets})
