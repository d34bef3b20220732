"""What is known of a group is found by all that it depends on, and by nothing else."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
import torch

from app.manager.buffer import RoundInput
from app.models import StoredObject
from app.specs.job import JobSpec
from workers.lora import LoraWeights
from workers.training.grpo import TokenSums, Trajectory
from workers.training.streaming import Streaming
from workers.training.trainer import GroupSums

PARAMETERS = 8
SPEC = JobSpec.model_validate({"name": "x", "base_model": "tiny", "environment": {"type": "calculator"}})
SOURCE = RoundInput(
    round_id=1,
    tenant_id=uuid.uuid4(),
    job_id=uuid.uuid4(),
    policy_version=0,
    weights_digest="w",
    spec=SPEC,
    adapter=StoredObject(sha256="a"),
    config=StoredObject(sha256="c"),
    optimizer=None,
)
GROUP = [Trajectory([5, 6, 7], [0, 1, 1], [0.0, -1.0, -2.0], reward, i, False) for i, reward in enumerate((0.0, 1.0))]


class CountingTrainer:
    """Gives each call's number for a gradient."""

    calls = 0

    def group_sums(self, *args: object) -> GroupSums:
        self.calls += 1
        return GroupSums(torch.full((PARAMETERS,), float(self.calls)), TokenSums())


def streaming(max_bytes: int = 1 << 20) -> Streaming:
    weights = LoraWeights(1, 1.0, ("q_proj",), {"a": torch.zeros(PARAMETERS)})
    return Streaming(CountingTrainer(), lambda source: weights, max_bytes)  # type: ignore[arg-type]


def spec(**changes: object) -> JobSpec:
    return JobSpec.model_validate(SPEC.model_dump() | changes)


def hyperparameters(**changes: object) -> JobSpec:
    return spec(hyperparameters=SPEC.hyperparameters.model_dump() | changes)


def test_a_group_is_found_by_position_and_computed_once() -> None:
    made = streaming()
    assert made.compute(SOURCE, GROUP, print)
    assert not made.compute(SOURCE, GROUP, print)
    other = [replace(t, reward=t.reward + 1) for t in GROUP]
    found = made.known(SOURCE, [other, GROUP])
    assert {position: known.sums.gradient[0].item() for position, known in found.items()} == {1: 1.0}


@pytest.mark.parametrize(
    "changed",
    [
        replace(SOURCE, adapter=StoredObject(sha256="b")),
        replace(SOURCE, config=StoredObject(sha256="d")),
        replace(SOURCE, weights_digest="v"),
        replace(SOURCE, round_id=2),
        replace(SOURCE, spec=hyperparameters(clip_high=0.3)),
        replace(SOURCE, spec=hyperparameters(kl_coefficient=0.1)),
        replace(SOURCE, spec=spec(sampling=SPEC.sampling.model_dump() | {"temperature": 0.9})),
    ],
    ids=["adapter", "config", "digest", "round", "clip", "kl", "temperature"],
)
def test_another_source_knows_nothing_of_it(changed: RoundInput) -> None:
    made = streaming()
    made.compute(SOURCE, GROUP, print)
    assert made.known(changed, [GROUP]) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [5, 6, 8]},
        {"loss_mask": [0, 0, 1]},
        {"engine_logprobs": [0.0, -1.0, -2.0000002]},
        {"reward": 0.5},
        {"index": 3},
        {"truncated": True},
        {"token_ids": [5, 6], "loss_mask": [0, 1], "engine_logprobs": [0.0, -1.0]},
    ],
    ids=str,
)
def test_another_trajectory_is_another_group(changes: dict[str, object]) -> None:
    made = streaming()
    made.compute(SOURCE, GROUP, print)
    assert made.known(SOURCE, [[replace(GROUP[0], **changes), GROUP[1]], GROUP[:1], GROUP[::-1]]) == {}  # type: ignore[arg-type]


def test_memory_is_bounded_and_given_back() -> None:
    made = streaming(max_bytes=2 * 4 * PARAMETERS)
    groups = [[replace(t, reward=t.reward + i) for t in GROUP] for i in range(3)]
    sources = [replace(SOURCE, round_id=i) for i in range(3)]
    done = [made.compute(source, group, print) for source, group in zip(sources, groups, strict=True)]
    assert done == [True, True, False]
    assert made.known(sources[2], groups) == {}
    made.forget(0)
    assert made.compute(sources[2], groups[2], print)
    made.keep_only({2})
    assert made.rounds == {2}


def test_a_group_that_adds_nothing_is_not_computed() -> None:
    made = streaming()
    equal = [replace(t, reward=1.0) for t in GROUP]
    assert not made.compute(SOURCE, equal, print)
    assert not made.compute(SOURCE, [], print)
    assert made.compute(replace(SOURCE, spec=hyperparameters(kl_coefficient=0.1)), equal, print)
