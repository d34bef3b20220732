"""Micro-batches: rows of one group behind their common prefix, which is computed once, within a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

import torch
from torch import Tensor

from app.errors import InvalidRequest
from workers.training.grpo import Group, Trajectory


@dataclass(frozen=True)
class Layout:
    """Packed positions: `prefix` shared tokens, then `rows` padded suffixes of `width` tokens each."""

    prefix: int
    rows: int
    width: int

    @property
    def tokens(self) -> int:
        return self.prefix + self.rows * self.width


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
    """Splits a group into micro-batches of at most `microbatch_tokens` packed positions, rows of like length together.

    Depends on nothing but its arguments. Rows without a loss token are left out.
    """
    rows = [(input_length(t), t, advantage) for t, advantage in zip(group, advantages, strict=True)]
    rows = sorted((row for row in rows if row[0]), key=lambda row: (-row[0], row[1].index))
    prefix = len(commonprefix([list(t.token_ids[:length]) for length, t, _ in rows]))

    batches: list[list[tuple[int, Trajectory, float]]] = []
    for row in rows:
        # Rows come longest first, so the first row of a batch sets its width.
        if not batches or prefix + (len(batches[-1]) + 1) * (batches[-1][0][0] - prefix) > microbatch_tokens:
            batches.append([])
        batches[-1].append(row)
    return [_pack(batch, prefix) for batch in batches]


def _pack(rows: list[tuple[int, Trajectory, float]], prefix: int) -> MicroBatch:
    layout = Layout(prefix, len(rows), width=rows[0][0] - prefix)
    input_ids = list(rows[0][1].token_ids[:prefix])
    position_ids = list(range(prefix))
    sources, targets, engine_logprobs, advantages = [], [], [], []
    for i, (length, trajectory, advantage) in enumerate(rows):
        start = prefix + i * layout.width
        # Padding comes after a row's own tokens, where causal attention hides it from them.
        input_ids += [*trajectory.token_ids[prefix:length], *[0] * (prefix + layout.width - length)]
        position_ids += range(prefix, prefix + layout.width)
        for t, sampled in enumerate(trajectory.loss_mask):
            if sampled:
                sources.append(t - 1 if t <= prefix else start + t - 1 - prefix)
                targets.append(trajectory.token_ids[t])
                engine_logprobs.append(trajectory.engine_logprobs[t])
                advantages.append(advantage)
    return MicroBatch(
        layout=layout,
        input_ids=torch.tensor([input_ids]),
        position_ids=torch.tensor([position_ids]),
        sources=torch.tensor(sources),
        targets=torch.tensor(targets),
        engine_logprobs=torch.tensor(engine_logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
    )
