"""Training over two processes that share one model: the same bits as one alone, and an end with the first that dies."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

from workers.runtime import EXIT_STUCK


@dataclass
class RankZero:
    found: dict
    exit_code: int
    log: str
    other_pid: int


@pytest.fixture(scope="module")
def rank_zero(tmp_path_factory):
    """A process and what it found; then its other rank was killed in the middle of an update."""
    folder = tmp_path_factory.mktemp("ranks")
    with open(folder / "log", "w+") as log:
        command = [sys.executable, "-m", "tests.rank_zero", str(folder / "base")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        with process:
            try:
                lines = []
                for line in process.stdout:
                    lines.append(line)
                    if line.strip().isdigit():
                        os.kill(int(line), signal.SIGKILL)
            finally:
                process.kill()
        log.seek(0)
        output = "".join(lines) + log.read()
    assert any(line.startswith("{") for line in lines), output
    found = next(json.loads(line) for line in lines if line.startswith("{"))
    return RankZero(found, process.returncode, output, int(next(line for line in lines if line.strip().isdigit())))


def test_an_update_over_two_ranks_is_bit_identical_to_one_alone(rank_zero):
    """Odd and even numbers of micro-batches, empty groups, groups without signal, with KL, in one step and two."""
    assert rank_zero.found["differ"] == []


def test_each_rank_holds_half_of_the_layers(rank_zero):
    half = rank_zero.found["all layer bytes"] / 2
    assert rank_zero.found["layer bytes"] == [half, half]
    assert rank_zero.found["layer bytes after it"] == half


def test_a_loss_of_another_rank_that_is_not_finite_is_named_and_the_ranks_stay_in_step(rank_zero):
    assert rank_zero.found["not finite"] == rank_zero.found["not finite alone"] == "the loss is nan"


def test_the_worker_ends_when_a_rank_does(rank_zero):
    assert rank_zero.exit_code == EXIT_STUCK
    assert "rank_ended" in rank_zero.log or "ranks_out_of_step" in rank_zero.log
