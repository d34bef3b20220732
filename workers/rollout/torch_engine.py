"""The embedded engine: continuous batching over a static key/value cache, many LoRA adapters in one batch.

One thread owns the model. Each step admits waiting requests into a wave, prefills one chunk of the wave, and decodes
one token for every live row. Live rows are always cache rows 0..n-1: the last one moves into the gap of a leaving one.
Rollouts and chat share the batch, but each pool has its own share of rows and adapter slots.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import structlog
import torch

from app.errors import AdapterInvalid, InfrastructureFault, InvalidRequest, MarlaasError
from workers.malloc import keep_freed_memory
from workers.rollout.attention import DecodeAttention, KVCache, PrefillAttention, Span
from workers.rollout.decoder import Decoder, on_device
from workers.rollout.engine import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Pool,
    check_request,
)
from workers.rollout.sampling import RowParams, Sampled, random_stream, sample
from workers.rollout.slots import AdapterBatch, AdapterRows, AdapterSlots, Slot

PREFILL_TOKENS = 512  # most prompt tokens between two decode steps, so that a long prompt does not stall its neighbours
SHARED_TOKENS = 16  # a common prefix at least this long is worth waiting one wave for
RATE_SECONDS = 5.0  # window of tokens_per_second

log = structlog.get_logger(__name__)
OnToken = Callable[[int, float], None]


@dataclass(eq=False)
class Row:
    """A request and what it has generated."""

    request: GenerationRequest
    future: Future[GenerationResult]
    on_token: OnToken | None
    slot: Slot | None = None
    uniforms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    aborted: bool = False
    error: MarlaasError | None = None
    finish: FinishReason | None = None

    @property
    def position(self) -> int:
        """Of the last generated token, whose keys and values are not yet in the cache."""
        return len(self.request.token_ids) + len(self.tokens) - 1

    def take(self, token: int, logprob: float, finite: bool) -> None:
        """Records a sampled token and decides whether the request ends."""
        if not finite:
            whose = "the base model" if self.slot is None else f"adapter {self.slot.key}"
            kind = InfrastructureFault if self.slot is None else AdapterInvalid
            self.error = kind(f"{whose} gave logits that are not finite")
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.on_token is not None:
            try:
                self.on_token(token, logprob)
            except Exception as error:  # the caller's own code: its request fails, nobody else's
                self.error = InfrastructureFault(f"the token callback raised {error!r}")
        if token in self.request.sampling.stop_ids:
            self.finish = "stop"
        elif len(self.tokens) == self.request.sampling.max_tokens:
            self.finish = "length"

    @property
    def ended(self) -> bool:
        return self.aborted or self.error is not None or self.finish is not None

    def resolve(self) -> None:
        if self.error is not None:
            self.future.set_exception(self.error)
            return
        digest = self.slot.digest if self.slot is not None else None
        self.future.set_result(GenerationResult(self.tokens, self.logprobs, self.finish or "abort", digest))


@dataclass(eq=False)
class Prompt:
    """One prompt of a wave and the rows that share it: a group's episodes are prefilled once."""

    token_ids: list[int]
    slot: Slot | None
    rows: list[Row]
    filled: int  # tokens whose keys and values are in the cache
    logits: torch.Tensor | None = None  # [vocab], once all of it is


@dataclass(frozen=True, slots=True)
class Share:
    """What one pool may use at once."""

    rows: int
    adapters: int


@dataclass(eq=False)
class Wave:
    """Prompts that are prefilled together, in the cache rows from `base` on, above the live rows."""

    base: int
    prompts: list[Prompt]


