"""One GRPO update: adapter, optimizer state and a round's groups in, new adapter, state and metrics out.

Nothing is kept between updates but the frozen base model, and inputs are never written to: an update depends on its
arguments alone, whatever ran before it in this process.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from app.errors import AdapterInvalid, NonFinite
from app.specs.job import HyperparametersSpec
from workers.lora import LoraWeights
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
class PackedGroup:
    batches: list[MicroBatch]
    signal: bool


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

    def __init__(self, model_path: Path, dtype: torch.dtype, *, threads: int, microbatch_tokens: int) -> None:
        self.threads = threads
        self.microbatch_tokens = microbatch_tokens
        torch.set_num_threads(1)  # a team for the thread that updates alone: with a second one libgomp's barriers sleep
        self.model = LoraModel(model_path, dtype)

    def update(
        self,
        adapter: LoraWeights,
        optimizer: OptimizerState,
        groups: Sequence[Group],
        hyperparameters: HyperparametersSpec,
        temperature: float,
        progress: Progress = lambda done, total: None,
    ) -> UpdateResult:
        """Trains on a round's groups (in group order, survivors in order of index); `progress` after each micro-batch.

        The loss of a round is the sum over its tokens divided by all its loss tokens, those of groups without signal
        included; they and lone survivors have advantage 0 and are not computed unless there is a KL term. With several
        minibatches each step's divisor is the round's share, so that every token weighs the same; a minibatch without
        signal takes no step. Metrics that are means over tokens speak of the computed tokens, and are absent when there
        are none. Raises InvalidRequest (a trajectory that does not fit), AdapterInvalid (adapter or optimizer state
        does not fit the model), NonFinite (reward, loss, gradient or adapter: nothing may be committed).
        """
        started = time.monotonic()
        torch.set_num_threads(self.threads)  # counts are kept a thread, and any thread may call
        h = hyperparameters
        check_trajectories(groups, self.microbatch_tokens)
        self.model.check_fits(adapter.tensors, adapter.rank)
        metrics = round_metrics(groups) | {"learning_rate": h.learning_rate}

        minibatches = [m for m in self._pack_minibatches(groups, h) if any(group.signal for group in m)]
        if minibatches:
            update = Update(self.model, adapter, optimizer, h, temperature)
            update.run(minibatches, metrics["loss_tokens"] / min(h.minibatches, len(groups)), progress)
            metrics |= update.metrics() | {"loss": update.sums.loss / metrics["loss_tokens"]}
            adapter, optimizer = update.new_adapter(), update.new_optimizer()
        metrics["seconds"] = time.monotonic() - started
        return UpdateResult(adapter, optimizer, metrics, signal=bool(minibatches))

    def _pack_minibatches(self, groups: Sequence[Group], h: HyperparametersSpec) -> list[list[PackedGroup]]:
        """Groups in contiguous minibatches of even size; groups that add nothing to the loss have no micro-batches."""
        packed = []
        for group in groups:
            values = advantages([trajectory.reward for trajectory in group], h.advantage_scale)
            signal = any(values)
            computed = signal or h.kl_coefficient > 0
            packed.append(PackedGroup(pack_group(group, values, self.microbatch_tokens) if computed else [], signal))
        count = min(h.minibatches, len(packed))
        bounds = [round(i * len(packed) / count) for i in range(count + 1)] if count else []
        return [packed[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


class Update:
    """The mutable state of one update: masters and moments as flat float32 copies, and sums for the metrics."""

    def __init__(
        self,
        model: LoraModel,
        adapter: LoraWeights,
        optimizer: OptimizerState,
        hyperparameters: HyperparametersSpec,
        temperature: float,
    ) -> None:
        self.model, self.adapter, self.h, self.temperature = model, adapter, hyperparameters, temperature
        self.layout = FlatLayout(adapter.tensors)
        self.master = self.layout.flatten(adapter.tensors).requires_grad_()
        self.exp_avg = self.layout.flatten(optimizer.exp_avg)
        self.exp_avg_sq = self.layout.flatten(optimizer.exp_avg_sq)
        self.step_count = optimizer.step
        self.sums = TokenSums()
        self.norms: list[float] = []

    def run(self, minibatches: Sequence[Sequence[PackedGroup]], divisor: float, progress: Progress) -> None:
        """All optimizer steps of a round. Ratios are against the policy before the first step."""
        counts = [sum(len(group.batches) for group in groups) for groups in minibatches]
        ticks = itertools.count(1)

        def tick() -> None:
            progress(next(ticks), sum(counts) + sum(counts[1:]))

        # The first step's ratio is 1 by definition; later steps need what the policy said before it.
        old_logprobs = [None, *(self.logprobs(groups, tick) for groups in minibatches[1:])]
        for groups, old in zip(minibatches, old_logprobs, strict=True):
            gradient = self.gradient(groups, old, tick).div_(divisor)
            norm = clip_gradient(gradient, self.h.max_grad_norm)
            if not math.isfinite(norm):
                raise NonFinite(f"the gradient's norm is {norm}", param="gradient")
            self.norms.append(norm)
            self.step_count += 1
            with torch.no_grad():
                adamw_step(self.master, gradient, self.exp_avg, self.exp_avg_sq, self.step_count, self.h)

    def logprobs(self, groups: Sequence[PackedGroup], tick: Callable[[], None]) -> list[Tensor]:
        """Logprobs of the present policy, a tensor [n] a micro-batch, without a graph."""
        result = []
        for batch in (batch for group in groups for batch in group.batches):
            with torch.no_grad():
                self._set_policy()
                result.append(self.model.chosen_logprobs(batch, self.temperature)[0])
            tick()
        return result

    def gradient(
        self, groups: Sequence[PackedGroup], old_logprobs: Sequence[Tensor] | None, tick: Callable[[], None]
    ) -> Tensor:
        """The flat float32 gradient of the summed token losses, reduced group by group; adds to `sums`.

        `old_logprobs` has one tensor [n] a micro-batch; None: the current logprobs. Raises NonFinite (loss).
        """
        old = iter(old_logprobs) if old_logprobs is not None else None
        total = torch.zeros_like(self.master)
        for group in groups:
            group_total = torch.zeros_like(self.master)
            for batch in group.batches:
                reference = self._reference_logprobs(batch) if self.h.kl_coefficient else None
                self._set_policy()
                logprobs, entropies = self.model.chosen_logprobs(batch, self.temperature)
                losses, parts = token_losses(
                    logprobs,
                    logprobs.detach() if old is None else next(old),
                    batch.engine_logprobs,
                    batch.advantages,
                    reference,
                    self.h,
                )
                loss = losses.sum()
                if not torch.isfinite(loss):
                    raise NonFinite(f"the loss is {loss.item()}", param="loss")
                group_total += torch.autograd.grad(loss, self.master)[0]
                self.sums += TokenSums.of(losses, parts | {"entropy": entropies})
                tick()
            total += group_total
        return total

    def metrics(self) -> dict[str, float]:
        """Means over the computed tokens and over the steps."""
        return self.sums.means() | {"grad_norm": sum(self.norms) / len(self.norms)}

    def new_adapter(self) -> LoraWeights:
        """The adapter after the steps taken. Raises NonFinite naming a tensor."""
        tensors = self.layout.unflatten(self.master.detach())
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise NonFinite(f"adapter tensor {name} holds NaN or infinity after the step", param=name)
        return replace(self.adapter, tensors=tensors)

    def new_optimizer(self) -> OptimizerState:
        unflatten = self.layout.unflatten
        return OptimizerState(self.step_count, unflatten(self.exp_avg), unflatten(self.exp_avg_sq))

    def _set_policy(self) -> None:
        # The cast is part of the graph: its gradient goes straight through to the float32 masters.
        self.model.set_adapter(self.layout.views(self.master.to(self.model.dtype)), self.adapter.scaling)

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        self.model.set_adapter({}, 0.0)
        with torch.no_grad():
            return self.model.chosen_logprobs(batch, self.temperature)[0]
