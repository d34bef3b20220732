"""The production engine: vLLM's AsyncLLM behind the engine protocol.

One event loop thread owns vLLM; all state below is that thread's, but for what `_lock` guards. A request waits in its
pool for a row and an adapter slot, so that vLLM is never given more than it runs at once: neither pool can starve the
other, and vLLM never moves an adapter by itself. When vLLM's processes die, live requests fail as an infrastructure
fault and vLLM is started anew, within a budget.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch
from transformers import AutoConfig

from app.errors import AdapterInvalid, InfrastructureFault, InvalidRequest, MarlaasError
from workers.rollout.engine import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Pool,
    check_request,
)
from workers.rollout.vllm_adapters import Loaded, Staging, VllmAdapters, linear_shapes
from workers.rollout.vllm_process import EngineDeadError, Vllm, VllmOptions, VllmSizes

RATE_SECONDS = 5.0  # window of tokens_per_second
RESTARTS, RESTART_WINDOW = 3, 900.0  # this many restarts within this many seconds are too many
LOAD_SECONDS = 300.0  # that loading one adapter may take, a restart included
CLOSE_SECONDS = 10.0  # that cancelled tasks may take to end

log = structlog.get_logger(__name__)
OnToken = Callable[[int, float], None]
T = TypeVar("T")


@dataclass(eq=False)
class Row:
    """A request and what it has generated."""

    request: GenerationRequest
    future: Future[GenerationResult]
    on_token: OnToken | None
    turn: asyncio.Future[None] | None = None
    task: asyncio.Task[None] | None = None
    streaming: bool = False  # its task may be cancelled
    aborted: bool = False
    digest: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def take(self, token: int, logprob: float) -> None:
        """Raises the error that ends this request alone."""
        if not math.isfinite(logprob):
            adapter = self.request.adapter
            kind = InfrastructureFault if adapter is None else AdapterInvalid
            whose = "the base model" if adapter is None else f"adapter {adapter}"
            raise kind(f"{whose} gave logits that are not finite")
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.on_token is not None:
            try:
                self.on_token(token, logprob)
            except Exception as error:  # the caller's own code: its request fails, nobody else's
                raise InfrastructureFault(f"the token callback raised {error!r}") from error

    def result(self, finish: FinishReason) -> GenerationResult:
        return GenerationResult(self.tokens, self.logprobs, finish, self.digest)


@dataclass(eq=False)
class Lane:
    """One pool: its share, what runs in it, and who waits."""

    rows: int
    adapters: int
    waiting: list[tuple[int, int, Row]] = field(default_factory=list)  # heap of priority, order of arrival
    running: list[Row] = field(default_factory=list)

    def next(self) -> Row | None:
        """The first that waits, if a row and a slot for its adapter are free; it then runs.

        One whose adapter finds no slot keeps its place: else a stream of others could starve it.
        """
        while self.waiting and self.waiting[0][2].aborted:
            heapq.heappop(self.waiting)
        if not self.waiting or len(self.running) == self.rows:
            return None
        row = self.waiting[0][2]
        used = {other.request.adapter for other in self.running} - {None}
        if row.request.adapter is not None and row.request.adapter not in used and len(used) == self.adapters:
            return None
        heapq.heappop(self.waiting)
        self.running.append(row)
        return row


class VllmEngine:
    """Implements `Engine` with vLLM, on GPUs or on the CPU."""

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
        options: VllmOptions | None = None,
        staging: Path | None = None,
        on_broken: Callable[[str], None] | None = None,
    ) -> None:
        """`slots`: rollouts decoded at once, of at most `kv_tokens` / `slots` tokens each; `threads`: of a CPU engine;
        `chat_slots`: rows and adapter slots for the chat pool beside those; `staging`: where adapter files for vLLM
        lie, default the temporary directory; `on_broken`: told why, when vLLM died too often to be started again.

        Raises InfrastructureFault when vLLM does not start.
        """
        config = AutoConfig.from_pretrained(model_path)
        self.vocab_size = int(config.vocab_size)
        self.max_length = min(int(config.max_position_embeddings), kv_tokens // slots)  # of one request, with prompt
        self._lanes: dict[Pool, Lane] = {"rollout": Lane(slots, adapter_slots), "chat": Lane(chat_slots, chat_slots)}
        self._options = options or VllmOptions()
        self._sizes = VllmSizes(
            model=model_path,
            dtype=dtype,
            rows=slots + chat_slots,
            length=self.max_length,
            adapters=adapter_slots + chat_slots,
            max_lora_rank=max_lora_rank,
            threads=threads,
        )
        if staging is not None:
            staging.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-", dir=staging))
        self._staging = Staging(self._folder, linear_shapes(model_path), dtype, max_lora_rank)
        self._adapters = VllmAdapters(self._staging, self._sizes.adapters, self._options.max_cpu_loras)
        self._on_broken = on_broken

        self._lock = threading.Lock()  # guards the four below
        self._requests: dict[str, Row] = {}
        self._closed: InfrastructureFault | None = None
        self._generated, self._recent = 0, deque[tuple[float, int]]()
        self._busy, self._busy_since = 0.0, 0.0

        self._order = count()
        self._vllm: Vllm | None = None  # None: not there now
        self._vllm_steps = 0  # of those that died
        self._restarts: list[float] = []
        self._restart: asyncio.Task[None] | None = None

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-engine", daemon=True)
        self._thread.start()
        try:
            self._call(self._start()).result()
        except BaseException:
            self.close()
            raise

    # -- called from any thread

    def generate(self, request: GenerationRequest, on_token: OnToken | None = None) -> Future[GenerationResult]:
        row = Row(request, Future(), on_token)
        row.future.set_running_or_notify_cancel()  # `abort` is the way to end a request early
        try:
            check_request(request, self._lanes[request.pool].rows, self.vocab_size, self.max_length)
            with self._lock:
                if self._closed is not None:
                    raise self._closed
                if request.id in self._requests:
                    raise InvalidRequest(f"request {request.id} is already live", param="id")
                self._requests[request.id] = row
                if len(self._requests) == 1:
                    self._busy_since = time.monotonic()
        except MarlaasError as error:
            row.future.set_exception(error)
            return row.future
        self._call(self._serve(row))
        return row.future

    def abort(self, request_id: str) -> None:
        with self._lock:
            row = self._requests.get(request_id)
        if row is not None:
            row.aborted = True
            self._loop.call_soon_threadsafe(self._interrupt, row)

    def load_adapter(self, key: str, folder: Path) -> str:
        known = self._adapters.known(key, folder)
        if known is not None:
            return known
        loading = self._call(self._register(key, folder))
        try:
            return loading.result(LOAD_SECONDS)
        except TimeoutError as error:
            loading.cancel()
            raise InfrastructureFault(f"adapter {key} was not loaded within {LOAD_SECONDS:.0f} seconds") from error
        except CancelledError as error:
            raise InfrastructureFault("the engine was closed") from error

    def unload_adapter(self, key: str) -> None:
        staged = self._adapters.withdraw(key)
        if staged is not None:
            self._call(self._dying(self._adapters.forget(staged)))

    def stats(self) -> EngineStats:
        vllm = self._vllm
        with self._lock:
            now = time.monotonic()
            while self._recent and now - self._recent[0][0] > RATE_SECONDS:
                self._recent.popleft()
            live = Counter(row.request.pool for row in self._requests.values())
            running = {pool: len(lane.running) for pool, lane in self._lanes.items()}
            return EngineStats(
                slots=self._lanes["rollout"].rows,
                running=running["rollout"],
                waiting=max(0, live["rollout"] - running["rollout"]),
                adapter_slots=self._lanes["rollout"].adapters,
                chat_slots=self._lanes["chat"].rows,
                chat_running=running["chat"],
                chat_waiting=max(0, live["chat"] - running["chat"]),
                resident=self._adapters.in_slots(),
                steps=self._vllm_steps + (vllm.figures.steps if vllm is not None else 0),
                generated_tokens=self._generated,
                tokens_per_second=sum(tokens for _, tokens in self._recent) / RATE_SECONDS,
                busy_seconds=self._busy + (now - self._busy_since if self._requests else 0.0),
                kv_usage=vllm.figures.kv_usage if vllm is not None else 0.0,
                prefix_hit_rate=vllm.figures.prefix_hit_rate if vllm is not None else 0.0,
            )

    def close(self) -> None:
        """Ends vLLM's processes; requests that have not ended fail with InfrastructureFault."""
        self._call(self._close(InfrastructureFault("the engine was closed"))).result()
        self._call(_cancel_tasks()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    # -- the event loop thread

    async def _serve(self, row: Row) -> None:
        """One request from its arrival to its result."""
        lane = self._lanes[row.request.pool]
        row.task = asyncio.current_task()
        row.turn = self._loop.create_future()
        heapq.heappush(lane.waiting, (row.request.priority, next(self._order), row))
        if row.aborted:  # before it came here
            row.turn.set_result(None)
        self._dispatch()
        loaded: Loaded | None = None
        try:
            await row.turn
            if row.request.adapter is not None and not row.aborted:
                loaded = await self._adapters.acquire(row.request.adapter)
                row.digest = loaded.staged.digest
            finish = await self._stream(row, loaded) if not row.aborted else "abort"
            outcome: GenerationResult | MarlaasError = row.result(finish)
        except MarlaasError as error:
            outcome = error
        except EngineDeadError as error:
            self._died(error)
            outcome = InfrastructureFault("vLLM's engine process died")
        except Exception as error:
            log.exception("request failed in vLLM", request=row.request.id)
            outcome = InfrastructureFault(f"vLLM failed the request: {error!r}")
        if loaded is not None:
            await self._dying(self._adapters.release(loaded))
        if row in lane.running:
            lane.running.remove(row)
        self._settle(row, outcome)
        self._dispatch()

    async def _stream(self, row: Row, loaded: Loaded | None) -> FinishReason:
        """Runs the request in vLLM. Raises what ends it; vLLM has then let it go, or does so now."""
        assert self._vllm is not None
        adapter = None
        if loaded is not None:
            adapter = (f"{loaded.staged.key}:{loaded.staged.digest}", loaded.id, loaded.staged.folder)
        outputs = self._vllm.stream(row.request, adapter)
        row.streaming = True
        try:
            async for tokens, logprobs, finish in outputs:
                with self._lock:
                    self._generated += len(tokens)
                    self._recent.append((time.monotonic(), len(tokens)))
                for token, logprob in zip(tokens, logprobs, strict=True):
                    row.take(token, logprob)
                    if row.aborted:
                        return "abort"
                if finish is not None:
                    return finish
            raise InfrastructureFault("vLLM ended the request without a reason")
        except asyncio.CancelledError:
            if not row.aborted:
                raise
            return "abort"
        finally:
            row.streaming = False
            await outputs.aclose()

    def _interrupt(self, row: Row) -> None:
        """Ends an aborted request: at once where it waits or streams, else when its adapter is loaded."""
        if row.turn is not None and not row.turn.done():
            row.turn.set_result(None)
        elif row.streaming and row.task is not None:
            row.task.cancel()

    def _dispatch(self) -> None:
        """Gives their turn to those for whom there is room."""
        if self._vllm is None:
            return
        for lane in self._lanes.values():
            while (row := lane.next()) is not None:
                assert row.turn is not None
                row.turn.set_result(None)

    def _settle(self, row: Row, outcome: GenerationResult | MarlaasError) -> None:
        with self._lock:
            if self._requests.get(row.request.id) is not row:
                return  # failed already, by `_close`
            del self._requests[row.request.id]
            if not self._requests:
                self._busy += time.monotonic() - self._busy_since
        if isinstance(outcome, MarlaasError):
            row.future.set_exception(outcome)
        else:
            row.future.set_result(outcome)

    async def _register(self, key: str, folder: Path) -> str:
        staged = await asyncio.to_thread(self._staging.stage, key, folder)
        if self._restart is not None:
            await asyncio.wait([self._restart])
        try:
            return await self._adapters.register(staged)
        except EngineDeadError as error:
            self._died(error)
            raise InfrastructureFault("vLLM's engine process died") from error

    async def _dying(self, call: Coroutine[Any, Any, None]) -> None:
        """Awaits a call whose effect the death of vLLM has as well."""
        try:
            await call
        except EngineDeadError as error:
            self._died(error)

    # -- vLLM's own life

    async def _start(self) -> None:
        vllm = await Vllm.start(self._sizes, self._options)
        self._adapters.calls = vllm
        self._vllm = vllm

    def _died(self, error: EngineDeadError) -> None:
        """Starts vLLM anew, once for each death."""
        if self._vllm is None or not self._vllm.dead:
            return
        log.error("vllm_died", error=str(error))
        self._vllm_steps += self._vllm.figures.steps
        dead, self._vllm = self._vllm, None
        self._adapters.lost()
        self._restart = asyncio.create_task(self._start_again(dead))

    async def _start_again(self, dead: Vllm) -> None:
        now = time.monotonic()
        self._restarts = [when for when in self._restarts if now - when < RESTART_WINDOW]
        reason = f"vLLM died {len(self._restarts) + 1} times within {RESTART_WINDOW:.0f} seconds"
        try:
            dead.shutdown()
            if len(self._restarts) < RESTARTS:
                self._restarts.append(now)
                await self._start()
                log.info("vllm_started_again", seconds=round(time.monotonic() - now, 1))
                self._dispatch()
                return
        except Exception as error:
            log.exception("vLLM did not start again")
            reason = f"vLLM died and did not start again: {error}"
        log.critical("vllm_broken", reason=reason)
        if self._on_broken is not None:
            self._on_broken(reason)
        await self._close(InfrastructureFault(reason))

    async def _close(self, reason: InfrastructureFault) -> None:
        with self._lock:
            self._closed = self._closed or reason
            rows = list(self._requests.values())
        for row in rows:
            self._settle(row, reason)
        if self._restart is not None and self._restart is not asyncio.current_task():
            await asyncio.wait([self._restart])
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for row in rows:
            if row.task is not None and row.task in others:
                row.task.cancel()
        vllm, self._vllm = self._vllm, None
        if vllm is not None:
            vllm.shutdown()
            del self._adapters.calls


async def _cancel_tasks() -> None:
    """Ends all other tasks of this loop, among them those that wait for a vLLM that is gone."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CLOSE_SECONDS)
