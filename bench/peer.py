"""What the TRL peer is asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PeerSpec:
    """The same work as a round of ours."""

    model: str
    shots: int
    prompts: int
    group_size: int
    tokens: int
    rank: int
    threads: int
    batch: int  # episodes a forward and backward pass
