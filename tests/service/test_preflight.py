"""Preflights, worked by hand: one round that never trains, what it says of a job, and what must not come of it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from sqlalchemy import func, select
from typer.testing import CliRunner, Result

from app import broker
from app.cli import app
from app.cli import preflight as app_preflight
from app.cli.output import plain
from app.db import transaction
from app.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from app.manager import episodes, jobs, preflight, recovery, retention
from app.manager.preflight import Measured, Prediction, judge, predict
from app.manager.progress import job_progress
from app.models import Job, PolicyVersion, Round, StoredObject, Tenant, UsageEntry
from app.models.round import EpisodeState, RoundKind, RoundState
from tests import by_hand
from tests.by_hand import ids
from tests.preflights import SMALL, answer, finish, report_of, rounds_of, start, submit, to_acting
from tests.service.conftest import Bells

GENERATING, ACTING = EpisodeState.GENERATING, EpisodeState.ACTING


# --- life


def test_a_preflight_is_one_round_of_its_own_kind_with_the_base_model(tenant: Tenant) -> None:
    job_id = start(tenant)
    (round_,) = rounds_of(job_id)
    assert (round_.kind, round_.policy_version, round_.open_episodes, round_.cursor) == ("preflight", 0, 4, 0)


def test_its_prompts_are_of_the_train_split(tenant: Tenant) -> None:
    (round_,) = rounds_of(start(tenant))
    by_hand.to_state(round_.id, GENERATING)
    claims = by_hand.claim(ids(by_hand.episodes_of(round_.id)), GENERATING)
    assert {c.round.split for c in claims} == {"train"}


def test_its_seeds_are_not_those_of_the_job(tenant: Tenant) -> None:
    (round_,) = rounds_of(start(tenant))
    trained = by_hand.live_round(by_hand.start_job(tenant))
    seeds = [{e.seed for e in by_hand.episodes_of(r.id)} for r in (round_, trained)]
    assert not seeds[0] & seeds[1]


def test_it_succeeds_when_its_round_is_closed_and_trains_nothing(tenant: Tenant, bells: Bells) -> None:
    job_id = start(tenant)
    finish(job_id)
    assert by_hand.job(job_id).state == "succeeded"
    assert [(r.kind, r.state) for r in rounds_of(job_id)] == [("preflight", "committed")]
    assert [v.version for v in by_hand.versions(job_id)] == [0]
    assert not bells.of(broker.TRAIN)
    assert by_hand.claim_training() is None


def test_evaluations_are_not_a_part_of_it(tenant: Tenant) -> None:
    job_id = start(tenant, evaluation={"every": 1})
    assert [r.kind for r in rounds_of(job_id)] == ["preflight"]


def test_what_it_generates_is_charged(tenant: Tenant) -> None:
    job_id = start(tenant)
    finish(job_id)
    with transaction() as session:
        tokens = session.scalar(select(func.sum(UsageEntry.generated_tokens)).where(UsageEntry.job_id == job_id))
    assert tokens == 4 * len(by_hand.GENERATED)


def test_numbers_may_be_given_beside_the_document(tenant: Tenant) -> None:
    spec = jobs.parse_spec(by_hand.document())
    with transaction() as session:
        job = preflight.submit(session, tenant, spec, prompts=3, samples=5)
        assert job.spec["preflight"] == {"prompts": 3, "samples": 5}


@pytest.mark.parametrize(("field", "number"), [("prompts", 0), ("prompts", 65), ("samples", 1), ("samples", 33)])
def test_numbers_out_of_bounds_are_refused_by_name(tenant: Tenant, field: str, number: int) -> None:
    spec = jobs.parse_spec(by_hand.document())
    with transaction() as session, pytest.raises(InvalidRequest) as refused:
        preflight.submit(session, tenant, spec, **{field: number})
    assert refused.value.param == f"preflight.{field}"


def test_what_no_job_could_be_is_refused_as_for_a_job(tenant: Tenant) -> None:
    with pytest.raises(InvalidRequest, match="max_turns"):
        submit(tenant, environment={"type": "calculator", "max_turns": 1})


# --- quotas


def test_it_starts_although_all_places_of_running_jobs_are_taken(hand: None) -> None:
    tenant = by_hand.make_tenant("full", max_running_jobs=1)
    by_hand.start_job(tenant)
    assert by_hand.job(start(tenant)).state == "running"


def test_it_takes_no_place_of_a_running_job(hand: None) -> None:
    tenant = by_hand.make_tenant("small", max_running_jobs=1)
    start(tenant)
    assert by_hand.job(by_hand.start_job(tenant)).state == "running"


def test_two_may_live_and_another_after_one_has_ended(tenant: Tenant) -> None:
    first, _ = start(tenant), start(tenant)
    with pytest.raises(QuotaExceeded, match="2 preflights are under way"):
        submit(tenant)
    finish(first)
    submit(tenant)


def test_the_preflights_of_others_do_not_count(tenant: Tenant) -> None:
    submit(tenant), submit(tenant)
    submit(by_hand.make_tenant("other"))


def test_two_at_once_do_not_both_take_the_last_place(tenant: Tenant) -> None:
    submit(tenant)
    refused: list[QuotaExceeded] = []

    def second() -> None:
        try:
            submit(tenant)
        except QuotaExceeded as error:
            refused.append(error)

    other = Thread(target=second)
    with transaction() as session:
        preflight.submit(session, tenant, jobs.parse_spec(by_hand.document()))
        other.start()
        by_hand.wait_until_blocked()
    other.join()
    assert len(refused) == 1


# --- nowhere else


def test_lists_of_jobs_do_not_show_it(tenant: Tenant) -> None:
    job_id = start(tenant)
    with transaction() as session:
        assert jobs.list_jobs(session) == []
        assert job_progress(session) == []
        with pytest.raises(NotFound):
            jobs.find_job(session, str(job_id))


def test_a_job_is_no_preflight_nor_is_anothers(tenant: Tenant) -> None:
    other = by_hand.make_tenant("other")
    job_id, theirs = by_hand.submit(tenant), submit(other)
    with transaction() as session:
        for wrong in (job_id, theirs, uuid.uuid4()):
            with pytest.raises(NotFound):
                preflight.find(session, tenant.id, wrong)
        assert preflight.find(session, other.id, theirs).id == theirs


# --- ends


def test_a_cancelled_one_is_over_at_once(tenant: Tenant) -> None:
    job_id = start(tenant)
    found = to_acting(job_id)
    by_hand.cancel(job_id)
    assert by_hand.claim(found, ACTING) == []
    assert by_hand.job(job_id).state == "cancelled"
    with transaction() as session:
        assert preflight.report(session, session.get_one(Job, job_id)) is None
    submit(tenant), submit(tenant)  # its place is free


def test_it_cannot_be_paused(tenant: Tenant) -> None:
    with pytest.raises(Conflict, match="cancel it"):
        by_hand.pause(start(tenant))


def test_an_environment_that_fails_fails_it_by_name(tenant: Tenant) -> None:
    job_id = start(tenant)
    (claim, *_) = by_hand.claim(to_acting(job_id), ACTING, by_hand.TOOLS)
    with transaction() as session:
        episodes.fail_job(session, claim, "environment_error", "the grader raised KeyError: 'answer'")
    job = by_hand.job(job_id)
    assert (job.state, job.error_code) == ("failed", "environment_error")
    assert "KeyError" in (job.error_message or "")


def test_one_that_nobody_works_on_ends_in_time(tenant: Tenant) -> None:
    late, fresh = start(tenant), start(tenant)
    by_hand.execute("UPDATE jobs SET created_at = now() - interval '2 h' WHERE id = :id", id=late)
    recovery.sweep()
    assert (by_hand.job(late).state, by_hand.job(late).error_code) == ("failed", "preflight_timeout")
    assert by_hand.job(fresh).state == "running"


def test_no_other_job_is_late(tenant: Tenant) -> None:
    job_id = by_hand.start_job(tenant)
    by_hand.execute("UPDATE jobs SET created_at = now() - interval '2 h'")
    recovery.sweep()
    assert by_hand.job(job_id).state == "running"


def test_its_adapter_goes_after_its_end_and_a_jobs_stays(tenant: Tenant) -> None:
    job_id, live, trained = start(tenant), start(tenant), by_hand.start_job(tenant)
    finish(job_id)
    with transaction() as session:
        assert retention.expire_preflights(session) == 3
    with transaction() as session:
        rows = session.execute(
            select(PolicyVersion.job_id, StoredObject.state).join(
                StoredObject, StoredObject.id == PolicyVersion.adapter_object_id
            )
        ).all()
    objects = {row.job_id: row.state for row in rows}
    assert objects == {job_id: "expired", live: "live", trained: "live"}


# --- lost messages and dead processes


def test_a_preflight_whose_messages_are_all_lost_is_swept_to_its_end(tenant: Tenant, bells: Bells) -> None:
    job_id = submit(tenant)
    expected = [broker.VALIDATE, broker.START, broker.RESET, broker.GENERATE, broker.STEP]
    rung = []
    for task in expected:
        bells.clear()
        by_hand.make_bells_old()
        recovery.sweep()
        rung += [bells.of(task) != []]
        if task == broker.VALIDATE:
            with transaction() as session:
                jobs.validated(session, job_id)
            by_hand.admit()
        elif task == broker.START:
            by_hand.publish_initial(job_id)
            by_hand.admit()
        elif task == broker.RESET:
            by_hand.reset(rounds_of(job_id)[0].id)
        elif task == broker.GENERATE:
            by_hand.generate(ids(by_hand.episodes_of(rounds_of(job_id)[0].id)))
    assert rung == [True] * 5
    answer(ids(by_hand.episodes_of(rounds_of(job_id)[0].id)), [1, 0, 1, 0])
    assert by_hand.job(job_id).state == "running"
    recovery.sweep()  # the bell for admission was lost
    assert by_hand.job(job_id).state == "succeeded"


def test_episodes_of_a_dead_process_are_taken_over(tenant: Tenant) -> None:
    job_id = start(tenant)
    found = to_acting(job_id)
    by_hand.claim(found, ACTING, by_hand.TOOLS)
    by_hand.expire_leases()
    recovery.sweep()
    answer(found, [1, 0, 1, 0])
    by_hand.admit()
    assert by_hand.job(job_id).state == "succeeded"


def test_a_second_start_changes_nothing(tenant: Tenant) -> None:
    job_id = start(tenant)
    assert not by_hand.publish_initial(job_id)
    recovery.sweep()
    assert len(rounds_of(job_id)) == 1


def test_a_missing_round_is_opened_by_the_sweep(tenant: Tenant) -> None:
    job_id = start(tenant)
    with transaction() as session:
        session.scalars(select(Round).where(Round.job_id == job_id)).one().state = RoundState.ABANDONED
    recovery.sweep()
    assert [r.state for r in rounds_of(job_id)] == ["abandoned", "rolling_out"]


# --- the report


def test_there_is_no_report_before_the_end(tenant: Tenant) -> None:
    job_id = start(tenant)
    to_acting(job_id)
    with transaction() as session:
        assert preflight.report(session, session.get_one(Job, job_id)) is None


def test_figures_are_those_reckoned_by_hand(tenant: Tenant) -> None:
    job_id = start(tenant)
    found = to_acting(job_id)
    answer(found[:2], [1, 0])
    answer(found[2:3], [0], truncated=True, flags=("no_answer",))
    answer(found[3:], [0], flags=("no_answer",))
    m = report_of(job_id).measured
    assert (m.prompts, m.episodes, m.pass_rate, m.reward_mean) == (2, 4, 0.25, 0.25)
    assert m.reward_std == pytest.approx(0.5)  # of 1, 0, 0, 0
    assert m.zero_variance_share == 0.5
    assert (m.truncated_share, m.empty_share) == (0.25, 0.0)
    assert (m.flags, m.dropped) == ({"no_answer": 2}, {})
    assert (m.prompt_tokens, m.generated_tokens) == (len(by_hand.PROMPT), len(by_hand.GENERATED))


def test_turns_of_an_episode_are_counted_together(tenant: Tenant) -> None:
    job_id = start(tenant)
    found = to_acting(job_id)
    claims = by_hand.claim(found, ACTING, by_hand.TOOLS)
    by_hand.record_answers([replace(by_hand.answer(c, None), flags=("tool_error",)) for c in claims])
    by_hand.record_turns([by_hand.turn(c, text=" \n") for c in by_hand.claim(found, GENERATING)])
    answer(found, [1, 0, 0, 0], flags=("no_answer",))
    report = report_of(job_id)
    m, cost = report.measured, report.prediction.cost
    assert (m.prompt_tokens, m.generated_tokens, m.empty_share) == (2.0, 6.0, 0.0)
    assert m.flags == {"no_answer": 4, "tool_error": 4}
    # 3 steps of 4 episodes, each of 2 × (2 + 3) ids; the second turn reads 2 + 3 + 2 of them again
    assert (cost.trained_tokens, cost.prompt_tokens) == (12 * 10, 12 * (2 + 7))


def test_answers_without_a_word_are_counted(tenant: Tenant) -> None:
    job_id = start(tenant)
    finish(job_id, text=" \n", sampled_ids=[7], logprobs=[-0.5])
    assert report_of(job_id).measured.empty_share == 1.0


def test_dropped_episodes_are_counted_by_code_and_not_measured(tenant: Tenant) -> None:
    job_id = start(tenant)
    found = to_acting(job_id)
    answer(found[:3], [1, 0, 1])
    with transaction() as session:
        episode = by_hand.episodes_of(rounds_of(job_id)[0].id)[3]
        (round_,) = episodes.rounds.lock_rounds(session, {episode.round_id}).values()
        episodes.drop(session, session.merge(episode), round_, "infrastructure", "no free process in time")
    by_hand.admit()
    m = report_of(job_id).measured
    assert (m.episodes, m.dropped) == (3, {"infrastructure": 1})
    assert m.zero_variance_share == 0.5  # a lone survivor has nobody to be compared with
    assert by_hand.job(job_id).state == "succeeded"


def test_one_without_a_finished_episode_says_so(tenant: Tenant) -> None:
    job_id = start(tenant)
    to_acting(job_id)
    (round_,) = rounds_of(job_id)
    for episode in by_hand.episodes_of(round_.id):
        with transaction() as session:
            (locked,) = episodes.rounds.lock_rounds(session, {round_.id}).values()
            episodes.drop(session, session.merge(episode), locked, "infrastructure", "gone")
    by_hand.admit()
    report = report_of(job_id)
    assert report.verdict.code == "incomplete"
    assert report.prediction.total_seconds is None
    assert report.samples == []


def summary_of(job_id: uuid.UUID) -> dict[str, Any]:
    (round_,) = rounds_of(job_id)
    assert round_.summary is not None
    return round_.summary


def test_seconds_are_those_of_the_engine_and_of_the_round(tenant: Tenant) -> None:
    job_id = start(tenant)
    (round_,) = rounds_of(job_id)
    found = by_hand.to_state(round_.id, GENERATING)
    claims = by_hand.claim(found, GENERATING)
    by_hand.record_turns([by_hand.turn(c, seconds=s) for c, s in zip(claims, (0.1, 0.1, 0.1, 0.5), strict=True)])
    by_hand.execute("UPDATE rounds SET admitted_at = now() - interval '60 s'")
    answer(found, [1, 0, 0, 0])
    summary = summary_of(job_id)
    assert summary["engine_seconds"] == pytest.approx(0.2)
    assert summary["longest_seconds"] == pytest.approx(0.5)
    assert summary["elapsed_seconds"] == pytest.approx(60, rel=0.2)
    assert summary["tokens_per_second"] == pytest.approx(12 / summary["elapsed_seconds"])


def test_the_speed_of_training_is_that_of_the_last_updates(tenant: Tenant) -> None:
    by_hand.step(by_hand.start_job(tenant))  # 10 tokens in 0.1 s
    by_hand.execute("UPDATE rounds SET training_at = finished_at - interval '1.1 s' WHERE state = 'committed'")
    job_id = start(tenant)
    finish(job_id)
    summary = summary_of(job_id)
    assert summary["training_seconds_per_token"] == pytest.approx(0.01)
    assert summary["commit_seconds"] == pytest.approx(1.0)


def test_updates_without_signal_tell_nothing_of_speed(tenant: Tenant) -> None:
    by_hand.step(by_hand.start_job(tenant), signal=False)
    job_id = start(tenant)
    finish(job_id)
    assert summary_of(job_id)["training_seconds_per_token"] is None


def test_the_speed_of_training_is_that_of_the_same_base_model(tenant: Tenant) -> None:
    by_hand.step(by_hand.start_job(tenant))
    by_hand.register_model("other")
    by_hand.announce(replace(by_hand.ROLLOUT, name="rollout@other", base_model="other"))
    job_id = start(tenant, base_model="other")
    finish(job_id)
    assert summary_of(job_id)["training_seconds_per_token"] is None


@pytest.mark.parametrize(("quota", "slots"), [(256, 64), (4, 4)])
def test_slots_are_the_engines_within_the_tenants_quota(hand: None, quota: int, slots: int) -> None:
    job_id = start(by_hand.make_tenant("narrow", max_inflight_episodes=quota))
    finish(job_id)
    assert summary_of(job_id)["slots"] == slots


def test_samples_are_the_best_and_the_worst_answer_to_a_prompt(tenant: Tenant) -> None:
    job_id = start(tenant, preflight={"prompts": 2, "samples": 3})
    finish(job_id, rewards=(0.5, 1, 0, 0, 0, 0))
    samples = report_of(job_id).samples
    assert [(s.prompt_index, s.episode.reward) for s in samples] == [(0, 1), (0, 0), (1, 0), (1, 0)]
    assert samples[0].prompt == [{"role": "user", "content": "?"}]
    assert samples[0].episode.turns[0].messages == [{"role": "assistant", "content": "7"}]


def test_the_api_role_reads_its_own_report_and_no_other(tenant: Tenant) -> None:
    job_id = start(tenant)
    finish(job_id)
    other = by_hand.make_tenant("other")
    with transaction("api", tenant.id) as session:
        assert preflight.report(session, preflight.find(session, tenant.id, job_id)) == report_of(job_id)
    with transaction("api", other.id) as session:
        assert session.scalars(select(Round).where(Round.kind == RoundKind.PREFLIGHT)).all() == []


# --- the command


def play(monkeypatch: pytest.MonkeyPatch, *, fails: bool = False, rewards: Sequence[float] = (1, 0, 0, 0)) -> None:
    """Workers that do all of a preflight's work as soon as its validation is rung for."""

    def ring(task: str, queue: str, **about: Any) -> None:
        if task != broker.VALIDATE:
            return
        job_id = uuid.UUID(about["job_id"])
        with transaction() as session:
            if fails:
                jobs.fail_by_id(session, job_id, "prompt_too_long", "a prompt has 900 tokens")
                return
            jobs.validated(session, job_id)
        by_hand.admit()
        by_hand.publish_initial(job_id)
        finish(job_id, rewards)

    monkeypatch.setattr(broker, "ring", ring)


