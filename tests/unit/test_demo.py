"""The figures of the demo's report, and its job files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.manager.jobs import parse_spec
from app.specs.job import JobSpec
from demo.__main__ import WHO_TRAINS_WHAT, load_spec
from demo.figures import common, length, overlap_share, plot, union
from demo.report import JobReport, Report

STRETCHES = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda s: (float(s[0]), float(s[0] + s[1]))), max_size=8
)


def seconds_covered(stretches: list[tuple[float, float]]) -> set[int]:
    return {second for start, end in stretches for second in range(int(start), int(end))}


def test_union_merges_what_touches_and_overlaps() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


@given(STRETCHES, STRETCHES)
def test_lengths_count_each_second_once(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> None:
    assert length(some) == len(seconds_covered(some))
    assert common(some, others) == len(seconds_covered(some) & seconds_covered(others))


def test_overlap_is_with_other_jobs_only() -> None:
    training = {"a": [(0.0, 10.0)], "b": [(10.0, 20.0)]}
    assert overlap_share(training, {"a": [(0.0, 10.0)]}) == 0.0  # its own
    assert overlap_share(training, {"b": [(5.0, 20.0)]}) == 0.25
    assert overlap_share(training, {"a": [(12.0, 14.0)], "b": [(0.0, 4.0)], "c": [(2.0, 6.0)]}) == 0.4


def test_overlap_without_training_is_zero() -> None:
    assert overlap_share({}, {"a": [(0.0, 1.0)]}) == 0.0


def test_plot_draws_one_bar_a_value_and_clamps() -> None:
    assert plot([0.0, 0.5, 1.0, 7.0, -1.0]) == "▁▅██▁"


@pytest.mark.parametrize("name", [name for _, name in WHO_TRAINS_WHAT])
def test_job_files_are_valid_and_take_rounds(name: str) -> None:
    spec = load_spec(name, rounds=2)
    assert spec.name == name
    assert spec.hyperparameters.n_steps == 2
    assert parse_spec(spec.model_dump()) == spec == JobSpec.model_validate(spec.model_dump())


def report_of(state: str, before: float, after: float | None) -> Report:
    held_out = None if after is None else {"pass_rate": after, "prompts": 64}
    job = JobReport(
        "acme", "job", state, None, 1, [0.5], 1.0, 1.0, {"pass_rate": before, "prompts": 64}, held_out, None
    )
    return Report([job], 1.0, 1.0, 0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("state", "before", "after", "rise_wanted", "shortcomings"),
    [
        ("succeeded", 0.25, 0.5, True, 0),
        ("succeeded", 0.25, 0.375, True, 1),
        ("succeeded", 0.25, 0.375, False, 0),
        ("failed", 0.25, 0.5, True, 1),
        ("failed", 0.25, None, False, 1),
    ],
)
def test_success_asks_for_every_job_and_its_rise(
    state: str, before: float, after: float | None, rise_wanted: bool, shortcomings: int
) -> None:
    assert len(report_of(state, before, after).shortcomings(rise_wanted)) == shortcomings
