"""`marlaas job …`: create, look at, steer."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.text import Text
from sqlalchemy.orm import Session

from app.cli.adapters import JobName, find
from app.cli.output import (
    EXIT_NOT_SUCCEEDED,
    Cell,
    JsonFlag,
    MaybeTenant,
    TenantName,
    Version,
    ago,
    columns,
    duration,
    err,
    out,
    plain,
    print_json,
    safe,
    say,
    short,
    show,
)
from app.cli.watch import CELLS as PROGRESS_CELLS
from app.cli.watch import watch as watch_jobs
from app.db import transaction
from app.errors import InvalidRequest
from app.manager import events, jobs, tenants
from app.manager.metrics import step_metrics
from app.manager.progress import job_progress
from app.manager.trajectories import GroupView, RoundView, trajectories
from app.models import Event, Job
from app.models.job import JobState
from app.models.round import RoundKind
from app.specs.job import JobSpec

app = typer.Typer(no_args_is_help=True, help="Jobs: create, watch, steer, read.")

JobNames = Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids, starts of ids, or names.")]
LEVELS = {"warn": "yellow", "error": "red"}


# --- create


@app.command()
def create(
    file: Annotated[str, typer.Option("--file", "-f", help="YAML or JSON; - reads standard input.")],
    tenant: TenantName,
    changes: Annotated[
        list[str], typer.Option("--set", metavar="FIELD=VALUE", help="e.g. hyperparameters.n_steps=3; may be repeated.")
    ] = [],  # noqa: B006
    submit_key: Annotated[
        str | None, typer.Option("--submit-key", help="A second submit with this key finds the first job.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Then watch it to its end.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Creates a job from a file."""
    document = read_document(file)
    for change in changes:
        set_field(document, change)
    with transaction() as session:
        job = jobs.submit(
            session, tenants.find_tenant(session, tenant), jobs.parse_spec(document), submit_key=submit_key
        )
    if watch:
        _watch([job.id], as_json)
        return
    _tell([job.id], "created", as_json)