def command(tmp_path: Path, *more: str) -> Result:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(by_hand.document(preflight=SMALL)))
    return CliRunner().invoke(app, ["job", "preflight", "-f", str(path), "--tenant", "acme", *more])


def test_the_command_waits_and_tells_the_report(
    tenant: Tenant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch)
    done = command(tmp_path)
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    for part in ("good: the answers to 1 of 2 prompts", "pass rate 25%", "time in all", "unknown: training_seconds"):
        assert part in said


def test_the_command_tells_programs_the_same(tenant: Tenant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)
    said = json.loads(command(tmp_path, "--json").stdout)
    assert (said["state"], said["error"], said["report"]["verdict"]["code"]) == ("succeeded", None, "good")
    assert said["report"] == plain(report_of(uuid.UUID(said["id"])))


def test_a_job_that_would_not_learn_ends_the_command_with_status_1(
    tenant: Tenant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, rewards=(0, 0, 0, 0))
    done = command(tmp_path)
    assert done.exit_code == 1
    assert "too_hard: none of 4 answers passes" in done.stdout


def test_a_preflight_that_fails_ends_the_command_with_its_error(
    tenant: Tenant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, fails=True)
    done = command(tmp_path)
    assert done.exit_code == 1
    assert "preflight failed: prompt_too_long: a prompt has 900 tokens" in done.stderr


