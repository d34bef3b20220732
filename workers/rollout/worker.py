"""The rollout stage: claims episodes, renders or extends their ids, generates in the shared engine, records turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from app.db import transaction
from app.errors import InfrastructureFault, InvalidRequest, JobFault
from app.manager import base_models, episodes
from app.manager.episodes import Claim, GeneratedTurn
from app.models import Turn
from app.models.round import EpisodeState, RoundKind
from app.settings import get_settings
from workers.cache import ObjectCache
from workers.faults import settle_fault
from workers.gate import Gate
from workers.once import once
from workers.retry import retried
from workers.rollout.adapters import AdapterStore, own_folder
from workers.rollout.chat import Chat
from workers.rollout.engine import Engine, GenerationRequest, GenerationResult, SamplingParams
from workers.rollout.serving import Serving
from workers.runtime import Runtime, Watchdog, give_up, runtime

log = structlog.get_logger(__name__)

# Turns that end this close together are recorded in one transaction.
GATHER_SECONDS = 0.03

STUCK_SECONDS = 120.0

# What an episode that has used up its context gets to say.
OUT_OF_CONTEXT = GenerationResult([], [], "length", None)


@dataclass
class Live:
    """An episode that is in the engine now."""

    claim: Claim
    request_id: str
    context_ids: list[int]
    context_length: int
    adapter: str
    started: float


class RolloutWorker:
    def __init__(self, this: Runtime) -> None:
        settings = get_settings()
        assert this.base_model is not None
        path = base_models.folder(this.base_model)
        self.runtime = this
        self.chat = Chat.load(path)
        self.limit = base_models.context_limit(this.base_model)
        self.engine = make_engine(path, getattr(torch, this.base_model.dtype))
        keep = 4 * (settings.engine_adapter_slots + settings.engine_chat_slots)
        self.adapters = AdapterStore(self.engine, ObjectCache(), keep)
        self.gate = Gate()
        self.serving = Serving(
            this, self.engine, self.chat, self.adapters, self.gate, self.limit, settings.engine_chat_slots
        )
        self._lock = threading.Lock()
        self._live: dict[int, Live] = {}
        this.slots, this.adapter_slots = settings.engine_slots, settings.engine_adapter_slots
        this.load = self.load
        threading.Thread(target=self._renew_on, name="leases", daemon=True).start()
        Watchdog(self._busy, lambda: self.engine.stats().steps, max(STUCK_SECONDS, self._lease))

    @property
    def _lease(self) -> float:
        return get_settings().lease_seconds

    def _busy(self) -> bool:
        stats = self.engine.stats()
        return stats.running + stats.chat_running > 0

    def load(self) -> dict[str, Any]:
        stats = self.engine.stats()
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "slots": stats.slots,
            "adapter_slots": stats.adapter_slots,
            "resident": stats.resident,
            "tokens_per_second": round(stats.tokens_per_second, 1),
            "generated_tokens": stats.generated_tokens,
            "busy_seconds": round(stats.busy_seconds, 3),
            "steps": stats.steps,
            "kv_usage": round(stats.kv_usage, 3),
            "prefix_hit_rate": round(stats.prefix_hit_rate, 3),
            **self.serving.load(),
        }

    def generate(self, episode_ids: Sequence[int]) -> None:
        """Generates one turn of each episode that can be claimed; others are somebody else's."""
        with transaction() as session:
            claims = episodes.claim(session, episode_ids, EpisodeState.GENERATING, self.runtime.claimant, self._lease)
            prompts = episodes.group_prompts(session, {c.group_id for c in claims})
            turns = episodes.turns_so_far(session, claims)
        suspects = [c for c in claims if c.losses >= get_settings().losses_before_alone]
        suspect_ids = {c.episode_id for c in suspects}
        if together := [c for c in claims if c.episode_id not in suspect_ids]:
            with self.gate.together():
                self._generate(together, prompts, turns)
        for claim in suspects:
            with self.gate.alone():
                self._generate([claim], prompts, turns)

    def _generate(
        self, claims: list[Claim], prompts: dict[int, episodes.GroupPrompt], turns: dict[int, list[Turn]]
    ) -> None:
        running: dict[Future[GenerationResult], Live] = {}
        faults: list[tuple[Claim, Exception]] = []
        rendered: dict[int, list[int]] = {}
        for claim in claims:
            try:
                future, live = self._submit(claim, prompts[claim.group_id], turns[claim.episode_id], rendered)
                running[future] = live
            except (JobFault, InvalidRequest, InfrastructureFault) as error:
                faults.append((claim, error))
        for claim, fault in faults:
            settle_fault(claim, fault)
        deadline = time.monotonic() + get_settings().generate_deadline_seconds
        while running:
            done, _ = wait(running, timeout=max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
            if done and len(done) < len(running):
                time.sleep(GATHER_SECONDS)
                done = {future for future in running if future.done()}
            if not done:  # past the deadline: ended, and given back
                for live in running.values():
                    self.engine.abort(live.request_id)
                    settle_fault(live.claim, InfrastructureFault("generation ran past its deadline"))
                done = set(running)
            self._finish({future: running.pop(future) for future in done})

    def _submit(
        self, claim: Claim, prompt: episodes.GroupPrompt, turns: list[Turn], rendered: dict[int, list[int]]
    ) -> tuple[Future[GenerationResult], Live]:
        """Puts one episode's next turn into the engine."""
        before = episodes.ids_so_far(turns)
        if turns:
            last = turns[-2]
            context = self.chat.extend(episodes.sampled_ids(last), turns[-1].messages or [])
        else:
            if claim.group_id not in rendered:
                rendered[claim.group_id] = self.chat.render_prompt(prompt.messages or [], prompt.tools)
            context = rendered[claim.group_id]
        sampling = claim.round.spec.sampling
        room = self.limit - len(before) - len(context)
        if room < 1 and not turns:
            raise InvalidRequest(
                f"the prompt has {len(context)} tokens and leaves no room in {self.limit}", code="prompt_too_long"
            )
        adapter = self.adapters.acquire(claim.round)
        live = Live(
            claim=claim,
            request_id=f"{claim.episode_id}-{claim.turn}-{claim.attempt}",
            context_ids=context,
            context_length=len(before) + len(context),
            adapter=adapter,
            started=time.time(),
        )
        with self._lock:
            self._live[claim.episode_id] = live
        if room < 1:
            nothing: Future[GenerationResult] = Future()
            nothing.set_result(OUT_OF_CONTEXT)
            return nothing, live
        request = GenerationRequest(
            id=live.request_id,
            token_ids=before + context,
            adapter=adapter,
            sampling=SamplingParams(
                max_tokens=min(sampling.max_tokens, room),
                temperature=sampling.temperature,
                seed=claim.seed + claim.turn,
                stop_ids=self.chat.stop_ids,
            ),
            priority=_priority(claim),
        )
        return self.engine.generate(request), live

    def _finish(self, finished: dict[Future[GenerationResult], Live]) -> None:
        """Records what the engine sampled; faults end or give back their own episode only."""
        recorded: list[GeneratedTurn] = []
        faults: list[tuple[Claim, Exception]] = []
        ended = time.time()
        for future, live in finished.items():
            with self._lock:
                self._live.pop(live.claim.episode_id, None)
            self.adapters.release(live.adapter)
            if not future.done():
                continue
            error = future.exception()
            if isinstance(error, (JobFault, InvalidRequest, InfrastructureFault)):
                faults.append((live.claim, error))
                continue
            result = future.result()
            if result.finish_reason == "abort":
                continue
            claim = live.claim
            digest = result.adapter_digest or claim.round.weights_digest
            if digest != claim.round.weights_digest:  # never recorded: the schema would refuse it as well
                faults.append((claim, InfrastructureFault(f"the engine's slot held other weights: {digest}")))
                continue
            recorded.append(
                GeneratedTurn(
                    claim=claim,
                    context_ids=live.context_ids,
                    sampled_ids=result.token_ids,
                    logprobs=result.logprobs,
                    finish_reason=result.finish_reason,
                    text=self.chat.decode(result.token_ids),
                    weights_digest=digest,
                    context_length=live.context_length,
                    seconds=ended - live.started,
                )
            )
            self.runtime.spans.add(claim.round.tenant_id, claim.round.id, "rollout", live.started, ended)
        if recorded:
            retried(lambda: self._record(recorded), DBAPIError)
        for claim, error in faults:
            settle_fault(claim, error)

    def _record(self, turns: list[GeneratedTurn]) -> None:
        """Safe to repeat: what was recorded is not held any more."""
        with transaction() as session:
            episodes.record_generated(session, turns)
        for round_ in {t.claim.round.id: t.claim.round for t in turns}.values():
            log.info(
                "generated",
                tenant=str(round_.tenant_id),
                job=str(round_.job_id),
                round=round_.id,
                episodes=[t.claim.episode_id for t in turns if t.claim.round.id == round_.id],
                tokens=sum(len(t.sampled_ids) for t in turns if t.claim.round.id == round_.id),
            )

    def _renew_on(self) -> None:
        """Renews leases while the engine makes steps; stops what this worker no longer holds."""
        steps = -1
        while True:
            time.sleep(self._lease / 3)
            now = self.engine.stats().steps
            with self._lock:
                live = dict(self._live)
            if not live or now == steps:
                continue
            steps = now
            try:
                with transaction() as session:
                    held = episodes.renew(session, [(e, item.claim.attempt) for e, item in live.items()], self._lease)
            except SQLAlchemyError as error:
                log.warning("renewal_failed", error=str(error).splitlines()[0])
                continue
            for episode_id in live.keys() - held:
                self.engine.abort(live[episode_id].request_id)


def make_engine(model: Path, dtype: torch.dtype) -> Engine:
    """The engine that the settings name. Each is imported at its use: either runs where the other cannot."""
    settings = get_settings()
    sizes: dict[str, Any] = {
        "slots": settings.engine_slots,
        "adapter_slots": settings.engine_adapter_slots,
        "kv_tokens": settings.engine_kv_tokens,
        "max_lora_rank": settings.max_lora_rank,
        "threads": settings.rollout_threads,
        "chat_slots": settings.engine_chat_slots,
    }
    if settings.engine == "torch":
        from workers.rollout.torch_engine import TorchEngine

        return TorchEngine(model, dtype, **sizes)
    from workers.rollout.vllm_engine import VllmEngine
    from workers.rollout.vllm_process import VllmOptions

    options = VllmOptions(
        tensor_parallel_size=settings.vllm_tensor_parallel_size,
        gpu_memory_utilization=settings.vllm_gpu_memory_utilization,
        max_cpu_loras=settings.vllm_max_cpu_loras,
        float32_head=settings.vllm_float32_head,
        engine_args=settings.vllm_engine_args,
    )
    return VllmEngine(model, dtype, **sizes, options=options, staging=own_folder("vllm"), on_broken=give_up)


def _priority(claim: Claim) -> int:
    """Turns that come back from a tool go first, training before evaluation."""
    return (0 if claim.turn else 1) + (2 if claim.round.kind == RoundKind.EVAL else 0)


@once
def rollout_worker() -> RolloutWorker:
    """This process's rollout stage, made at its first use."""
    return RolloutWorker(runtime())