def read_document(file: str) -> dict[str, Any]:
    """A job's document from a path or standard input. Raises InvalidRequest with the place of what cannot be read."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}", param="file") from error
    try:
        document = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise InvalidRequest(f"{file} is not YAML or JSON: {' '.join(str(error).split())}", param="file") from error
    if not isinstance(document, dict):
        raise InvalidRequest(f"{file} must hold the fields of a job: name, base_model, environment, …", param="file")
    return document


def set_field(document: dict[str, Any], change: str) -> None:
    """Sets `a.b.c=value` in a document; the value is read as YAML."""
    path, equals, value = change.partition("=")
    *above, last = path.strip().split(".")
    if not equals or not last:
        raise InvalidRequest(f"--set takes FIELD=VALUE, as in hyperparameters.n_steps=3, not {change!r}", param="set")
    here: Any = document
    for part in above:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise InvalidRequest(f"--set {path}: {part} holds a value, not fields", param="set")
    try:
        here[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InvalidRequest(f"--set {path}: {value!r} is not a YAML value", param="set") from error


# --- look


@app.command("list")
def list_(
    tenant: MaybeTenant = None,
    states: Annotated[list[JobState], typer.Option("--state", help="Only these; may be repeated.")] = [],  # noqa: B006
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 50,
    as_json: JsonFlag = False,
) -> None:
    """Shows jobs, the newest last."""
    with transaction() as session:
        owner = tenants.find_tenant(session, tenant) if tenant else None
        found = jobs.list_jobs(session, owner, [s.value for s in states], limit)
        progress = job_progress(session, [job.id for job in found])
    show(progress, PROGRESS_CELLS, as_json, empty="no jobs; marlaas job create -f job.yaml --tenant NAME")


@app.command("show")
def show_(job: JobName, tenant: MaybeTenant = None, as_json: JsonFlag = False) -> None:
    """Shows all about a job: progress, what went wrong, its document."""
    found = find(job, tenant)
    with transaction() as session:
        (progress,) = job_progress(session, [found.id])
    times = columns(found, "created_at", "started_at", "first_step_at", "finished_at")
    if as_json:
        print_json(plain(progress) | times | {"base_model": found.base_model, "spec": found.spec})
        return
    facts = {
        "job": f"{progress.name} ({progress.job_id}) of {progress.tenant}",
        "state": f"{progress.state}, {progress.phase}" if progress.state == "running" else progress.state,
        "error": progress.error,
        "version": f"{progress.version} of {progress.n_steps}",
        "reward": progress.reward_mean,
        "created": ago(found.created_at),
        "first step": duration(progress.first_step_seconds),
        "time": duration(progress.elapsed_seconds),
        "left": duration(progress.eta_seconds),
    }
    for name, value in facts.items():
        if value is not None:
            say(f"{name:<11} {value}")
    spec = JobSpec.model_validate(found.spec).model_dump(mode="json")  # in the order of its definition
    say("\n" + yaml.safe_dump(spec, sort_keys=False, allow_unicode=True))


@app.command("events")
def events_(
    job: JobName,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="The last so many.")] = 100,
    tenant: MaybeTenant = None,
    as_json: JsonFlag = False,
) -> None:
    """Shows what happened to a job."""
    with transaction() as session:
        rows = events.latest(session, find(job, tenant), limit)
    cells: dict[str, Cell] = {
        "TIME": lambda e: f"{e.created_at.astimezone():%Y-%m-%d %H:%M:%S}",
        "LEVEL": lambda e: Text(e.level, style=LEVELS.get(e.level, "dim")),
        "CODE": lambda e: e.code,
        "WHAT": lambda e: e.message,
    }
    show(rows, cells, as_json, empty="no events", data=[_event(e) for e in rows])


def _event(event: Event) -> dict[str, Any]:
    return columns(event, "id", "created_at", "level", "code", "message", "data")


@app.command()
def metrics(job: JobName, tenant: MaybeTenant = None, as_json: JsonFlag = False) -> None:
    """Shows what each update measured."""
    with transaction() as session:
        rows = step_metrics(session, find(job, tenant))

    def of(name: str) -> Cell:
        return lambda row: row.metrics.get(name)

    cells: dict[str, Cell] = {
        "VERSION": lambda row: row.version,
        "REWARD": of("reward_mean"),
        "STD": of("reward_std"),
        "LENGTH": of("response_length"),
        "NO SIGNAL": of("zero_variance_share"),
        "TRUNCATED": of("truncated_share"),
        "LOSS": of("loss"),
        "GRAD NORM": of("grad_norm"),
        "ENTROPY": of("entropy"),
        "GAP": of("logprob_gap"),
        "SECONDS": of("seconds"),
    }
    data = [columns(row, "version", "created_at") | row.metrics for row in rows]
    show(rows, cells, as_json, empty="no update yet", data=data)


@app.command("trajectories")
def trajectories_(
    job: JobName,
    version: Version = None,
    kind: Annotated[RoundKind, typer.Option(help="Which rounds.")] = RoundKind.TRAIN,
    offset: Annotated[int, typer.Option(min=0, help="Prompts to leave out.")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=256, help="Prompts to show.")] = 4,
    tenant: MaybeTenant = None,
    as_json: JsonFlag = False,
) -> None:
    """Shows prompts, what was said and the rewards of a round, some prompts at a time."""
    with transaction() as session:
        found = trajectories(session, find(job, tenant), version=version, kind=kind, offset=offset, limit=limit)
    if as_json:
        print_json(found)
        return
    _print_round(found)


def _print_round(round_: RoundView) -> None:
    out.print(Text(f"{round_.kind} round of version {round_.version}, {round_.state}", style="bold"))
    for group in round_.groups:
        _print_group(group)
    after = round_.offset + len(round_.groups)
    if after < round_.groups_total:
        out.print(Text(f"prompts {round_.offset} to {after - 1} of {round_.groups_total}; --offset {after}", "dim"))


def _print_group(group: GroupView) -> None:
    out.print()
    out.rule(Text(f"prompt {group.index}", style="bold"), align="left")
    for message in group.messages or []:
        _print_message(message, "dim")
    for e in group.episodes:
        words = [f"reward {e.reward:g}" if e.reward is not None else e.state]
        words += ["truncated"] * e.truncated + e.flags + ([e.error_code] if e.error_code else [])
        style = "green" if e.passed else "yellow" if e.reward is not None else "red"
        out.print(Text(f"  episode {e.index}: {', '.join(words)}", style=style))
        for turn in e.turns:
            for message in turn.messages:
                _print_message(message, "" if turn.kind == "policy" else "magenta")
        if not e.turns and e.reward is not None:
            out.print(Text("    its turns were removed by retention", style="dim"))


def _print_message(message: dict[str, Any], style: str) -> None:
    out.print(Text(f"    {message['role']}: {safe(str(message['content']))}", style=style), soft_wrap=True)


# --- steer


@app.command()
def watch(
    names: Annotated[list[str] | None, typer.Argument(metavar="[JOB...]", help="Default: all live jobs.")] = None,
    tenant: MaybeTenant = None,
    as_json: JsonFlag = False,
) -> None:
    """Follows jobs until they are over. Status 0 if all succeeded, 1 otherwise."""
    if names:
        ids = [find(name, tenant).id for name in names]
    else:
        with transaction() as session:
            ids = [p.job_id for p in job_progress(session) if tenant in (None, p.tenant)]
    if not ids:
        say("no live jobs")
        return
    _watch(ids, as_json)


def _watch(ids: Sequence[uuid.UUID], as_json: bool) -> None:
    failed = [p for p in watch_jobs(ids, as_json) if p.state != JobState.SUCCEEDED]
    for p in failed:
        reason = f": {safe(p.error)}" if p.error else ""
        err.print(Text(f"job {p.name} ({short(p.job_id)}) {p.state}{reason}", style="red"), soft_wrap=True)
    if failed:
        raise typer.Exit(EXIT_NOT_SUCCEEDED)


@app.command()
def cancel(names: JobNames, tenant: MaybeTenant = None, as_json: JsonFlag = False) -> None:
    """Ends jobs now. What they have committed stays."""
    _steer(jobs.cancel, "cancelled", names, tenant, as_json)


@app.command()
def pause(names: JobNames, tenant: MaybeTenant = None, as_json: JsonFlag = False) -> None:
    """Lets what has started finish, and begins nothing more."""
    _steer(jobs.pause, "pausing", names, tenant, as_json)


@app.command()
def resume(names: JobNames, tenant: MaybeTenant = None, as_json: JsonFlag = False) -> None:
    """Goes on where a paused job stopped."""
    _steer(jobs.resume, "resumed", names, tenant, as_json)


def _steer(
    act: Callable[[Session, uuid.UUID], Job], word: str, names: list[str], tenant: str | None, as_json: bool
) -> None:
    """All of the jobs or, where one cannot be, none."""
    ids = sorted({find(name, tenant).id for name in names})
    with transaction() as session:
        for job_id in ids:
            act(session, job_id)
    _tell(ids, word, as_json)


def _tell(ids: Sequence[uuid.UUID], word: str, as_json: bool) -> None:
    """What was done, in words or as the jobs' progress: an object for one job, an array for more."""
    with transaction() as session:
        progress = job_progress(session, ids)
    if as_json:
        print_json(progress[0] if len(progress) == 1 else progress)
        return
    for p in progress:
        say(f"{word} job {p.name} ({short(p.job_id)}), at version {p.version} of {p.n_steps}")
