"""One GRPO update: adapter, optimizer state and a round's groups in, new adapter, state and metrics out.

Nothing is kept between updates but the frozen base model, and inputs are never written to: an update depends on its
arguments alone, whatever ran before it in this process.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from app.errors import AdapterInvalid, NonFinite
from app.specs.job import HyperparametersSpec
from workers.lora import LoraWeights
from workers.malloc import keep_freed_memory
from workers.training.grpo import Group, TokenSums, advantages, round_metrics, token_losses
from workers.training.lora_model import LoraModel
from workers.training.optimizer import OptimizerState, adamw_step, clip_gradient
from workers.training.packing import MicroBatch, check_trajectories, pack_group

Progress = Callable[[int, int], None]  # micro-batches done, in all


@dataclass(frozen=True)
class UpdateResult:
    adapter: LoraWeights
    optimizer: OptimizerState
    metrics: dict[str, float]
    signal: bool  # False: adapter and optimizer are the very ones that came in


@dataclass(frozen=True)
class GroupSums:
    """What one group adds to its round, unnormalised: sums over the group's loss tokens."""

    gradient: Tensor  # [adapter parameters] float32, in order of tensor name
    tokens: TokenSums


@dataclass(frozen=True)
class PackedGroup:
    """A group's micro-batches, none when it adds nothing to the loss; or the sums that are known already."""

    batches: list[MicroBatch]
    signal: bool
    sums: GroupSums | None = None


def can_stream(hyperparameters: HyperparametersSpec) -> bool:
    """Whether a group's sums may be computed before its round is complete: one step, so that no weights move."""
    return hyperparameters.minibatches == 1