def test_set_and_numbers_go_over_the_file(tenant: Tenant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, fails=True)
    said = json.loads(command(tmp_path, "--set", "seed=7", "--samples", "3", "--json").stdout)
    spec = by_hand.job(uuid.UUID(said["id"])).spec
    assert (spec["seed"], spec["preflight"]) == (7, {"prompts": 2, "samples": 3})


def test_who_stops_waiting_cancels_it(tenant: Tenant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(job_ids: Sequence[uuid.UUID]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app_preflight, "follow", interrupted)
    assert command(tmp_path).exit_code == 130
    with transaction() as session:
        assert session.scalars(select(Job.state)).all() == ["cancelled"]


# --- predictions


SUMMARY: dict[str, Any] = {
    "episodes": 8,
    "generated_tokens": 20.0,
    "episode_tokens": 50.0,
    "read_tokens": 30.0,
    "engine_seconds": 2.0,
    "longest_seconds": 5.0,
    "elapsed_seconds": 6.5,
    "slots": 64,
    "training_seconds_per_token": 0.01,
    "commit_seconds": 0.5,
}


def predicted(summary: dict[str, Any] | None = None, **changes: Any) -> Prediction:
    """Of a job of 10 steps × 4 prompts × 8 answers, from a preflight of 8 episodes."""
    sizes = {"n_steps": 10, "prompts_per_round": 4, "group_size": 8}
    spec = jobs.parse_spec(by_hand.document(**{"hyperparameters": sizes} | changes))
    return predict(spec, SUMMARY | (summary or {}))


def test_time_and_cost_are_those_reckoned_by_hand() -> None:
    p = predicted()
    assert p.rollout_seconds == 5  # all have a slot at once, so a step lasts as long as its longest episode
    assert p.environment_seconds == pytest.approx(1.5)  # 6.5 s, of which the longest episode generated 5
    assert p.training_seconds == pytest.approx(32 * 50 * 0.01)
    assert p.total_seconds == pytest.approx(10 * (5 + 1.5 + 16 + 0.5))
    assert (p.cost.prompt_tokens, p.cost.generated_tokens, p.cost.trained_tokens) == (320 * 30, 320 * 20, 320 * 50)
    assert p.cost.busy_seconds == pytest.approx(320 * 2 + 10 * 16)
    assert p.unknown == []


def test_few_slots_make_a_step_longer() -> None:
    p = predicted({"slots": 4, "elapsed_seconds": 8.5})
    assert p.rollout_seconds == pytest.approx(32 * 2 / 4 + (5 - 2))
    assert p.environment_seconds == pytest.approx(8.5 - (8 * 2 / 4 + 3))


def test_evaluations_cost_but_hold_up_no_step() -> None:
    without, p = predicted(), predicted(evaluation={"every": 5, "prompts": 6, "samples": 2})
    assert p.cost.generated_tokens == (320 + 3 * 12) * 20  # of versions 0, 5 and 10
    assert p.cost.trained_tokens == without.cost.trained_tokens
    assert p.total_seconds == without.total_seconds


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"training_seconds_per_token": None, "commit_seconds": None}, "training_seconds"),
        ({"slots": 0}, "rollout_seconds"),
        ({"generated_tokens": 0.0}, "rollout_seconds"),
    ],
)
def test_what_cannot_be_predicted_is_null_with_a_reason(changes: dict[str, Any], field: str) -> None:
    p = predicted(changes)
    assert (getattr(p, field), p.total_seconds) == (None, None)
    (reason,) = p.unknown
    assert reason.startswith(f"{field}: ")


