"""Micro-batches: rows of one group behind their common prefix, which is computed once, within a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from os.path import commonprefix

import torch
from torch import Tensor

from app.errors import InvalidRequest
from workers.training.grpo import Group, Trajectory


@dataclass(frozen=True)
class Layout:
    """Packed positions: `prefix` shared tokens, then each row's own, longest first, end to end.

    Rows of unlike length are followed by one position of padding, which stands for all that they lack where a block
    of rows must be a rectangle; nothing reads what is computed there.
    """

    prefix: int
    lengths: tuple[int, ...]  # own tokens of each row

    @property
    def padded(self) -> bool:
        return len(set(self.lengths)) > 1

    @property
    def tokens(self) -> int:
        return self.prefix + sum(self.lengths) + self.padded


@dataclass(frozen=True)
class MicroBatch:
    """Model input [1, layout.tokens], and for each of n loss tokens what predicts it and what it is worth."""

    layout: Layout
    input_ids: Tensor  # [1, layout.tokens]
    position_ids: Tensor  # [1, layout.tokens]
    sources: Tensor  # [n] packed position whose hidden state predicts the token
    targets: Tensor  # [n] token ids
    engine_logprobs: Tensor  # [n] float32
    advantages: Tensor  # [n] float32

    def to(self, device: torch.device) -> MicroBatch:
        tensors = [getattr(self, field.name).to(device) for field in fields(self) if field.name != "layout"]
        return MicroBatch(self.layout, *tensors)


def input_length(trajectory: Trajectory) -> int:
    """Tokens that the model must read: all before the last loss token, which is only predicted."""
    return max((t for t, sampled in enumerate(trajectory.loss_mask) if sampled), default=0)


def check_trajectories(groups: Sequence[Group], microbatch_tokens: int) -> None:
    """Raises InvalidRequest, with numbers: lists of unequal length, a sampled first token, a row over the budget."""
    for g, group in enumerate(groups):
        for trajectory in group:
            where = f"trajectory {trajectory.index} of group {g}"
            lengths = (len(trajectory.token_ids), len(trajectory.loss_mask), len(trajectory.engine_logprobs))
            if len(set(lengths)) != 1:
                raise InvalidRequest(f"{where} has token_ids, loss_mask, engine_logprobs of lengths {lengths}")
            if trajectory.loss_mask and trajectory.loss_mask[0]:
                raise InvalidRequest(f"{where} starts with a sampled token, which nothing predicts")
            if input_length(trajectory) > microbatch_tokens:
                raise InvalidRequest(
                    f"{where} has {input_length(trajectory)} tokens before its last sampled one; a micro-batch holds "
                    f"at most {microbatch_tokens} (MARLAAS_TRAIN_MICROBATCH_TOKENS)"
                )


def pack_group(group: Group, advantages: Sequence[float], microbatch_tokens: int) -> list[MicroBatch]:
    """Splits a group into micro-batches of at most `microbatch_tokens` packed positions, longest rows first.

    Depends on nothing but its arguments. Rows without a loss token are left out.
    """
    rows = [(input_length(t), t, advantage) for t, advantage in zip(group, advantages, strict=True)]
    rows = sorted((row for row in rows if row[0]), key=lambda row: (-row[0], row[1].index))
    prefix = len(commonprefix([list(t.token_ids[:length]) for length, t, _ in rows]))

    batches: list[list[tuple[int, Trajectory, float]]] = []
    for row in rows:
        lengths = [length - prefix for length, *_ in (*batches[-1], row)] if batches else []
        if not batches or Layout(prefix, tuple(lengths)).tokens > microbatch_tokens:
            batches.append([])
        batches[-1].append(row)
    return [_pack(batch, prefix) for batch in batches]


def _pack(rows: list[tuple[int, Trajectory, float]], prefix: int) -> MicroBatch:
    layout = Layout(prefix, tuple(length - prefix for length, *_ in rows))
    input_ids = list(rows[0][1].token_ids[:prefix])
    position_ids = list(range(prefix))
    sources, targets, engine_logprobs, advantages = [], [], [], []
    for length, trajectory, advantage in rows:
        start = len(input_ids)
        input_ids += trajectory.token_ids[prefix:length]
        position_ids += range(prefix, length)
        for t, sampled in enumerate(trajectory.loss_mask):
            if sampled:
                sources.append(t - 1 if t <= prefix else start + t - 1 - prefix)
                targets.append(trajectory.token_ids[t])
                engine_logprobs.append(trajectory.engine_logprobs[t])
                advantages.append(advantage)
    padding = [0] * layout.padded
    return MicroBatch(
        layout=layout,
        input_ids=torch.tensor([input_ids + padding]),
        position_ids=torch.tensor([position_ids + padding]),
        sources=torch.tensor(sources),
        targets=torch.tensor(targets),
        engine_logprobs=torch.tensor(engine_logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
    )
