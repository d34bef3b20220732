"""Advantages, token losses and round metrics, against the formulas."""

import math

import pytest
import torch

from app.errors import InvalidRequest, NonFinite
from app.specs.job import HyperparametersSpec
from workers.training.grpo import Trajectory, advantages, round_metrics, token_losses
from workers.training.packing import check_trajectories, pack_group


def episode(ids, mask, reward=0.0, index=0, truncated=False):
    return Trajectory(ids, mask, [-1.0 if m else 0.0 for m in mask], reward, index, truncated)


def test_advantages_are_divided_by_the_unbiased_std():
    std = math.sqrt(((1 - 0.25) ** 2 + 3 * 0.25**2) / 3)
    assert advantages([1.0, 0.0, 0.0, 0.0], "std") == pytest.approx(
        [0.75 / (std + 1e-4), *[-0.25 / (std + 1e-4)] * 3], rel=1e-12
    )


def test_advantages_without_scale_are_centred_only():
    assert advantages([1.0, 0.0, 0.0, 0.0], "none") == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("rewards", [[], [1.0], [0.1, 0.1, 0.1]])
def test_groups_without_contrast_have_exactly_zero_advantages(rewards):
    assert advantages(rewards, "std") == [0.0] * len(rewards)


def test_a_reward_that_is_not_finite_is_named():
    with pytest.raises(NonFinite, match="reward"):
        advantages([0.0, math.nan], "std")


def test_ratio_is_clipped_on_the_side_that_the_advantage_pushes():
    h = HyperparametersSpec(clip_low=0.2, clip_high=0.3, tis_cap=None)
    ratio = torch.tensor([0.5, 0.5, 2.0, 2.0], dtype=torch.float64)
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    old = torch.full_like(ratio, -3.0)
    losses, parts = token_losses(old + ratio.log(), old, old, sign, None, h)
    torch.testing.assert_close(losses, torch.tensor([-0.5, 0.8, -1.3, 2.0], dtype=torch.float64))
    assert parts["clip_fraction"].tolist() == [False, True, True, False]


def test_importance_weight_is_capped_and_carries_no_gradient():
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    engine = torch.tensor([-0.5, -3.0])
    losses, parts = token_losses(
        logprobs, logprobs.detach(), engine, torch.ones(2), None, HyperparametersSpec(tis_cap=2.0)
    )
    losses.sum().backward()
    torch.testing.assert_close(parts["tis_weight_mean"], torch.tensor([math.exp(-0.5), 2.0]))
    torch.testing.assert_close(logprobs.grad, torch.tensor([-math.exp(-0.5), -2.0]))


def test_kl_is_the_k3_estimator_times_the_ratio():
    logprobs, old, reference = torch.tensor([-1.0]), torch.tensor([-1.25]), torch.tensor([-1.5])
    h = HyperparametersSpec(kl_coefficient=0.1, tis_cap=None)
    losses, parts = token_losses(logprobs, old, old, torch.zeros(1), reference, h)
    kl = math.exp(0.25) * (math.exp(-0.5) + 0.5 - 1)
    assert float(parts["kl"]) == pytest.approx(kl)
    assert float(losses) == pytest.approx(0.1 * kl)


def test_round_metrics_count_empty_and_flat_groups_as_without_variance():
    groups = [
        [episode([1, 2, 3], [0, 1, 1], 1.0), episode([1, 2], [0, 1], 0.0, 1, truncated=True)],
        [episode([1, 2], [0, 1], 0.5), episode([1, 2], [0, 1], 0.5, 1)],
        [],
    ]
    metrics = round_metrics(groups)
    assert metrics["zero_variance_share"] == pytest.approx(2 / 3)
    assert metrics["truncated_share"] == 0.25
    assert metrics["reward_mean"] == 0.5
    assert (metrics["loss_tokens"], metrics["total_tokens"], metrics["response_length"]) == (5, 9, 1.25)


def test_packing_shares_the_prefix_and_points_at_the_predictor_of_each_token():
    group = [
        episode([7, 8, 9, 1, 2], [0, 0, 0, 1, 1], index=0),
        episode([7, 8, 9, 3, 4, 5], [0, 0, 0, 1, 0, 1], index=1),
    ]
    (batch,) = pack_group(group, [1.0, -1.0], 100)
    # Rows are read up to the token before the last sampled one: [7 8 9 1] and [7 8 9 3 4], longest first,
    # and, as they are of unlike length, one position of padding.
    assert batch.input_ids.tolist() == [[7, 8, 9, 3, 4, 1, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0]]
    assert batch.targets.tolist() == [3, 5, 1, 2]
    assert batch.sources.tolist() == [2, 4, 2, 5]
    assert batch.advantages.tolist() == [-1.0, -1.0, 1.0, 1.0]


def test_packing_keeps_the_token_budget():
    group = [episode([1, 2, *range(10 + i, 15 + i)], [0, 0, 1, 1, 1, 1, 1], index=i) for i in range(5)]
    batches = pack_group(group, [0.5] * 5, 10)  # prefix 2, suffixes of 4: two rows in 10 tokens
    assert [len(batch.layout.lengths) for batch in batches] == [2, 2, 1]
    assert all(batch.layout.tokens <= 10 for batch in batches)


def test_a_trajectory_over_the_budget_is_refused_with_numbers():
    with pytest.raises(InvalidRequest, match=r"trajectory 3 of group 1 has 9 tokens .* at most 8"):
        check_trajectories([[], [episode(list(range(10)), [0] * 9 + [1], index=3)]], 8)


def test_lists_of_unequal_length_are_refused():
    with pytest.raises(InvalidRequest, match=r"lengths \(2, 2, 1\)"):
        check_trajectories([[Trajectory([1, 2], [0, 1], [0.0], 0.0, 0, False)]], 8)


def test_a_sampled_first_token_is_refused():
    with pytest.raises(InvalidRequest, match="starts with a sampled token"):
        check_trajectories([[episode([1, 2], [1, 1])]], 8)
