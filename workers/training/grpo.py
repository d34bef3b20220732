"""GRPO as pure functions: advantages, the token-level loss, the sums that metrics are made of.

Sources: GRPO (arXiv 2402.03300), token-level loss and asymmetric clipping (DAPO, arXiv 2503.14476), truncated
importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy training").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Literal

import torch
from torch import Tensor

from app.errors import NonFinite
from app.specs.job import HyperparametersSpec

STD_EPSILON = 1e-4


@dataclass(frozen=True)
class Trajectory:
    """A finished episode. The lists have one entry a token: prompt, sampled turns and tool results as they were."""

    token_ids: Sequence[int]
    loss_mask: Sequence[int]  # 1 on sampled tokens only
    engine_logprobs: Sequence[float]  # of each sampled token, at the sampling temperature; 0.0 elsewhere
    reward: float
    index: int  # order inside its group
    truncated: bool

    @property
    def loss_tokens(self) -> int:
        return sum(map(bool, self.loss_mask))


Group = Sequence[Trajectory]  # the survivors of one prompt's episodes, in order of index; may be empty


def advantages(rewards: Sequence[float], scale: Literal["std", "none"]) -> list[float]:
    """One advantage a survivor: (r - mean) / (unbiased std + 1e-4), or r - mean. A group without contrast gets zeros.

    Without contrast are equal rewards and a lone survivor: exactly zero, no rounding residue of the mean.
    Raises NonFinite on a reward that is not a finite number.
    """
    if not all(map(math.isfinite, rewards)):
        raise NonFinite(f"a reward is not finite: {list(rewards)}", param="reward")
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    divisor = stdev(rewards) + STD_EPSILON if scale == "std" else 1.0
    return [(reward - mean) / divisor for reward in rewards]


def token_losses(
    logprobs: Tensor,
    old_logprobs: Tensor,
    engine_logprobs: Tensor,
    advantages: Tensor,
    reference_logprobs: Tensor | None,
    h: HyperparametersSpec,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token and its parts; all tensors [tokens], logprobs at the sampling temperature.

    loss = -min(r·A, clip(r, 1 - low, 1 + high)·A)·w + beta·kl, with r = exp(logprob - old), the detached weight
    w = min(exp(old - engine), cap) and kl = r·(exp(d) - d - 1), d = reference - logprob: Schulman's k3 estimator, times
    the differentiable ratio, without which its gradient is not that of the KL (DeepSeek-V3.2, arXiv 2512.02556).
    Parts, for the metrics: `clip_fraction`, `logprob_gap` (|old - engine|), `tis_weight_mean`; with a reference `kl`.
    """
    old_logprobs = old_logprobs.detach()
    ratio = (logprobs - old_logprobs).exp()
    clipped_ratio = ratio.clamp(1 - h.clip_low, 1 + h.clip_high)
    losses = -torch.minimum(ratio * advantages, clipped_ratio * advantages)

    gap = old_logprobs - engine_logprobs
    weight = torch.ones_like(gap) if h.tis_cap is None else gap.exp().clamp(max=h.tis_cap)
    losses = losses * weight

    outside = ((ratio < 1 - h.clip_low) & (advantages < 0)) | ((ratio > 1 + h.clip_high) & (advantages > 0))
    parts = {"clip_fraction": outside, "logprob_gap": gap.abs(), "tis_weight_mean": weight}
    if reference_logprobs is not None:
        difference = reference_logprobs - logprobs
        kl = ratio * (difference.exp() - difference - 1)
        losses = losses + h.kl_coefficient * kl
        parts["kl"] = kl.detach()
    return losses, parts


@dataclass(frozen=True)
class TokenSums:
    """Sums over loss tokens, unnormalised, so that micro-batches and groups add up before one division."""

    tokens: int = 0
    loss: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(losses: Tensor, parts: Mapping[str, Tensor]) -> TokenSums:
        sums = {name: float(part.sum(dtype=torch.float64)) for name, part in parts.items()}
        return TokenSums(len(losses), float(losses.detach().sum(dtype=torch.float64)), sums)

    def __add__(self, other: TokenSums) -> TokenSums:
        parts = {name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in {**self.parts, **other.parts}}
        return TokenSums(self.tokens + other.tokens, self.loss + other.loss, parts)

    def means(self) -> dict[str, float]:
        return {name: value / self.tokens for name, value in self.parts.items()}


def round_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What can be said of a round without a model. Empty groups and lone survivors count in `zero_variance_share`."""
    episodes = [trajectory for group in groups for trajectory in group]
    if not episodes:
        return {"loss_tokens": 0.0, "total_tokens": 0.0, "zero_variance_share": 1.0}
    rewards = [episode.reward for episode in episodes]
    return {
        "reward_mean": fmean(rewards),
        "reward_std": stdev(rewards) if len(rewards) > 1 else 0.0,
        "response_length": fmean(episode.loss_tokens for episode in episodes),
        "truncated_share": fmean(episode.truncated for episode in episodes),
        "zero_variance_share": fmean(len({episode.reward for episode in group}) < 2 for group in groups),
        "loss_tokens": float(sum(episode.loss_tokens for episode in episodes)),
        "total_tokens": float(sum(len(episode.token_ids) for episode in episodes)),
    }