class TorchEngine:
    """Implements `Engine` on the CPU, or on any other `device` of PyTorch."""

    def __init__(
        self,
        model_path: Path,
        dtype: torch.dtype,
        *,
        slots: int,
        adapter_slots: int,
        kv_tokens: int,
        max_lora_rank: int,
        threads: int,
        chat_slots: int = 0,
        device: str = "cpu",
    ) -> None:
        """`slots`: rollouts decoded at once; `kv_tokens`: cache of their rows; `threads`: of torch, in the decode
        thread; `chat_slots`: rows of the same length, and adapter slots, for the chat pool beside those."""
        torch.set_num_threads(1)
        keep_freed_memory()
        self._device = device
        with on_device(device):
            self.decoder = Decoder(model_path, dtype, rows=slots)
        self.max_length = min(self.decoder.context, kv_tokens // slots)  # of one request, prompt included
        layers = len(self.decoder.layers)
        rows = slots + chat_slots
        self._cache = KVCache(
            layers, rows, self.decoder.kv_heads, self.max_length, self.decoder.head_dim, dtype, device
        )
        self._adapters = AdapterSlots(
            adapter_slots + chat_slots, self.decoder.shapes, layers, dtype, max_lora_rank, device
        )
        self._shares: dict[Pool, Share] = {
            "rollout": Share(slots, adapter_slots),
            "chat": Share(chat_slots, chat_slots),
        }
        self._turns: deque[Pool] = deque(self._shares)  # the first one is the first to fill the next wave

        self._wake = threading.Condition()  # guards the five below
        self._waiting: dict[Pool, list[tuple[int, int, Row]]] = {  # heaps of priority, order of arrival, row
            pool: [] for pool in self._shares
        }
        self._requests: dict[str, Row] = {}
        self._order = count()
        self._aborts = False  # a request was aborted since the last step
        self._closed = False

        self._rows: list[Row] = []  # row i lives in cache row i
        self._wave: Wave | None = None
        self._batch: tuple[RowParams, AdapterRows | None] | None = None  # of `_rows`; None: they changed
        self._stacked = AdapterBatch(self.decoder.shapes, layers)
        self._held: set[Slot] = set()  # those in it

        self._steps = self._generated = 0
        self._busy = 0.0
        self._recent: deque[tuple[float, int]] = deque()  # (when, tokens) of the last steps
        team_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(threads, team_ready), name="torch-engine", daemon=True)
        self._thread.start()
        # A team for the decode thread alone: where two threads of a process have one, libgomp's barriers sleep.
        team_ready.wait()
        torch.set_num_threads(1)

    # -- called from any thread

    def generate(self, request: GenerationRequest, on_token: OnToken | None = None) -> Future[GenerationResult]:
        row = Row(request, Future(), on_token)
        row.future.set_running_or_notify_cancel()  # `abort` is the way to end a request early
        try:
            check_request(request, self._shares[request.pool].rows, self.decoder.vocab_size, self.max_length)
        except InvalidRequest as error:
            row.future.set_exception(error)
            return row.future
        row.uniforms = random_stream(request.sampling.seed, request.sampling.max_tokens)
        with self._wake:
            if self._closed:
                row.future.set_exception(InfrastructureFault("the engine is closed"))
            elif request.id in self._requests:
                row.future.set_exception(InvalidRequest(f"request {request.id} is already live", param="id"))
            else:
                self._requests[request.id] = row
                heapq.heappush(self._waiting[request.pool], (request.priority, next(self._order), row))
                self._wake.notify()
        return row.future

    def abort(self, request_id: str) -> None:
        with self._wake:
            if request_id in self._requests:
                self._requests[request_id].aborted = True
                self._aborts = True

    def load_adapter(self, key: str, folder: Path) -> str:
        return self._adapters.register(key, folder)

    def unload_adapter(self, key: str) -> None:
        self._adapters.remove(key)

    def stats(self) -> EngineStats:
        with self._wake:
            now = time.monotonic()
            recent = [(when, tokens) for when, tokens in self._recent if now - when <= RATE_SECONDS]
            waiting = {pool: len(heap) for pool, heap in self._waiting.items()}
            live = Counter(row.request.pool for row in self._requests.values())
            return EngineStats(
                slots=self._shares["rollout"].rows,
                running=live["rollout"] - waiting["rollout"],
                waiting=waiting["rollout"],
                adapter_slots=self._shares["rollout"].adapters,
                chat_slots=self._shares["chat"].rows,
                chat_running=live["chat"] - waiting["chat"],
                chat_waiting=waiting["chat"],
                resident=self._adapters.resident(),
                steps=self._steps,
                generated_tokens=self._generated,
                tokens_per_second=sum(tokens for _, tokens in recent) / RATE_SECONDS,
                busy_seconds=self._busy,
            )

    def close(self) -> None:
        """Stops the decode thread; requests that have not ended fail with InfrastructureFault."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    # -- the decode thread

    def _run(self, threads: int, team_ready: threading.Event) -> None:
        torch.set_num_threads(threads)
        torch.get_num_threads()  # a thread's first use of torch sets it to the process's default: let that be now
        team_ready.set()
        with torch.inference_mode(), on_device(self._device):
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or self._requests)
                    if self._closed:
                        break
                started, generated = time.monotonic(), self._generated
                try:
                    self._step()
                except Exception as error:
                    log.exception("engine step failed")
                    self._fail_live(InfrastructureFault(f"the engine step failed: {error!r}"))
                now = time.monotonic()
                with self._wake:
                    self._busy += now - started
                    self._recent.append((now, self._generated - generated))
                    while now - self._recent[0][0] > RATE_SECONDS:
                        self._recent.popleft()
            with self._wake:
                rows = list(self._requests.values())
                for heap in self._waiting.values():
                    heap.clear()
            self._fail(rows, InfrastructureFault("the engine was closed"))

    def _step(self) -> None:
        self._steps += 1
        if self._aborts:
            self._drop_aborted()
        if self._wave is None:
            self._admit()
        self._fit_cache()
        if self._wave is not None:
            self._prefill(self._wave)
        if self._rows:
            self._decode()

    def _fit_cache(self) -> None:
        lengths, used = [row.position + 1 for row in self._rows], len(self._rows)
        if self._wave is not None:
            lengths += [len(prompt.token_ids) + 1 for prompt in self._wave.prompts]
            used = self._wave.base + len(self._wave.prompts)
        if lengths:
            self._cache.fit(max(lengths), used)

    def _drop_aborted(self) -> None:
        with self._wake:
            self._aborts = False
            dropped = []
            for pool, heap in self._waiting.items():
                dropped += [row for _, _, row in heap if row.aborted]
                self._waiting[pool] = [entry for entry in heap if not entry[2].aborted]
                heapq.heapify(self._waiting[pool])
        self._end(dropped)
        self._leave()

    def _admit(self) -> None:
        """Takes waiting requests into a new wave; the pools take turns in who is the first to fill it."""
        wave = Wave(base=len(self._rows), prompts=[])
        self._turns.rotate()
        for pool in self._turns:
            self._fill(wave, pool)
        self._wave = wave if wave.prompts else None

    def _fill(self, wave: Wave, pool: Pool) -> None:
        """Adds a pool's waiting requests, in order, while its rows, its adapter slots and prefill tokens last.

        A prompt that shares a prefix with one of the wave is held for the next wave, where it copies the prefix.
        The first request whose adapter finds no slot is the last: else a stream of others could starve it.
        """
        share, prompts = self._shares[pool], wave.prompts
        mine = [row for row in self._rows if row.request.pool == pool]
        free = share.rows - len(mine)
        adapters = {row.request.adapter for row in mine if row.request.adapter}
        tokens = sum(len(prompt.token_ids) - prompt.filled for prompt in prompts)
        held: list[tuple[int, int, Row]] = []
        while free and tokens < PREFILL_TOKENS and len(held) < share.rows:
            with self._wake:
                if not self._waiting[pool]:
                    break
                entry = heapq.heappop(self._waiting[pool])
            row = entry[2]
            adapter = row.request.adapter
            if adapter and adapter not in adapters and len(adapters) == share.adapters:
                held.append(entry)
                break
            try:
                slot = row.slot = self._adapters.acquire(adapter) if adapter else None
            except Exception as error:
                self._fail([row], error if isinstance(error, MarlaasError) else InfrastructureFault(repr(error)))
                continue
            if slot is None and adapter:
                held.append(entry)
                break
            ids = list(row.request.token_ids)
            peers = [prompt for prompt in prompts if prompt.slot is slot]
            same = next((prompt for prompt in peers if prompt.token_ids == ids), None)
            if same is not None:
                same.rows.append(row)
            else:
                source, shared = self._cached_prefix(ids, slot)
                if any(_common(ids, prompt.token_ids) >= shared + SHARED_TOKENS for prompt in peers):
                    if slot is not None:
                        self._adapters.release(slot)
                    held.append(entry)
                    continue
                self._cache.copy(source, wave.base + len(prompts), shared)
                prompts.append(Prompt(ids, slot, [row], filled=shared))
                tokens += len(ids) - shared
            free -= 1
            if adapter:
                adapters.add(adapter)
        with self._wake:
            for entry in held:
                heapq.heappush(self._waiting[pool], entry)

    def _cached_prefix(self, ids: list[int], slot: Slot | None) -> tuple[int, int]:
        """The live row whose prompt shares most with `ids` under the same adapter, and how many tokens are shared.

        At least the last token is left to compute: its logits are wanted.
        """
        shared = [
            _common(ids, row.request.token_ids) if row.slot is slot and not row.ended else 0 for row in self._rows
        ]
        longest = max(shared, default=0)
        return (shared.index(longest) if longest else 0), min(longest, len(ids) - 1)

    def _prefill(self, wave: Wave) -> None:
        """Runs the next chunk of the wave; the last one lets its rows join the batch."""
        spans: list[Span] = []
        ids: list[int] = []
        slots: list[Slot | None] = []
        done: list[tuple[Prompt, int]] = []  # prompts completed by this chunk, and where their last token is
        for place, prompt in enumerate(wave.prompts):
            taken = min(len(prompt.token_ids) - prompt.filled, PREFILL_TOKENS - len(ids))
            if not taken:
                continue
            start, prompt.filled = prompt.filled, prompt.filled + taken
            spans.append(Span(wave.base + place, start, prompt.filled))
            ids += prompt.token_ids[start : prompt.filled]
            slots += [prompt.slot] * taken
            if prompt.filled == len(prompt.token_ids):
                done.append((prompt, len(ids) - 1))
        attend = PrefillAttention(self._cache, spans, self.decoder.heads // self.decoder.kv_heads)
        hidden = self.decoder.forward(torch.tensor(ids), attend, self._lora(slots))
        if done:
            logits = self.decoder.logits(hidden[[last for _, last in done]])
            for (prompt, _), row in zip(done, logits, strict=True):
                prompt.logits = row
        if all(prompt.logits is not None for prompt in wave.prompts):
            self._join(wave)

    def _join(self, wave: Wave) -> None:
        """Samples the first token of every row of the wave and puts the rows behind the live ones.

        The prompts move down first, so that copies for rows that share one overwrite nothing that is still needed.
        """
        logits = torch.stack([prompt.logits for prompt in wave.prompts if prompt.logits is not None])
        first = len(self._rows)
        for place, prompt in enumerate(wave.prompts):
            self._cache.copy(wave.base + place, first + place, prompt.filled)
        joining = [(prompt.rows[0], place) for place, prompt in enumerate(wave.prompts)]
        for place, prompt in enumerate(wave.prompts):
            for row in prompt.rows[1:]:
                self._cache.copy(first + place, first + len(joining), prompt.filled)
                joining.append((row, place))
        rows = [row for row, _ in joining]
        uniforms = torch.tensor([row.uniforms[0] for row in rows])
        params = RowParams.of([row.request.sampling for row in rows])
        sampled = sample(logits[[place for _, place in joining]], uniforms, params)
        self._rows += rows
        self._wave = self._batch = None
        self._take(rows, sampled)

    def _decode(self) -> None:
        """One token for every live row."""
        rows = self._rows
        if self._batch is None:
            params = RowParams.of([row.request.sampling for row in rows])
            self._batch = params, self._lora([row.slot for row in rows])
        params, lora = self._batch
        attend = DecodeAttention(self._cache, torch.tensor([row.position for row in rows]))
        hidden = self.decoder.forward(torch.tensor([row.tokens[-1] for row in rows]), attend, lora)
        uniforms = torch.tensor([row.uniforms[len(row.tokens)] for row in rows])
        self._take(rows, sample(self.decoder.logits(hidden), uniforms, params))

    def _lora(self, slots: Sequence[Slot | None]) -> AdapterRows | None:
        """The LoRA branch for rows on these slots."""
        if not any(slots):
            return None
        active = {row.slot: None for row in self._live() if row.slot is not None}
        if active.keys() != self._held:
            self._held = set(active)
            self._stacked.hold(active)
            self._batch = None
        return self._stacked.rows(slots)

    def _take(self, rows: Sequence[Row], sampled: Sampled) -> None:
        values = zip(sampled.tokens.tolist(), sampled.logprobs.tolist(), sampled.finite.tolist(), strict=True)
        for row, (token, logprob, finite) in zip(rows, values, strict=True):
            row.take(token, logprob, finite)
        self._generated += len(rows)
        self._leave()

    def _leave(self) -> None:
        """Takes ended rows out of the batch; the last live row moves into each gap."""
        ended = [place for place, row in enumerate(self._rows) if row.ended]
        if not ended:
            return
        leaving = [self._rows[place] for place in ended]
        for place in reversed(ended):
            last = self._rows.pop()
            if place < len(self._rows):
                self._cache.copy(len(self._rows), place, last.position)
                self._rows[place] = last
        self._batch = None
        self._end(leaving)

    def _live(self) -> list[Row]:
        wave = [row for prompt in self._wave.prompts for row in prompt.rows] if self._wave is not None else []
        return self._rows + wave

    def _fail(self, rows: Sequence[Row], error: MarlaasError) -> None:
        for row in rows:
            row.error = error
        self._end(rows)

    def _fail_live(self, error: MarlaasError) -> None:
        rows = self._live()
        self._rows, self._wave, self._batch = [], None, None
        self._fail(rows, error)

    def _end(self, rows: Sequence[Row]) -> None:
        """Gives back what the rows held, then tells their callers."""
        with self._wake:
            for row in rows:
                del self._requests[row.request.id]
        for row in rows:
            if row.slot is not None:
                self._adapters.release(row.slot)
        for row in rows:
            row.resolve()


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
