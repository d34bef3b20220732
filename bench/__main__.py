"""`python -m bench [round] [jobs] [overhead] [api]`: all of them where none is named."""

from __future__ import annotations

import argparse
import signal
import sys

from bench import api, mixed, overhead, rounds
from bench.report import console
from bench.service import running_stack

BENCHMARKS = ("round", "jobs", "overhead", "api")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=", ".join(BENCHMARKS))
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
    with running_stack() as state_dir:
        console.print(f"[dim]the servers' and workers' logs are in {state_dir} while this runs[/]")
        if "round" in wanted:
            rounds.main(state_dir, options.turns)
        if "jobs" in wanted:
            mixed.main(state_dir, mixed.Size(options.steps, options.prompts, options.group))
        if "overhead" in wanted:
            overhead.main(state_dir, options.rounds)
        if "api" in wanted:
            api.main(state_dir, options.clients, options.seconds)


if __name__ == "__main__":
    main()