# --- verdicts


def measured(**changes: Any) -> Measured:
    """8 prompts × 4, of which half show a difference and a quarter passes."""
    usual: dict[str, Any] = {
        "prompts": 8,
        "episodes": 32,
        "pass_rate": 0.25,
        "reward_mean": 0.25,
        "reward_std": 0.4,
        "zero_variance_share": 0.5,
        "truncated_share": 0.0,
        "empty_share": 0.0,
        "flags": {},
        "dropped": {},
        "prompt_tokens": 20.0,
        "generated_tokens": 5.0,
        "tokens_per_second": 100.0,
    }
    return Measured(**(usual | changes))


FLAT = {"zero_variance_share": 1.0}


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("good", {}),
        ("good", {"pass_rate": 0.0}),  # parts of the reward differ
        ("good", {"pass_rate": 1.0}),
        ("good", {"zero_variance_share": 0.875}),
        ("good", {"flags": {"no_answer": 20, "tool_error": 20, "unscorable": 32}}),  # the policy's own doing
        ("too_easy", FLAT | {"pass_rate": 1.0, "reward_std": 0.0, "reward_mean": 1.0}),
        ("too_hard", FLAT | {"pass_rate": 0.0, "reward_std": 0.0, "reward_mean": 0.0}),
        ("no_signal", FLAT),
        ("truncated", {"truncated_share": 0.5}),
        ("truncated", FLAT | {"pass_rate": 0.0, "truncated_share": 0.9}),
        ("grader_errors", {"flags": {"grader_error": 4}}),
        ("grader_errors", {"flags": {"environment_timeout": 32}, "truncated_share": 1.0}),
        ("good", {"flags": {"grader_error": 3}}),
        ("incomplete", {"episodes": 10, "dropped": {"infrastructure": 22}}),
        ("incomplete", {"episodes": 0, "dropped": {"infrastructure": 32}}),
    ],
)
def test_a_verdict_names_what_stands_in_the_way(code: str, changes: dict[str, Any]) -> None:
    verdict = judge(measured(**changes))
    assert verdict.code == code
    assert verdict.reason and verdict.advice


def test_few_prompts_with_signal_are_pointed_out() -> None:
    assert "group_size" in judge(measured(zero_variance_share=0.875)).advice
    assert "group_size" not in judge(measured()).advice
