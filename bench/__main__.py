"""`python -m bench [NAME ...]`: all benchmarks where none is named; see docs/benchmarks.md."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from app import base_models as files
from app.settings import get_settings
from bench import api, mixed, overhead, plots, rollout, roofline, rounds, skyrl, streamed, summary, training
from bench.report import RESULTS, RESULTS_VARIABLE, console
from bench.service import running_stack

ALONE = ("roofline", "rollout", "training")  # parts of the system, without its servers
WITH_SERVERS = ("round", "skyrl", "jobs", "streamed", "overhead", "api")
BENCHMARKS = (*ALONE, *WITH_SERVERS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=", ".join(BENCHMARKS))
    parser.add_argument("--full", action="store_true", help="rollout, training, skyrl: all sizes, which takes hours")
    parser.add_argument("--tiny", action="store_true", help="rollout, training: only to see that they run")
    parser.add_argument("--turns", type=int, default=3, help="round: how often the two sides alternate")
    parser.add_argument("--steps", type=int, default=6, help="jobs: training steps a job")
    parser.add_argument("--prompts", type=int, default=2, help="jobs: prompts a round")
    parser.add_argument("--group", type=int, default=4, help="jobs: episodes a prompt")
    parser.add_argument("--rounds", type=int, default=10, help="overhead: rounds that are measured")
    parser.add_argument("--clients", type=int, default=50, help="api: clients at once")
    parser.add_argument("--seconds", type=float, default=45, help="api: length of one window, with or without clients")
    options = parser.parse_args()
    if unknown := set(options.benchmarks) - set(BENCHMARKS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    wanted = options.benchmarks or BENCHMARKS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers' directory is removed then as well
    model = files.pull(files.DEFAULT_MODEL, get_settings().models_path.resolve())
    if options.tiny:  # beside the figures of real runs, not over them
        os.environ.setdefault(RESULTS_VARIABLE, str(RESULTS / "tiny"))
    size = "tiny" if options.tiny else "full" if options.full else "quick"
    run(wanted, roofline=lambda: roofline.main(model))
    run(wanted, rollout=lambda: rollout.main(model, rollout.SIZES[size]))
    run(wanted, training=lambda: training.main(model, training.SHAPES[size]))
    if not set(WITH_SERVERS).isdisjoint(wanted):
        with running_stack() as state_dir:
            console.print(f"[dim]the servers' and workers' logs are in {state_dir} while this runs[/]")
            run(wanted, round=lambda: rounds.main(state_dir, options.turns))
            run(wanted, skyrl=lambda: skyrl.main(state_dir, options.full, skyrl.Size()))
            run(wanted, jobs=lambda: mixed.main(state_dir, mixed.Size(options.steps, options.prompts, options.group)))
            run(wanted, streamed=lambda: streamed.main(state_dir, streamed.Size()))
            run(wanted, overhead=lambda: overhead.main(state_dir, options.rounds))
            run(wanted, api=lambda: api.main(state_dir, options.clients, options.seconds))
    plots.main()
    summary.main()


def run(wanted: Sequence[str], **benchmark: Callable[[], None]) -> None:
    """Runs one benchmark, if it is wanted, and tells how long it took."""
    [(name, work)] = benchmark.items()
    if name in wanted:
        started = time.monotonic()
        work()
        console.print(f"[dim]{name}: {time.monotonic() - started:.0f} s[/]\n")


if __name__ == "__main__":
    main()
