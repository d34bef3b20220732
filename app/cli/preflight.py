"""`marlaas job preflight`: what a job would meet with and cost, before it is created."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.live import Live
from rich.text import Text

from app.cli.jobs import read_document, set_field
from app.cli.output import (
    EXIT_NOT_SUCCEEDED,
    JsonFlag,
    TenantName,
    columns,
    duration,
    err,
    out,
    plain,
    print_json,
    safe,
    say,
    table,
)
from app.cli.watch import CELLS, follow
from app.db import transaction
from app.manager import jobs, preflight, tenants
from app.manager.preflight import Prediction, PreflightReport, Sample
from app.models import Job
from app.models.job import JobState

PROGRESS = {name: CELLS[name] for name in ("JOB", "PHASE", "EPISODES", "TOKENS/S", "TIME")}
GOOD = "good"


def check(
    file: Annotated[str, typer.Option("--file", "-f", help="YAML or JSON, as for create; - reads standard input.")],
    tenant: TenantName,
    changes: Annotated[
        list[str], typer.Option("--set", metavar="FIELD=VALUE", help="e.g. sampling.max_tokens=64; may be repeated.")
    ] = [],  # noqa: B006
    prompts: Annotated[
        int | None, typer.Option(min=1, max=64, help="Default: the file's preflight.prompts, 8.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=2, max=32, help="Answers to a prompt; default: the file's preflight.samples, 4.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Samples a few prompts with the base model and reports what a job would learn and cost. Status 0: good."""
    document = read_document(file)
    for change in changes:
        set_field(document, change)
    with transaction() as session:
        owner = tenants.find_tenant(session, tenant)
        job = preflight.submit(session, owner, jobs.parse_spec(document), prompts, samples)
    try:
        _wait(job, quiet=as_json)
    except KeyboardInterrupt:
        with transaction() as session:
            jobs.cancel(session, job.id)
        raise
    with transaction() as session:
        ended = preflight.find(session, job.tenant_id, job.id)
        report = preflight.report(session, ended)
    if as_json:
        error = columns(ended, "error_code", "error_message") if ended.state == JobState.FAILED else None
        print_json({"id": ended.id, "state": ended.state, "error": error, "report": plain(report)})
    elif report is not None:
        _print(report)
    else:
        reason = f": {ended.error_code}: {ended.error_message}" if ended.error_code else ""
        err.print(Text(safe(f"preflight {ended.state}{reason}"), style="red"), soft_wrap=True)
    if report is None or report.verdict.code != GOOD:
        raise typer.Exit(EXIT_NOT_SUCCEEDED)


def _wait(job: Job, quiet: bool) -> None:
    if quiet:
        for _ in follow([job.id]):
            pass
        return
    with Live(console=out, auto_refresh=False, transient=True) as live:
        for progress in follow([job.id]):
            live.update(table(progress, PROGRESS), refresh=True)


def _print(report: PreflightReport) -> None:
    verdict = report.verdict
    out.print(Text(f"{verdict.code}: {verdict.reason}.", style="bold green" if verdict.code == GOOD else "bold yellow"))
    say(f"{verdict.advice}\n")
    cells: dict[str, Any] = {"FIGURE": lambda row: row[0], "VALUE": lambda row: row[1]}
    out.print(table(_measured(report), cells, title="Measured with the base model"))
    say("")
    out.print(table(_predicted(report.prediction), cells, title="The job, on a service as busy as now"))
    for reason in report.prediction.unknown:
        out.print(Text(f"unknown: {reason}", style="dim"), soft_wrap=True)
    for sample in report.samples:
        _print_sample(sample)


def _measured(report: PreflightReport) -> list[tuple[str, object]]:
    m = report.measured
    rows: list[tuple[str, object]] = [
        ("prompts, episodes", f"{m.prompts}, {m.episodes}"),
        ("pass rate", f"{m.pass_rate:.0%}"),
        ("reward", f"{m.reward_mean:.3f} ± {m.reward_std:.3f}"),
        ("prompts without signal", f"{m.zero_variance_share:.0%}"),
        ("truncated", f"{m.truncated_share:.0%}"),
        ("empty", f"{m.empty_share:.0%}"),
        ("tokens of a prompt", round(m.prompt_tokens, 1)),
        ("tokens generated", round(m.generated_tokens, 1)),
        ("tokens/s", None if m.tokens_per_second is None else round(m.tokens_per_second)),
    ]
    rows += [(f"flag {code}", count) for code, count in m.flags.items()]
    rows += [(f"dropped: {code}", count) for code, count in m.dropped.items()]
    return rows


def _predicted(p: Prediction) -> list[tuple[str, object]]:
    return [
        ("steps", p.steps),
        ("rollout of a step", _seconds(p.rollout_seconds)),
        ("environment of a step", _seconds(p.environment_seconds)),
        ("training of a step", _seconds(p.training_seconds)),
        ("commit of a step", _seconds(p.commit_seconds)),
        ("time in all", duration(p.total_seconds)),
        ("prompt tokens", f"{p.cost.prompt_tokens:,}"),
        ("generated tokens", f"{p.cost.generated_tokens:,}"),
        ("trained tokens", f"{p.cost.trained_tokens:,}"),
        ("busy time", duration(p.cost.busy_seconds)),
    ]


def _seconds(seconds: float | None) -> str | None:
    return duration(seconds) if seconds is None or seconds >= 60 else f"{seconds:.2f}s"


def _print_sample(sample: Sample) -> None:
    e = sample.episode
    out.print()
    words = [f"prompt {sample.prompt_index}", f"reward {e.reward:g}", *["truncated"] * e.truncated, *e.flags]
    out.rule(Text(", ".join(words), style="green" if e.passed else "yellow"), align="left")
    said = [(m, "dim") for m in (sample.prompt or [])[-1:]]
    said += [(m, "" if turn.kind == "policy" else "magenta") for turn in e.turns for m in turn.messages]
    for message, style in said:
        out.print(Text(f"    {message['role']}: {safe(str(message['content']))}", style=style), soft_wrap=True)