class FlatLayout:
    """An adapter's tensors as slices of one flat vector, in order of name: one cast, one norm, one optimizer step."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tensors[name].shape for name in sorted(tensors)}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A float32 copy of all tensors, end to end. Raises AdapterInvalid if names or shapes differ."""
        if {name: tensor.shape for name, tensor in tensors.items()} != self.shapes:
            raise AdapterInvalid("optimizer state and adapter do not hold the same tensors")
        return torch.cat([tensors[name].reshape(-1).to(torch.float32) for name in self.shapes])

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)}

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Tensors of their own memory, by name."""
        return {name: view.clone() for name, view in self.views(flat).items()}


class Trainer:
    """Holds the frozen base model; one update at a time."""

    def __init__(
        self,
        model_path: Path,
        dtype: torch.dtype,
        *,
        threads: int,
        microbatch_tokens: int,
        gradient_checkpointing: bool = False,
        device: str = "cpu",
    ) -> None:
        self.threads = threads
        self.microbatch_tokens = microbatch_tokens
        torch.set_num_threads(1)  # a team for the thread that updates alone: with a second one libgomp's barriers sleep
        self.model = self.load_model(model_path, dtype, gradient_checkpointing, device)
        keep_freed_memory()  # not that of loading

    def load_model(self, model_path: Path, dtype: torch.dtype, gradient_checkpointing: bool, device: str) -> LoraModel:
        return LoraModel(model_path, dtype, gradient_checkpointing, device)

    def close(self) -> None:
        """Ends what it has started beside this process, if anything."""

    def policy(self, adapter: LoraWeights, hyperparameters: HyperparametersSpec, temperature: float) -> Policy:
        return Policy(self.model, adapter, hyperparameters, temperature)

    def update(
        self,
        adapter: LoraWeights,
        optimizer: OptimizerState,
        groups: Sequence[Group],
        hyperparameters: HyperparametersSpec,
        temperature: float,
        progress: Progress = lambda done, total: None,
        sums: Mapping[int, GroupSums] = MappingProxyType({}),
    ) -> UpdateResult:
        """Trains on a round's groups (in group order, survivors in order of index); `progress` after each micro-batch.

        The loss of a round is the sum over its tokens divided by all its loss tokens, those of groups without signal
        included; they and lone survivors have advantage 0 and are not computed unless there is a KL term. With several
        minibatches each step's divisor is the round's share, so that every token weighs the same; a minibatch without
        signal takes no step. Metrics that are means over tokens speak of the computed tokens, and are absent when there
        are none. `sums`, by position in `groups`, are what `group_sums` gave for the same arguments: taken instead of
        computed, the result is the same bit for bit (only where `can_stream`). Raises InvalidRequest (a trajectory that
        does not fit), AdapterInvalid (adapter or optimizer state does not fit the model), NonFinite (reward, loss,
        gradient or adapter: nothing may be committed).
        """
        started = time.monotonic()
        h = hyperparameters
        if sums and not can_stream(h):
            raise ValueError("sums of groups are of no use to a round of several steps")
        self._prepare(adapter, groups)
        metrics = round_metrics(groups) | {"learning_rate": h.learning_rate}

        packed = [self._pack(group, h, sums.get(position)) for position, group in enumerate(groups)]
        minibatches = [m for m in split_evenly(packed, h.minibatches) if any(group.signal for group in m)]
        if minibatches:
            update = Update(self.policy(adapter, h, temperature), optimizer)
            update.run(minibatches, metrics["loss_tokens"] / min(h.minibatches, len(groups)), progress)
            metrics |= update.metrics() | {"loss": update.tokens.loss / metrics["loss_tokens"]}
            adapter, optimizer = update.new_adapter(), update.new_optimizer()
        metrics["seconds"] = time.monotonic() - started
        return UpdateResult(adapter, optimizer, metrics, signal=bool(minibatches))

    def group_sums(
        self,
        adapter: LoraWeights,
        group: Group,
        hyperparameters: HyperparametersSpec,
        temperature: float,
        progress: Progress = lambda done, total: None,
    ) -> GroupSums:
        """One group's share of a round of one step, for `update`'s `sums`; depends on its arguments alone.

        A group without signal gives zeros at no cost. Raises as `update` does.
        """
        self._prepare(adapter, [group])
        packed = self._pack(group, hyperparameters, None)
        policy = self.policy(adapter, hyperparameters, temperature)
        return next(policy.group_sums([packed], None, ticker(progress, len(packed.batches))))

    def _prepare(self, adapter: LoraWeights, groups: Sequence[Group]) -> None:
        torch.set_num_threads(self.threads)  # counts are kept a thread, and any thread may call
        check_trajectories(groups, self.microbatch_tokens)
        self.model.check_fits(adapter.tensors, adapter.rank)

    def _pack(self, group: Group, h: HyperparametersSpec, sums: GroupSums | None) -> PackedGroup:
        values = advantages([trajectory.reward for trajectory in group], h.advantage_scale)
        signal = any(values)
        computed = sums is None and (signal or h.kl_coefficient > 0)
        return PackedGroup(pack_group(group, values, self.microbatch_tokens) if computed else [], signal, sums)


def split_evenly(groups: Sequence[PackedGroup], parts: int) -> list[Sequence[PackedGroup]]:
    """At most `parts` contiguous parts, none of them empty."""
    parts = min(parts, len(groups))
    bounds = [round(i * len(groups) / parts) for i in range(parts + 1)] if parts else []
    return [groups[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


def ticker(progress: Progress, total: int) -> Callable[[], None]:
    """Calls `progress` with 1, 2, … of `total`."""
    ticks = itertools.count(1)
    return lambda: progress(next(ticks), total)


class Policy:
    """An adapter on the base model, as one flat float32 vector of masters, and what it says of a group."""

    def __init__(
        self, model: LoraModel, adapter: LoraWeights, hyperparameters: HyperparametersSpec, temperature: float
    ) -> None:
        self.model, self.weights, self.h, self.temperature = model, adapter, hyperparameters, temperature
        self.layout = FlatLayout(adapter.tensors)
        self.master = self.layout.flatten(adapter.tensors)
        self.refresh()

    def refresh(self) -> None:
        """Takes the masters as they are now, cast to the model's dtype."""
        views = self.layout.views(self.master.to(self.model.device, self.model.dtype, copy=True))
        tensors = {name: view.requires_grad_() for name, view in views.items()}
        self.adapter = self.model.fuse(tensors, self.weights.scaling)

    def logprobs(self, groups: Sequence[PackedGroup], tick: Callable[[], None]) -> list[Tensor]:
        """Logprobs of the present policy, a tensor [n] a micro-batch, without a graph."""
        result = []
        for logprobs in self.logprobs_of([batch for group in groups for batch in group.batches]):
            result.append(logprobs)
            tick()
        return result

    def group_sums(
        self, groups: Sequence[PackedGroup], old_logprobs: Sequence[Tensor] | None, tick: Callable[[], None]
    ) -> Iterator[GroupSums]:
        """Each group's sums, in order. `old_logprobs` has a tensor [n] for each micro-batch; None: the current ones.

        Raises NonFinite (loss).
        """
        parts = self.sums_of([batch for group in groups for batch in group.batches], old_logprobs)
        for group in groups:
            total = group.sums or GroupSums(torch.zeros_like(self.master), TokenSums())
            for sums in itertools.islice(parts, len(group.batches)):
                total = GroupSums(total.gradient.add_(sums.gradient), total.tokens + sums.tokens)
                tick()
            yield total

    def logprobs_of(self, batches: Sequence[MicroBatch]) -> Iterator[Tensor]:
        """`batch_logprobs` of each, in order."""
        return map(self.batch_logprobs, batches)

    def sums_of(self, batches: Sequence[MicroBatch], old_logprobs: Sequence[Tensor] | None) -> Iterator[GroupSums]:
        """`batch_sums` of each, in order."""
        return map(self.batch_sums, batches, old_logprobs or itertools.repeat(None))

    def batch_logprobs(self, batch: MicroBatch) -> Tensor:
        with torch.no_grad():
            return self.model.chosen_logprobs(batch, self.temperature, self.adapter)[0]

    def batch_sums(self, batch: MicroBatch, old_logprobs: Tensor | None) -> GroupSums:
        """Sums over a micro-batch's loss tokens. Raises NonFinite (loss), after both passes: ranks stay in step."""
        reference = None
        if self.h.kl_coefficient:
            with torch.no_grad():
                reference, _ = self.model.chosen_logprobs(batch, self.temperature, self.model.bare)
        logprobs, entropies = self.model.chosen_logprobs(batch, self.temperature, self.adapter)
        losses, parts = token_losses(
            logprobs,
            logprobs.detach() if old_logprobs is None else old_logprobs,
            batch.engine_logprobs,
            batch.advantages,
            reference,
            self.h,
        )
        loss = losses.sum()
        # By the cast: its gradient goes straight through to the float32 masters.
        tensors = self.adapter.tensors
        gradients = torch.autograd.grad(loss, list(tensors.values()))
        gradient = self.layout.flatten(dict(zip(tensors, gradients, strict=True))).cpu()
        if not torch.isfinite(loss):
            raise NonFinite(f"the loss is {loss.item()}", param="loss")
        return GroupSums(gradient, TokenSums.of(losses, parts | {"entropy": entropies}))


