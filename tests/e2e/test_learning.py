"""A tiny random model learns a toy verifiable reward through the real workers."""

from __future__ import annotations

from types import SimpleNamespace

from sqlalchemy import func, select

from app.db import transaction
from app.manager import buffer
from app.manager.packing import unpack_ids, unpack_logprobs
from app.models import Episode, Group, PolicyVersion, Round, StepMetrics, Turn
from tests.alphabet import SPECIAL
from tests.e2e.conftest import Service

IM_END, IM_START = SPECIAL.index("<|im_end|>"), SPECIAL.index("<|im_start|>")


def test_reward_rises_from_under_three_tenths_to_over_eight_tenths(service: Service) -> None:
    job_id = service.submit(
        service.tenant("acme"),
        hyperparameters={"n_steps": 10, "prompts_per_round": 4, "group_size": 8, "learning_rate": 1e-2},
    )
    service.wait(job_id, "succeeded", "failed", seconds=60)
    with transaction() as session:
        steps = session.scalars(select(StepMetrics).where(StepMetrics.job_id == job_id).order_by(StepMetrics.version))
        rewards = [step.metrics["reward_mean"] for step in steps]
    assert len(rewards) == 10
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.8


def test_many_tenants_train_at_once_each_on_its_own_versions(service: Service) -> None:
    ids = [service.submit(service.tenant(name), seed=seed) for seed, name in enumerate(("one", "two", "three"))]
    for job_id in ids:
        assert service.wait(job_id, "succeeded", "failed").state == "succeeded"
        with transaction() as session:
            versions = session.scalars(
                select(PolicyVersion).where(PolicyVersion.job_id == job_id).order_by(PolicyVersion.version)
            ).all()
            assert [v.version for v in versions] == [0, 1, 2, 3]
            assert len({v.weights_digest for v in versions}) == 4
            rows = session.execute(
                select(Round.policy_version, Round.state, func.count(Episode.id))
                .join(Episode, Episode.round_id == Round.id)
                .where(Round.job_id == job_id, Episode.state == "finished")
                .group_by(Round.id)
                .order_by(Round.policy_version)
            ).all()
            assert [tuple(row) for row in rows] == [(v, "committed", 8) for v in range(3)]
            digests = session.execute(
                select(Turn.policy_version, Turn.weights_digest)
                .join(Round, Round.id == Turn.round_id)
                .where(Round.job_id == job_id)
                .distinct()
                .order_by(Turn.policy_version)
            ).all()
            assert [tuple(row) for row in digests] == [(v.version, v.weights_digest) for v in versions[:3]]


def test_dialogues_with_tool_latency_finish_with_all_their_turns(service: Service) -> None:
    job_id = service.submit(
        service.tenant("acme"),
        environment={"type": "toy_dialogue", "max_turns": 3, "params": {"latency": 0.05}},
        sampling={"max_tokens": 6},
        hyperparameters={"n_steps": 2},
    )
    assert service.wait(job_id, "succeeded", "failed").state == "succeeded"
    with transaction() as session:
        turns: dict[int, list[Turn]] = {}
        for turn in session.scalars(
            select(Turn)
            .join(Round, Round.id == Turn.round_id)
            .where(Round.job_id == job_id)
            .order_by(Turn.episode_id, Turn.index)
        ):
            turns.setdefault(turn.episode_id, []).append(turn)
    assert len(turns) == 16
    for said in turns.values():
        assert [t.kind for t in said] == ["policy", "environment", "policy", "environment", "policy"]
        assert_only_the_template_writes_control_tokens(said)


def assert_only_the_template_writes_control_tokens(turns: list[Turn]) -> None:
    """The tool's text says `<|im_end|>` each time; in the ids there are the template's own control tokens, no more."""
    policy = [t for t in turns if t.kind == "policy"]
    for before, turn in zip(policy, policy[1:], strict=False):
        context = unpack_ids(turn.context_ids or b"")
        closed = unpack_ids(before.sampled_ids or b"")[-1] == IM_END
        assert context.count(IM_START) == 2  # the tool's message, the policy's next turn
        assert context.count(IM_END) == (1 if closed else 2)


def test_what_is_trained_on_is_what_was_sampled_and_nothing_else_carries_loss(service: Service) -> None:
    """The trajectories of a finished round against its turns, before the update."""
    job_id = service.submit(
        service.tenant("acme"),
        environment={"type": "toy_dialogue", "max_turns": 2},
        sampling={"max_tokens": 6, "temperature": 0.7},
        hyperparameters={"n_steps": 1},
    )
    service.wait(job_id, "succeeded")
    with transaction() as session:
        round_ = session.scalars(select(Round).where(Round.job_id == job_id)).one()
        claim = SimpleNamespace(
            round_id=round_.id, policy_version=round_.policy_version, weights_digest=round_.weights_digest
        )
        groups = buffer.trajectories(session, claim)  # type: ignore[arg-type]
        rows = session.execute(
            select(Group.index.label("group"), Episode.index.label("place"), Turn)
            .join(Episode, Episode.group_id == Group.id)
            .join(Turn, Turn.episode_id == Episode.id)
            .where(Group.round_id == round_.id, Turn.kind == "policy")
            .order_by(Group.index, Episode.index, Turn.index)
        ).all()
    sampled: dict[tuple[int, int], list[int]] = {}
    logprobs: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        sampled.setdefault((row.group, row.place), []).extend(unpack_ids(row.Turn.sampled_ids))
        logprobs.setdefault((row.group, row.place), []).extend(unpack_logprobs(row.Turn.logprobs))
    trained = [t for group in groups for t in group]
    assert [(t.group, t.index) for t in trained] == sorted(sampled)
    for t in trained:
        place = (t.group, t.index)
        assert [i for i, m in zip(t.token_ids, t.loss_mask, strict=True) if m] == sampled[place]
        assert [p for p, m in zip(t.logprobs, t.loss_mask, strict=True) if m] == logprobs[place]
        assert len(t.token_ids) > len(sampled[place])
