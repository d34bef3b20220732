"""Rounds through the manager: admission, claims, records, the last episode, and what must change nothing."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from app import broker
from app.db import transaction
from app.manager import episodes
from app.manager.episodes import Answer, GroupPrompt
from app.manager.workers import Announcement
from app.models import Group, Round, StepMetrics, Tenant, Turn, UsageEntry
from app.models.round import EpisodeState, RoundKind, RoundState
from app.models.worker import WorkerKind
from app.settings import Settings
from tests import by_hand
from tests.by_hand import ids
from tests.service.conftest import Bells

WAITING, RESETTING, GENERATING, ACTING, FINISHED, FAILED = EpisodeState
BIG = {"n_steps": 3, "prompts_per_round": 4, "group_size": 4}


@pytest.fixture
def job_id(tenant: Tenant) -> uuid.UUID:
    """A running job with its first round: 2 prompts × 2 episodes, none admitted."""
    return by_hand.start_job(tenant)


@pytest.fixture
def round_id(job_id: uuid.UUID) -> int:
    return by_hand.live_round(job_id).id


def states(round_id: int) -> list[str]:
    return [e.state for e in by_hand.episodes_of(round_id)]


# --- from birth to commit


def test_a_round_is_born_with_all_its_episodes_waiting(round_id: int) -> None:
    found = by_hand.episodes_of(round_id)
    assert [e.state for e in found] == [WAITING] * 4
    assert by_hand.round_of(round_id).open_episodes == 4
    assert len({e.seed for e in found}) == 4


def test_seeds_are_the_same_in_every_run_of_a_job(tenant: Tenant) -> None:
    seeds = [
        [e.seed for e in by_hand.episodes_of(by_hand.live_round(by_hand.start_job(tenant, seed=seed)).id)]
        for seed in (1, 1, 2)
    ]
    assert seeds[0] == seeds[1]
    assert not set(seeds[0]) & set(seeds[2])


def test_a_job_goes_from_round_to_round_to_its_end(job_id: uuid.UUID) -> None:
    assert [by_hand.step(job_id) for _ in range(3)] == [1, 2, 3]
    job = by_hand.job(job_id)
    assert (job.state, job.version) == ("succeeded", 3)
    with transaction() as session:
        trained = session.scalars(select(Round).where(Round.job_id == job_id).order_by(Round.id)).all()
        measured = session.scalars(select(StepMetrics.version).order_by(StepMetrics.version)).all()
    assert [(r.policy_version, r.cursor, r.state) for r in trained] == [
        (0, 0, "committed"),
        (1, 2, "committed"),
        (2, 4, "committed"),
    ]
    assert measured == [1, 2, 3]


def test_an_episode_of_several_turns_keeps_them_in_order(job_id: uuid.UUID, round_id: int) -> None:
    found = by_hand.to_state(round_id, ACTING)
    by_hand.act(found, reward=None)
    assert states(round_id) == [GENERATING] * 4
    by_hand.generate(found)
    by_hand.act(found)
    with transaction() as session:
        turns = session.scalars(select(Turn).where(Turn.episode_id == found[0]).order_by(Turn.index)).all()
    assert [(t.index, t.kind) for t in turns] == [(0, "policy"), (1, "environment"), (2, "policy")]
    assert by_hand.round_of(round_id).state == RoundState.READY


def test_every_generated_turn_is_charged_once(job_id: uuid.UUID, round_id: int) -> None:
    found = by_hand.to_state(round_id, ACTING)
    with transaction() as session:
        entries = session.scalars(select(UsageEntry).order_by(UsageEntry.episode_id)).all()
    assert [(u.episode_id, u.turn, u.prompt_tokens, u.generated_tokens) for u in entries] == [
        (e, 0, len(by_hand.PROMPT), len(by_hand.GENERATED)) for e in sorted(found)
    ]


# --- admission


def announce_slots(slots: int, adapter_slots: int = 8) -> None:
    by_hand.announce(replace(by_hand.ROLLOUT, slots=slots, adapter_slots=adapter_slots))


def test_no_more_episodes_get_in_than_there_are_slots(round_id: int) -> None:
    announce_slots(3)
    assert by_hand.admit() == 3
    assert states(round_id) == [RESETTING] * 3 + [WAITING]
    assert by_hand.admit() == 0


def test_an_acting_episode_leaves_its_slot_to_another(round_id: int) -> None:
    announce_slots(1)
    by_hand.admit()
    by_hand.reset(round_id)
    by_hand.generate(ids(by_hand.episodes_of(round_id)))
    assert by_hand.admit() == 1
    assert sorted(states(round_id)) == [ACTING, GENERATING, WAITING, WAITING]


def test_without_a_live_rollout_worker_nothing_gets_in(round_id: int) -> None:
    by_hand.execute("UPDATE workers SET seen_at = now() - interval '1 h'")
    assert by_hand.admit() == 0


def test_a_draining_worker_is_given_nothing(round_id: int) -> None:
    by_hand.execute("UPDATE workers SET draining = true")
    assert by_hand.admit() == 0


def test_slots_are_shared_between_tenants(tenant: Tenant) -> None:
    other = by_hand.make_tenant("other")
    first = by_hand.live_round(by_hand.start_job(tenant, hyperparameters=BIG)).id
    second = by_hand.live_round(by_hand.start_job(other, hyperparameters=BIG)).id
    announce_slots(8)
    by_hand.admit()
    assert [states(r).count(RESETTING) for r in (first, second)] == [4, 4]


def test_slots_are_shared_by_weight(tenant: Tenant) -> None:
    heavy = by_hand.make_tenant("heavy", weight=3.0)
    first = by_hand.live_round(by_hand.start_job(tenant, hyperparameters=BIG)).id
    second = by_hand.live_round(by_hand.start_job(heavy, hyperparameters=BIG)).id
    announce_slots(8)
    by_hand.admit()
    assert [states(r).count(RESETTING) for r in (first, second)] == [2, 6]


def test_a_tenants_quota_of_episodes_in_flight_holds(hand: None) -> None:
    round_id = by_hand.live_round(by_hand.start_job(by_hand.make_tenant(max_inflight_episodes=3))).id
    assert by_hand.admit() == 3
    by_hand.reset(round_id)
    by_hand.generate(ids(by_hand.episodes_of(round_id)))
    assert by_hand.admit() == 0  # with its environment an episode is in flight as well


def test_a_tenants_quota_is_over_all_base_models(hand: None) -> None:
    by_hand.register_model("second")
    engine = Announcement("rollout@second", uuid.uuid4(), WorkerKind.ROLLOUT, "second", slots=64, adapter_slots=8)
    by_hand.announce(engine)
    tenant = by_hand.make_tenant(max_inflight_episodes=5)
    for model in (by_hand.MODEL, "second"):
        by_hand.start_job(tenant, base_model=model)
    assert by_hand.admit() == 5
    assert by_hand.admit() == 0


def test_jobs_of_another_base_model_do_not_take_its_slots(hand: None, tenant: Tenant) -> None:
    by_hand.register_model("second")
    mine = by_hand.live_round(by_hand.start_job(tenant)).id
    theirs = by_hand.live_round(by_hand.start_job(tenant, base_model="second")).id
    by_hand.admit()
    assert (states(mine), states(theirs)) == ([RESETTING] * 4, [WAITING] * 4)


def test_a_suspended_tenant_gets_nothing(round_id: int) -> None:
    by_hand.execute("UPDATE tenants SET suspended = true")
    assert by_hand.admit() == 0


def test_no_more_adapters_are_in_use_than_have_a_slot(tenant: Tenant) -> None:
    found = [by_hand.live_round(by_hand.start_job(tenant)).id for _ in range(3)]
    announce_slots(64, adapter_slots=2)
    by_hand.admit()
    assert [states(r).count(RESETTING) for r in found] == [4, 4, 0]


def test_two_admissions_at_once_hand_out_each_slot_once(tenant: Tenant) -> None:
    round_id = by_hand.live_round(by_hand.start_job(tenant, hyperparameters=BIG)).id
    announce_slots(7)
    with ThreadPoolExecutor(4) as pool:
        admitted = [f.result() for f in [pool.submit(by_hand.admit) for _ in range(4)]]
    assert sum(admitted) == 7
    assert states(round_id).count(RESETTING) == 7


def test_admission_rings_for_each_group_once(round_id: int, bells: Bells) -> None:
    bells.clear()
    by_hand.admit()
    groups = sorted({e.group_id for e in by_hand.episodes_of(round_id)})
    assert bells.of(broker.RESET) == [{"group_ids": groups}]


def test_a_group_that_has_its_prompt_generates_at_once(tenant: Tenant, bells: Bells) -> None:
    round_id = by_hand.live_round(by_hand.start_job(tenant)).id
    announce_slots(1)
    by_hand.admit()
    by_hand.reset(round_id)
    announce_slots(2)
    bells.clear()
    by_hand.admit()
    second = by_hand.episodes_of(round_id)[1]
    assert second.state == GENERATING
    assert bells == [(broker.GENERATE, {"episode_ids": [second.id]})]


# --- claims


def test_a_claim_takes_a_lease_and_raises_the_attempt(round_id: int) -> None:
    by_hand.admit()
    by_hand.reset(round_id)
    first = by_hand.episodes_of(round_id)[0]
    (claim,) = by_hand.claim([first.id], GENERATING)
    after = by_hand.episodes_of(round_id)[0]
    assert claim.attempt == after.attempt == first.attempt + 1
    assert after.lease_until is not None
    assert after.worker == by_hand.ROLLOUT.claimant


def test_a_second_message_finds_the_claim_taken(round_id: int) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    assert len(by_hand.claim(found, GENERATING)) == 4
    assert by_hand.claim(found, GENERATING) == []


def test_many_workers_share_what_a_message_names(round_id: int) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    barrier = threading.Barrier(4)

    def take(i: int) -> list[int]:
        barrier.wait()
        return [c.episode_id for c in by_hand.claim(found[i:] + found[:i], GENERATING)]

    with ThreadPoolExecutor(4) as pool:
        taken = [e for part in pool.map(take, range(4)) for e in part]
    assert sorted(taken) == found


@pytest.mark.parametrize("state", [RESETTING, ACTING])
def test_a_message_for_another_state_changes_nothing(round_id: int, state: EpisodeState) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    assert by_hand.claim(found, state) == []
    assert all(e.lease_until is None for e in by_hand.episodes_of(round_id))


def test_a_message_for_waiting_episodes_changes_nothing(round_id: int) -> None:
    found = ids(by_hand.episodes_of(round_id))
    for state in (RESETTING, GENERATING, ACTING):
        assert by_hand.claim(found, state) == []


def test_a_forged_message_changes_nothing(round_id: int) -> None:
    by_hand.to_state(round_id, GENERATING)
    assert by_hand.claim([-1, 0, 10**12], GENERATING) == []
    assert states(round_id) == [GENERATING] * 4


def test_a_message_for_an_abandoned_round_changes_nothing(job_id: uuid.UUID, round_id: int) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    by_hand.cancel(job_id)
    assert by_hand.claim(found, GENERATING) == []


def test_an_expired_lease_is_free_for_another_worker(round_id: int) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    by_hand.claim(found, GENERATING)
    by_hand.expire_leases()
    assert len(by_hand.claim(found, GENERATING)) == 4


def test_a_renewal_keeps_what_is_held_and_names_what_is_lost(round_id: int) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    old = by_hand.claim(found, GENERATING)
    by_hand.expire_leases()
    by_hand.claim(found[:2], GENERATING)  # another worker takes two of them
    with transaction() as session:
        held = episodes.renew(session, [(c.episode_id, c.attempt) for c in old], by_hand.LEASE)
    assert held == set(found[2:])


# --- records


def test_prompts_are_stored_once_by_the_first_writer(round_id: int) -> None:
    by_hand.admit()
    with transaction() as session:
        groups = session.scalars(select(Group.id).where(Group.round_id == round_id)).all()
        claims = episodes.claim_resets(session, groups, by_hand.TOOLS.claimant, by_hand.LEASE)
    for word in ("first", "second"):
        prompts = {g: GroupPrompt([{"role": "user", "content": word}], None, {}, 0) for g in groups}
        with transaction() as session:
            episodes.record_prompts(session, prompts, claims)
    with transaction() as session:
        stored = session.scalars(select(Group.messages).where(Group.round_id == round_id)).all()
    assert stored == [[{"role": "user", "content": "first"}]] * 2


def test_a_turn_is_recorded_once(round_id: int, bells: Bells) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    turns = [by_hand.turn(c) for c in by_hand.claim(found, GENERATING)]
    assert by_hand.record_turns(turns) == 4
    bells.clear()
    assert by_hand.record_turns(turns) == 0
    assert bells == []
    with transaction() as session:
        assert len(session.scalars(select(Turn)).all()) == 4


def test_a_worker_back_from_the_dead_records_nothing(round_id: int) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    old = by_hand.claim(found, GENERATING)
    by_hand.expire_leases()
    new = by_hand.claim(found, GENERATING)
    assert by_hand.record_turns([by_hand.turn(c, sampled_ids=[5], logprobs=[-1.0]) for c in old]) == 0
    assert by_hand.record_turns([by_hand.turn(c) for c in new]) == 4
    with transaction() as session:
        assert {len(t.sampled_ids or b"") for t in session.scalars(select(Turn))} == {4 * len(by_hand.GENERATED)}


def test_a_late_worker_whose_work_nobody_took_may_still_record(round_id: int) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    claims = by_hand.claim(found, GENERATING)
    by_hand.expire_leases()
    assert by_hand.record_turns([by_hand.turn(c) for c in claims]) == 4


def test_an_answer_counts_once(round_id: int) -> None:
    found = by_hand.to_state(round_id, ACTING)
    answers = [by_hand.answer(c) for c in by_hand.claim(found[:1], ACTING)]
    assert [by_hand.record_answers(answers) for _ in range(2)] == [1, 0]
    assert by_hand.round_of(round_id).open_episodes == 3


def test_an_answer_of_a_wrong_attempt_changes_nothing(round_id: int) -> None:
    found = by_hand.to_state(round_id, ACTING)
    (claim,) = by_hand.claim(found[:1], ACTING)
    for attempt in (claim.attempt - 1, claim.attempt + 1):
        assert by_hand.record_answers([by_hand.answer(replace(claim, attempt=attempt))]) == 0
    assert by_hand.round_of(round_id).open_episodes == 4


def test_an_answer_that_comes_with_another_rounds_claim_counts_down_its_own_round(tenant: Tenant) -> None:
    mine, theirs = (by_hand.live_round(by_hand.start_job(tenant)).id for _ in range(2))
    found = by_hand.to_state(mine, ACTING)
    by_hand.to_state(theirs, ACTING)
    (claim,) = by_hand.claim(found[:1], ACTING)
    forged = replace(claim, round=replace(claim.round, id=theirs))
    with pytest.raises(KeyError):
        by_hand.record_answers([by_hand.answer(forged)])
    assert [by_hand.round_of(r).open_episodes for r in (mine, theirs)] == [4, 4]


def test_a_turn_of_other_weights_cannot_be_recorded(round_id: int) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    (claim,) = by_hand.claim(found[:1], GENERATING)
    with pytest.raises(IntegrityError, match="fk_round_weights"):
        by_hand.record_turns([by_hand.turn(claim, weights_digest="0" * 64)])
    assert states(round_id) == [GENERATING] * 4


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_cannot_be_recorded(round_id: int, reward: float) -> None:
    found = by_hand.to_state(round_id, ACTING)
    (claim,) = by_hand.claim(found[:1], ACTING)
    with pytest.raises(ValueError, match="JSON compliant"):
        by_hand.record_answers([by_hand.answer(claim, reward)])
    assert by_hand.round_of(round_id).open_episodes == 4


def test_what_the_environment_says_is_stored_with_the_episode(round_id: int) -> None:
    found = by_hand.to_state(round_id, ACTING)
    (claim,) = by_hand.claim(found[:1], ACTING)
    said = replace(by_hand.answer(claim, 0.1), passed=False, truncated=True, flags=("malformed", "late"))
    by_hand.record_answers([said])
    episode = by_hand.episodes_of(round_id)[0]
    assert (episode.reward, episode.passed, episode.truncated) == (0.1, False, True)
    assert episode.flags == ["malformed", "late"]


# --- the last episode


def test_the_last_episode_makes_the_round_ready_and_rings(round_id: int, bells: Bells) -> None:
    found = by_hand.to_state(round_id, ACTING)
    by_hand.act(found[:3])
    assert by_hand.round_of(round_id).state == RoundState.ROLLING_OUT
    bells.clear()
    by_hand.act(found[3:])
    assert by_hand.round_of(round_id).state == RoundState.READY
    assert bells.of(broker.TRAIN) == [{}]


def test_two_last_episodes_at_the_same_instant_ring_the_trainer_once(tenant: Tenant, bells: Bells) -> None:
    """In each trial the last two episodes of a round are recorded by two threads that start together."""
    job_id = by_hand.start_job(tenant, hyperparameters={"n_steps": 1, "prompts_per_round": 1, "group_size": 2})
    round_id = by_hand.live_round(job_id).id
    answers = [by_hand.answer(c) for c in by_hand.claim(by_hand.to_state(round_id, ACTING), ACTING)]
    barrier = threading.Barrier(2)

    def record(answer: Answer) -> int:
        barrier.wait()
        return by_hand.record_answers([answer])

    with ThreadPoolExecutor(2) as pool:
        for _ in range(60):
            bells.clear()
            assert list(pool.map(record, answers)) == [1, 1]
            assert bells == [(broker.TRAIN, {})]
            assert by_hand.round_of(round_id).state == RoundState.READY
            by_hand.execute("UPDATE rounds SET state = 'rolling_out', open_episodes = 2")
            by_hand.execute("UPDATE episodes SET state = 'acting', reward = NULL, lease_until = now() + interval '1 h'")


# --- faults


def give_back(round_id: int, times: int) -> None:
    for _ in range(times):
        found = ids(by_hand.episodes_of(round_id))
        claims = by_hand.claim(found[:1], GENERATING)
        with transaction() as session:
            episodes.give_back(session, claims, "infrastructure", "the engine stopped")


def test_work_that_is_given_back_is_free_again_from_the_same_turn(round_id: int) -> None:
    by_hand.to_state(round_id, GENERATING)
    before = by_hand.episodes_of(round_id)[0]
    give_back(round_id, 1)
    after = by_hand.episodes_of(round_id)[0]
    assert (after.state, after.turn, after.seed) == (before.state, before.turn, before.seed)
    assert (after.retries, after.lease_until) == (1, None)


def test_past_its_budget_an_episode_is_dropped_and_the_round_goes_on(round_id: int, settings: Settings) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    give_back(round_id, settings.infrastructure_retries + 1)
    assert states(round_id) == [FAILED, GENERATING, GENERATING, GENERATING]
    assert by_hand.round_of(round_id).open_episodes == 3
    by_hand.generate(found)
    by_hand.act(found)
    assert by_hand.round_of(round_id).state == RoundState.READY


def test_giving_back_twice_counts_once(round_id: int) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    claims = by_hand.claim(found[:1], GENERATING)
    for _ in range(2):
        with transaction() as session:
            episodes.give_back(session, claims, "infrastructure", "again")
    assert by_hand.episodes_of(round_id)[0].retries == 1


def test_giving_back_late_leaves_the_next_attempt_alone(round_id: int) -> None:
    found = by_hand.to_state(round_id, GENERATING)
    old = by_hand.claim(found[:1], GENERATING)
    by_hand.expire_leases()
    (new,) = by_hand.claim(found[:1], GENERATING)
    with transaction() as session:
        episodes.give_back(session, old, "infrastructure", "late")
    assert by_hand.record_turns([by_hand.turn(new)]) == 1


def test_a_fault_of_the_jobs_own_fails_it(job_id: uuid.UUID, round_id: int) -> None:
    (claim,) = by_hand.claim(by_hand.to_state(round_id, ACTING)[:1], ACTING)
    with transaction() as session:
        episodes.fail_job(session, claim, "environment_error", "it raised")
    job = by_hand.job(job_id)
    assert (job.state, job.error_code, job.error_message) == ("failed", "environment_error", "it raised")


def test_a_fault_of_a_lost_attempt_fails_nobody(job_id: uuid.UUID, round_id: int) -> None:
    found = by_hand.to_state(round_id, ACTING)
    (old,) = by_hand.claim(found[:1], ACTING)
    by_hand.expire_leases()
    by_hand.claim(found[:1], ACTING)
    with transaction() as session:
        episodes.fail_job(session, old, "environment_error", "late")
    assert by_hand.job(job_id).state == "running"


# --- evaluations


@pytest.fixture
def evaluated(tenant: Tenant) -> uuid.UUID:
    """A job of one step with an evaluation of 2 prompts after each version."""
    return by_hand.start_job(
        tenant,
        evaluation={"every": 1, "prompts": 2},
        hyperparameters={"n_steps": 1, "prompts_per_round": 1, "group_size": 2},
    )


def evaluations(job_id: uuid.UUID) -> list[Round]:
    with transaction() as session:
        return list(
            session.scalars(
                select(Round).where(Round.job_id == job_id, Round.kind == RoundKind.EVAL).order_by(Round.id)
            )
        )


def finish(round_id: int) -> None:
    found = by_hand.to_state(round_id, ACTING)
    by_hand.act(found)


def test_an_evaluation_ends_with_its_pass_rate(evaluated: uuid.UUID) -> None:
    (first,) = evaluations(evaluated)
    found = by_hand.to_state(first.id, ACTING)
    by_hand.act(found[:1], reward=1.0)
    by_hand.act(found[1:], reward=0.0)
    after = by_hand.round_of(first.id)
    assert after.state == RoundState.COMMITTED
    assert after.summary == {"episodes": 2, "pass_rate": 0.5, "reward_mean": 0.5, "truncated_share": 0.0}


def test_an_evaluation_does_not_hold_up_the_commit(evaluated: uuid.UUID) -> None:
    assert by_hand.step(evaluated) == 1
    assert [(r.policy_version, r.state) for r in evaluations(evaluated)] == [(0, "rolling_out"), (1, "rolling_out")]


def test_a_job_ends_after_its_last_evaluation(evaluated: uuid.UUID) -> None:
    by_hand.step(evaluated)
    for round_ in evaluations(evaluated):
        assert by_hand.job(evaluated).state == "running"
        finish(round_.id)
    by_hand.admit()
    assert by_hand.job(evaluated).state == "succeeded"
