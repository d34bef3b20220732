"""A tiny random model learns a toy verifiable reward through the real workers."""

from __future__ import annotations

from sqlalchemy import func, select

from app.db import transaction
from app.models import Episode, PolicyVersion, Round, StepMetrics, Turn
from tests.e2e.conftest import Service


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
        kinds = session.execute(
            select(Turn.episode_id, func.array_agg(Turn.kind).label("kinds"))
            .join(Round, Round.id == Turn.round_id)
            .where(Round.job_id == job_id)
            .group_by(Turn.episode_id)
        ).all()
    assert len(kinds) == 16
    assert {tuple(sorted(row.kinds)) for row in kinds} == {("environment",) * 2 + ("policy",) * 3}