class Update:
    """The mutable state of one update: a policy that moves, flat copies of its moments, sums for the metrics."""

    def __init__(self, policy: Policy, optimizer: OptimizerState) -> None:
        self.policy = policy
        self.exp_avg = policy.layout.flatten(optimizer.exp_avg)
        self.exp_avg_sq = policy.layout.flatten(optimizer.exp_avg_sq)
        self.step_count = optimizer.step
        self.tokens = TokenSums()
        self.norms: list[float] = []

    def run(self, minibatches: Sequence[Sequence[PackedGroup]], divisor: float, progress: Progress) -> None:
        """All optimizer steps of a round. Ratios are against the policy before the first step."""
        counts = [sum(len(group.batches) for group in groups) for groups in minibatches]
        tick = ticker(progress, sum(counts) + sum(counts[1:]))
        # The first step's ratio is 1 by definition; later steps need what the policy said before it.
        old_logprobs = [None, *(self.policy.logprobs(groups, tick) for groups in minibatches[1:])]
        for groups, old in zip(minibatches, old_logprobs, strict=True):
            self.step(self.gradient(groups, old, tick).div_(divisor))

    def gradient(
        self, groups: Sequence[PackedGroup], old_logprobs: Sequence[Tensor] | None, tick: Callable[[], None]
    ) -> Tensor:
        """The flat float32 gradient of the summed token losses, reduced in group order; adds to `tokens`."""
        total = torch.zeros_like(self.exp_avg)
        for sums in self.policy.group_sums(groups, old_logprobs, tick):
            total += sums.gradient
            self.tokens += sums.tokens
        return total

    def step(self, gradient: Tensor) -> None:
        """One optimizer step; the gradient is clipped in place. Raises NonFinite (gradient)."""
        h = self.policy.h
        norm = clip_gradient(gradient, h.max_grad_norm)
        if not math.isfinite(norm):
            raise NonFinite(f"the gradient's norm is {norm}", param="gradient")
        self.norms.append(norm)
        self.step_count += 1
        adamw_step(self.policy.master, gradient, self.exp_avg, self.exp_avg_sq, self.step_count, h)
        self.policy.refresh()

    def metrics(self) -> dict[str, float]:
        """Means over the computed tokens and over the steps."""
        return self.tokens.means() | {"grad_norm": sum(self.norms) / len(self.norms)}

    def new_adapter(self) -> LoraWeights:
        """The adapter after the steps taken. Raises NonFinite naming a tensor."""
        tensors = self.policy.layout.unflatten(self.policy.master)
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise NonFinite(f"adapter tensor {name} holds NaN or infinity after the step", param=name)
        return replace(self.policy.weights, tensors=tensors)

    def new_optimizer(self) -> OptimizerState:
        unflatten = self.policy.layout.unflatten
        return OptimizerState(self.step_count, unflatten(self.exp_avg), unflatten(self.exp_avg_sq))
