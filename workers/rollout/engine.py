"""The engine protocol: token ids in, token ids and logprobs out, many adapters in one batch.

Source of the contract: vLLM's AsyncLLM with LoRA requests; the torch engine and the vLLM engine keep it alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from app.errors import InvalidRequest
from app.specs.job import LEAST_TEMPERATURE

FinishReason = Literal["stop", "length", "abort"]
Pool = Literal["rollout", "chat"]  # each has rows and adapter slots of its own, so that neither starves the other


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_tokens: int
    temperature: float = 1.0  # 0: greedy, logprobs then of the softmax at temperature 1
    top_p: float = 1.0
    seed: int = 0  # fixes this request's own random stream
    stop_ids: tuple[int, ...] = ()  # a sampled stop id ends the request and is part of the result


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    id: str  # unique among live requests
    token_ids: Sequence[int]
    adapter: str | None  # key given to `load_adapter`; None: the base model
    sampling: SamplingParams
    priority: int = 0  # lower goes first in its pool; returning turns go before new episodes
    pool: Pool = "rollout"


def check_request(request: GenerationRequest, rows: int, vocab_size: int, max_length: int) -> None:
    """Raises InvalidRequest, with the numbers, for what an engine with `rows` rows of `max_length` cannot serve."""
    ids, sampling = request.token_ids, request.sampling
    if not rows:
        raise InvalidRequest(f"this engine has no rows for the {request.pool} pool", param="pool")
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        raise InvalidRequest(f"token_ids must be 1 or more ids under {vocab_size}", param="token_ids")
    if sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {sampling.max_tokens}; must be at least 1", param="max_tokens")
    if len(ids) + sampling.max_tokens > max_length:
        raise InvalidRequest(
            f"{len(ids)} prompt tokens and max_tokens {sampling.max_tokens} make {len(ids) + sampling.max_tokens}, "
            f"over this engine's {max_length} tokens a request",
            param="max_tokens",
        )
    if not (sampling.temperature == 0 or LEAST_TEMPERATURE <= sampling.temperature < math.inf):
        raise InvalidRequest(
            f"temperature is {sampling.temperature}; must be 0, or {LEAST_TEMPERATURE} or more", param="temperature"
        )
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p is {sampling.top_p}; must be over 0 and at most 1", param="top_p")
    if sampling.seed < 0:
        raise InvalidRequest(f"seed is {sampling.seed}; must be 0 or more", param="seed")


@dataclass(frozen=True, slots=True)
class GenerationResult:
    token_ids: list[int]
    logprobs: list[
        float
    ]  # of each chosen token under the distribution it was sampled from (after temperature and top-p)
    finish_reason: FinishReason
    adapter_digest: str | None  # weights digest read from the slot that served the request; None: base model


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Slots, running and waiting requests are those of the rollout pool, unless their names say chat."""

    slots: int  # rows decoded at once
    running: int
    waiting: int
    adapter_slots: int
    chat_slots: int = 0  # rows, and adapter slots, beside those
    chat_running: int = 0
    chat_waiting: int = 0
    resident: dict[str, str] = field(default_factory=dict)  # adapter key -> weights digest
    steps: int = 0  # decode steps since start: progress, for leases
    generated_tokens: int = 0
    tokens_per_second: float = 0.0  # over the last seconds
    busy_seconds: float = 0.0  # time spent with work since start
    kv_usage: float = 0.0  # share of the key/value cache in use, where the engine pages it
    prefix_hit_rate: float = 0.0  # share of the latest prompts' tokens found in the prefix cache


class Engine(Protocol):
    def generate(
        self, request: GenerationRequest, on_token: Callable[[int, float], None] | None = None
    ) -> Future[GenerationResult]:
        """Queues a request. The future raises AdapterInvalid, ObjectMissing or InvalidRequest (what does not fit)."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request early with reason `abort`; unknown ids are ignored."""
        ...

    def load_adapter(self, key: str, folder: Path) -> str:
        """Registers PEFT adapter files under `key` (never reused for other weights) and returns the weights digest.

        Raises AdapterInvalid when a tensor is not finite or does not fit, ObjectMissing when a file is gone.
        """
        ...

    def unload_adapter(self, key: str) -> None: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...
