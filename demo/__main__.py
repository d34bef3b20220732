"""`python -m demo`: measures the untrained model, trains, measures again, reports, stops everything."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.live import Live
from sqlalchemy import select

from app import base_models
from app.cli.output import duration, out, say
from app.cli.watch import follow, progress_table
from app.db import transaction
from app.embedded import processes
from app.errors import InfrastructureFault, MarlaasError, NotFound
from app.log import configure_logging
from app.manager import adapters, jobs, tenants
from app.manager.progress import JobProgress
from app.models import Job, Tenant
from app.models.job import LIVE
from app.settings import DEFAULT_STATE_DIR, get_settings
from app.specs.job import JobSpec
from app.up import PASSWORD_FILE, prepare, running_stack
from demo.fleet import Fleet
from demo.report import HeldOut, Report, make_report, show

JOBS = Path(__file__).with_name("jobs")
WHO_TRAINS_WHAT = (("acme", "reverse-words"), ("acme", "calculator"), ("globex", "needle"))
OUTPUT = Path("demo-output")
WORKER_SETTINGS = {
    "MARLAAS_LOG_LEVEL": "INFO",
    "MARLAAS_ENGINE_SLOTS": "32",
    "MARLAAS_ENGINE_KV_TOKENS": str(32 * 1024),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description="Two tenants train three jobs at once.")
    parser.add_argument("--rounds", type=int, help="training rounds of each job; then no rise is asked for")
    parser.add_argument("--state-dir", type=Path, default=DEFAULT_STATE_DIR / "demo")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="report, adapters and logs")
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds must be 1 or more")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C: everything is stopped on the way out
    try:
        report = run(arguments.state_dir.resolve(), arguments.output.resolve(), arguments.rounds)
    except KeyboardInterrupt:
        say("stopped")
        return 130
    except (MarlaasError, TimeoutError) as error:
        say(f"the demo ended early: {error}")
        return 1
    shortcomings = report.shortcomings(rise_wanted=arguments.rounds is None)
    for shortcoming in shortcomings:
        say(f"NOT AS WANTED: {shortcoming}")
    return 1 if shortcomings else 0


def run(state_dir: Path, output: Path, rounds: int | None) -> Report:
    """The whole demo. Whatever it started is stopped when it returns or raises."""
    started = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    # The model is kept where `marlaas up` finds it as well.
    os.environ.setdefault("MARLAAS_MODELS_DIR", str((DEFAULT_STATE_DIR / "models").resolve()))
    os.environ |= {"MARLAAS_STATE_DIR": str(state_dir), "MARLAAS_LOG_LEVEL": "WARNING"}
    get_settings.cache_clear()
    configure_logging("demo")
    specs = {name: load_spec(name, rounds) for _, name in WHO_TRAINS_WHAT}

    say("starting Postgres, Valkey and SeaweedFS")
    with running_stack(state_dir) as stack:
        environment = prepare(stack, base_models.DEFAULT_MODEL)
        model = get_settings().models_path / base_models.folder_name(base_models.DEFAULT_MODEL)
        end_earlier_jobs()
        say("what the untrained model can do, on held-out prompts:")
        before = held_out(model, None, list(specs), output / "held-out-before.log")
        say("starting the workers")
        port = environment["MARLAAS_WEB_PORT"]
        say(f"console: http://127.0.0.1:{port}/console/ as admin, the password is in {state_dir / PASSWORD_FILE}")
        with Fleet(output / "logs", environment | WORKER_SETTINGS) as fleet:
            job_ids = [submit(tenant, specs[name]) for tenant, name in WHO_TRAINS_WHAT]
            watch(fleet, job_ids)
        folders = download(job_ids, output / "adapters")
        say("the same held-out prompts, with the adapters that were downloaded:")
        after = held_out(model, output / "adapters", list(folders), output / "held-out-after.log") if folders else {}
        with transaction() as session:
            report = make_report(session, job_ids, before, after, folders)
    out.print()
    show(report)
    document = report.as_json() | {"rounds": rounds, "demo_seconds": time.monotonic() - started}
    (output / "report.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    say(f"report: {output / 'report.json'}; the whole demo took {duration(document['demo_seconds'])}")
    return report


def load_spec(name: str, rounds: int | None) -> JobSpec:
    document = yaml.safe_load((JOBS / f"{name}.yaml").read_text())
    if rounds is not None:
        document["hyperparameters"]["n_steps"] = rounds
    return jobs.parse_spec(document)


def end_earlier_jobs() -> None:
    """Cancels what an earlier run of the demo left behind when it was stopped."""
    with transaction() as session:
        for job_id in session.scalars(select(Job.id).where(Job.state.in_(LIVE)).order_by(Job.id)).all():
            jobs.cancel(session, job_id)


def submit(tenant_name: str, spec: JobSpec) -> uuid.UUID:
    with transaction() as session:
        tenant: Tenant
        try:
            tenant = tenants.find_tenant(session, tenant_name)
        except NotFound:
            tenant = tenants.create_tenant(session, tenant_name)
        return jobs.submit(session, tenant, spec).id


def watch(fleet: Fleet, job_ids: Sequence[uuid.UUID]) -> None:
    """A live table until all jobs are over; without a terminal, a line for each new version."""
    told: dict[uuid.UUID, tuple[int, str]] = {}
    with Live(console=out, auto_refresh=False) as live:
        for progress in follow(job_ids):
            fleet.check()
            if out.is_terminal:
                live.update(progress_table(progress), refresh=True)
                continue
            for p in progress:
                if told.get(p.job_id) != (p.version, p.state):
                    told[p.job_id] = (p.version, p.state)
                    say(line(p))


def line(p: JobProgress) -> str:
    reward = "" if p.reward_mean is None else f", reward {p.reward_mean:.3f}"
    return f"{duration(p.elapsed_seconds)}: {p.tenant}/{p.name} is {p.state}, version {p.version}/{p.n_steps}{reward}"


def download(job_ids: Sequence[uuid.UUID], to: Path) -> dict[str, Path]:
    """The last adapter of each job that has one, checked against its digest, as a PEFT folder; by job name."""
    folders = {}
    with transaction() as session:
        trained = [job for job in session.scalars(select(Job).where(Job.id.in_(job_ids))).all() if job.version]
    for job in trained:
        folders[job.name] = to / job.name
        adapters.download(job.id, None, folders[job.name], force=True)
    return folders


def held_out(model: Path, adapter_folder: Path | None, names: Sequence[str], log: Path) -> dict[str, HeldOut]:
    """Held-out pass rates by job name, told as they come. Raises InfrastructureFault when the process fails."""
    command = [sys.executable, "-m", "demo.held_out", "--model", str(model)]
    if adapter_folder is not None:
        command += ["--adapters", str(adapter_folder)]
    command += [str(JOBS / f"{name}.yaml") for name in names]
    results: dict[str, HeldOut] = {}
    with log.open("wb") as errors:
        # In a session of its own: Ctrl-C reaches it through this process only.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        try:
            assert process.stdout is not None
            for text in process.stdout:
                result: HeldOut = json.loads(text)
                results[result["job"]] = result
                say(f"  {result['job']:15} pass rate {result['pass_rate']:.3f} of {result['episodes']} episodes")
            status = process.wait()
        finally:
            processes.stop(process, signal.SIGTERM, timeout=5)
    if status:
        raise InfrastructureFault(f"held-out evaluation ended with status {status}:\n{processes.log_tail(log)}")
    return results


if __name__ == "__main__":
    sys.exit(main())
