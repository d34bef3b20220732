"""Groups computed ahead of their round, while its other groups are still rolled out and the trainer is idle.

Still strictly on policy, as no weights move before the commit. A group's sums are kept in memory only, under a digest
of everything that they depend on: the update asks by the digest of what it was given, so that nothing but its own sums
can be used, and the result is bit for bit that of an update without them.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from app.manager.buffer import RoundInput
from workers.lora import LoraWeights
from workers.training.grpo import Group, advantages
from workers.training.trainer import GroupSums, Progress, Trainer


@dataclass(frozen=True)
class Known:
    sums: GroupSums
    seconds: float  # that they took


class Streaming:
    """Of one thread, the trainer's. Holds at most `max_bytes` of gradients; what would go past it is not computed."""

    def __init__(self, trainer: Trainer, load_adapter: Callable[[RoundInput], LoraWeights], max_bytes: int) -> None:
        self._trainer, self._load_adapter, self._max_bytes = trainer, load_adapter, max_bytes
        self._sums: dict[int, dict[str, Known]] = {}  # by round and digest
        self._adapter: tuple[str, LoraWeights] | None = None  # the last one: a round's groups share it

    @property
    def rounds(self) -> set[int]:
        return set(self._sums)

    def compute(self, source: RoundInput, group: Group, progress: Progress) -> bool:
        """Computes and keeps a group's sums; False where it adds nothing, is there already, or has no room.

        Raises as the update itself would.
        """
        h = source.spec.hyperparameters
        signal = any(advantages([trajectory.reward for trajectory in group], h.advantage_scale))
        if not (signal or (group and h.kl_coefficient > 0)):
            return False
        adapter = self._adapter_of(source)
        kept = self._sums.setdefault(source.round_id, {})
        key = digest(source, group)
        if key in kept or self._bytes() + 4 * sum(t.numel() for t in adapter.tensors.values()) > self._max_bytes:
            return False
        started = time.monotonic()
        sums = self._trainer.group_sums(adapter, group, h, source.spec.sampling.temperature, progress)
        kept[key] = Known(sums, time.monotonic() - started)
        return True

    def known(self, source: RoundInput, groups: Sequence[Group]) -> dict[int, Known]:
        """What is known of these groups, by position."""
        kept = self._sums.get(source.round_id)
        if not kept:
            return {}
        found = {position: kept.get(digest(source, group)) for position, group in enumerate(groups)}
        return {position: known for position, known in found.items() if known is not None}

    def keep_only(self, round_ids: Collection[int]) -> None:
        for gone in self.rounds - set(round_ids):
            del self._sums[gone]

    def forget(self, round_id: int) -> None:
        self._sums.pop(round_id, None)

    def _bytes(self) -> int:
        return sum(k.sums.gradient.nbytes for kept in self._sums.values() for k in kept.values())

    def _adapter_of(self, source: RoundInput) -> LoraWeights:
        key = source.adapter.sha256 + source.config.sha256
        if self._adapter is None or self._adapter[0] != key:
            self._adapter = key, self._load_adapter(source)
        return self._adapter[1]


def digest(source: RoundInput, group: Group) -> str:
    """SHA-256 over all that a group's sums depend on, but for what is the same for all of a process's life."""
    sha = hashlib.sha256()
    settings = f"{source.spec.hyperparameters.model_dump_json()} {source.spec.sampling.temperature!r}"
    sha.update(f"{source.adapter.sha256} {source.config.sha256} {source.weights_digest} {settings}\n".encode())
    for t in group:
        sha.update(f"{t.index} {t.reward!r} {t.truncated}\n".encode())
        for code, values in (("q", t.token_ids), ("b", t.loss_mask), ("d", t.engine_logprobs)):
            sha.update(f"{len(values)}:".encode() + array(code, values).tobytes())
    return sha.hexdigest()
