"""The live view of jobs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence

from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.cli.output import Cell, duration, out, print_json, short, table
from app.db import transaction
from app.manager.progress import JobProgress, Phase, job_progress

POLL_SECONDS = 0.5

STYLES = {
    Phase.ROLLOUT: "cyan",
    Phase.ENVIRONMENT: "magenta",
    Phase.BUFFERED: "yellow",
    Phase.TRAINING: "blue",
    Phase.EVALUATING: "cyan",
    Phase.SUCCEEDED: "green",
    Phase.FAILED: "red",
    Phase.CANCELLED: "red",
}


def _phase(p: JobProgress) -> Text:
    pausing = " (pausing)" if p.wanted == "pause" and p.state == "running" else ""
    return Text(p.phase + pausing, style=STYLES.get(Phase(p.phase), "dim"))


def _episodes(p: JobProgress) -> str | None:
    return f"{p.episodes_done}/{p.episodes_total}" if p.episodes_total else None


CELLS: dict[str, Cell] = {
    "ID": lambda p: short(p.job_id),
    "TENANT": lambda p: p.tenant,
    "JOB": lambda p: p.name,
    "PHASE": _phase,
    "VERSION": lambda p: f"{p.version}/{p.n_steps}",
    "REWARD": lambda p: None if p.reward_mean is None else f"{p.reward_mean:.3f}",
    "EPISODES": _episodes,
    "TOKENS/S": lambda p: None if p.over else f"{p.tokens_per_second:.0f}",
    "PLACE": lambda p: p.queue_place,
    "TIME": lambda p: duration(p.elapsed_seconds),
    "LEFT": lambda p: duration(p.eta_seconds),
}


WIDE_COLUMNS = 110  # of a terminal that shows all cells
WIDE_ONLY = ("ID", "EPISODES", "TIME", "LEFT")


def progress_table(progress: Sequence[JobProgress]) -> Table:
    """One line a job: phase, version, last reward, episodes of the live round, tokens/s, place in the queue.

    A narrow terminal goes without the cells that can be done without, rather than with words cut into pieces.
    """
    narrow = out.width < WIDE_COLUMNS
    return table(progress, {heading: cell for heading, cell in CELLS.items() if not (narrow and heading in WIDE_ONLY)})


def follow(job_ids: Sequence[uuid.UUID]) -> Iterator[list[JobProgress]]:
    """The progress of these jobs every POLL_SECONDS, the last time when all of them are over."""
    while True:
        with transaction() as session:
            progress = job_progress(session, job_ids)
        yield progress
        if all(p.over for p in progress):
            return
        time.sleep(POLL_SECONDS)


def watch(job_ids: Sequence[uuid.UUID], as_json: bool) -> list[JobProgress]:
    """Shows jobs until they are over: a live table, or a line of JSON at each change of state, phase or version."""
    progress: list[JobProgress] = []
    if as_json:
        told: dict[uuid.UUID, tuple[str, str, int]] = {}
        for progress in follow(job_ids):
            for p in progress:
                if told.get(p.job_id) != (p.state, p.phase, p.version):
                    told[p.job_id] = (p.state, p.phase, p.version)
                    print_json(p, indent=None)
        return progress
    with Live(console=out, auto_refresh=False) as live:
        for progress in follow(job_ids):
            live.update(progress_table(progress), refresh=True)
    return progress
