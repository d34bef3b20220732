"""Included by the rollout worker of the round benchmarks: no token ends a turn, so that each has exactly max_tokens."""

from __future__ import annotations

from collections.abc import Sequence

from workers.rollout import worker
from workers.rollout.chat import Chat


class EndlessChat(Chat):
    def __init__(self, tokenizer, stop_ids: Sequence[int] = ()) -> None:  # type: ignore[no-untyped-def]
        super().__init__(tokenizer, stop_ids)
        self.stop_ids = ()


worker.Chat = EndlessChat  # type: ignore[misc]
