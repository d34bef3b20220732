"""Completions that tenants ask for, in the engine's chat pool: text in, text out as it comes, until nobody listens."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog
from celery.signals import worker_shutdown
from pydantic import ValidationError
from redis.exceptions import RedisError
from sqlalchemy.exc import OperationalError

from app.calls import Message
from app.db import transaction
from app.errors import (
    EngineUnavailable,
    InfrastructureFault,
    InvalidRequest,
    JobFault,
    MarlaasError,
    NotFound,
    ObjectMissing,
)
from app.manager.serving import ServedPolicy, record_usage, served_policy
from app.specs.completion import MAX_CHOICES, ChoiceDelta, CompletionCall, Token
from workers.calls import Reply, take
from workers.gate import Gate
from workers.retry import retried
from workers.rollout.adapters import AdapterStore
from workers.rollout.chat import Chat
from workers.rollout.engine import Engine, GenerationRequest, GenerationResult, SamplingParams
from workers.rollout.text_stream import Delta, TextStream
from workers.runtime import Runtime

log = structlog.get_logger(__name__)

CHUNK_SECONDS = 0.05  # tokens that come this close together go out as one message
ALIVE_SECONDS = 1.0  # between signs of life, by which it shows as well that nobody listens any more
STOP_SECONDS = 10.0  # that a stopping worker gives what it has begun

STOPPING = "The engine that served this request is stopping. Try again."


@dataclass(frozen=True, slots=True)
class Sampled:
    choice: int
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Done:
    choice: int


@dataclass
class Choice:
    """One answer to one prompt."""

    index: int
    request: GenerationRequest
    text: TextStream
    started: bool = False
    seconds: float = 0.0  # in the engine
    future: Future[GenerationResult] = field(default_factory=Future)
    done: bool = False  # and so are all its tokens
    told: bool = False  # the caller has all of it


class Session:
    """One request, from its message to its end. Its own thread works on it; `leave` may come from any other."""

    def __init__(self, call_id: str, call: CompletionCall, until: float) -> None:
        self.id, self.call, self.until = call_id, call, until
        self.reply = Reply(call_id)
        self.taken = False  # a thread works on it
        self.left: MarlaasError | bool = False  # nobody listens (True), or why it must end
        self.events: queue.SimpleQueue[Sampled | Done | None] = queue.SimpleQueue()

    @property
    def number(self) -> int:
        """What stands for this request in the ledger."""
        return int(self.id[:16], 16) >> 1

    def leave(self, why: MarlaasError | bool = True) -> None:
        self.left = self.left or why
        self.events.put(None)

    def send(self, message: Message) -> None:
        """To the caller, unless it has gone; a caller that cannot be reached has."""
        try:
            if not self.left and not self.reply.send(message):
                self.leave()
        except RedisError as error:
            log.warning("answer_lost", call=self.id, error=str(error))
            self.leave()


class Serving:
    """Takes calls and answers them, as many at once as the engine's chat pool has rows."""

    def __init__(
        self,
        this: Runtime,
        engine: Engine,
        chat: Chat,
        adapters: AdapterStore,
        gate: Gate,
        limit: int,
        slots: int,
    ) -> None:
        """`limit`: tokens of prompt and answer together; `slots`: of the chat pool, 0 for none."""
        self._runtime, self._engine, self._chat, self._adapters, self._gate = this, engine, chat, adapters, gate
        self._limit = limit
        self.slots = slots
        self._lock = threading.Lock()
        self._stopping = False
        self._sessions: dict[str, Session] = {}
        if slots:
            self._threads = ThreadPoolExecutor(slots, thread_name_prefix="chat")
            threading.Thread(target=self._keep_alive, name="chat-alive", daemon=True).start()
            worker_shutdown.connect(self.close, weak=False)

    def answer(self, call_id: str) -> None:
        """Takes the call, if it is still to be had, and returns at once; a thread of its own answers it."""
        payload = take(call_id)
        if payload is None:
            return
        until = payload.pop("until")
        try:
            call = CompletionCall.model_validate(payload)
        except ValidationError as error:  # of a web process of another release
            log.warning("call_refused", call=call_id, error=str(error))
            Reply(call_id).end({"error": describe(InfrastructureFault("the call is not understood"))})
            return
        session = Session(call_id, call, until)
        with self._lock:
            stopping = self._stopping
            if not stopping:
                self._sessions[call_id] = session
                self._threads.submit(self._next)
        if stopping:
            session.send({"error": describe(EngineUnavailable(STOPPING)), "end": True})

    def load(self) -> dict[str, Any]:
        stats = self._engine.stats()
        with self._lock:
            held = len(self._sessions)
        return {
            "chat_slots": self.slots,
            "chat_running": stats.chat_running,
            "chat_waiting": max(0, held - self.slots) + stats.chat_waiting,
        }

    def close(self, **_: Any) -> None:
        """What waits ends now, what runs has a few seconds more. Callers may try again elsewhere."""
        deadline = time.monotonic() + STOP_SECONDS
        with self._lock:
            self._stopping = True
            waiting = [session for session in self._sessions.values() if not session.taken]
            for session in waiting:
                del self._sessions[session.id]
        for session in waiting:
            session.send({"error": describe(EngineUnavailable(STOPPING)), "end": True})
        while self._sessions and time.monotonic() < deadline:
            time.sleep(0.1)
        for session in self._held():
            session.leave(EngineUnavailable(STOPPING))
        self._threads.shutdown()

    def _held(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())

    def _keep_alive(self) -> None:
        """Tells every caller that its request is in hand; ends those whose callers have gone or waited too long."""
        while True:
            time.sleep(ALIVE_SECONDS)
            for session in self._held():
                try:
                    if time.time() > session.until or not session.reply.alive():
                        session.leave()
                except RedisError as error:
                    log.warning("alive_lost", call=session.id, error=str(error))

    # -- in the thread of one request

    def _next(self) -> None:
        """Answers what waits: first come, first served, but those first whose tenants have the fewest answered now."""
        with self._lock:
            waiting = [session for session in self._sessions.values() if not session.taken]
            if not waiting:
                return  # it was told that this worker stops
            answered = Counter(session.call.tenant_id for session in self._sessions.values() if session.taken)
            session = min(waiting, key=lambda session: answered[session.call.tenant_id])
            session.taken = True
        self._run(session)

    def _run(self, session: Session) -> None:
        try:
            if not session.left:
                with self._gate.together():
                    self._serve(session)
        except MarlaasError as error:
            session.send({"error": describe(error), "end": True})
        except Exception as error:
            log.exception("completion_failed", call=session.id)
            session.send({"error": describe(InfrastructureFault(repr(error))), "end": True})
        finally:
            with self._lock:
                del self._sessions[session.id]

    def _serve(self, session: Session) -> None:
        call = session.call
        prompts = self._render(call)
        most = [self._room(call, prompt) for prompt in prompts]
        with self._adapter(call) as (adapter, policy):
            choices = [
                self._choice(session, prompts[i // call.n], most[i // call.n], adapter, i)
                for i in range(len(prompts) * call.n)
            ]
            prompt_tokens = sum(map(len, prompts))
            fingerprint = policy.weights_digest if policy else None
            session.send({"begun": {"prompt_tokens": prompt_tokens, "fingerprint": fingerprint}})
            generated = 0
            if not session.left:
                try:
                    self._generate(session, choices, policy)
                finally:
                    generated = self._end(session, choices, prompt_tokens)
        if isinstance(session.left, MarlaasError):
            why, session.left = session.left, False
            raise why
        session.send({"usage": {"prompt_tokens": prompt_tokens, "completion_tokens": generated}, "end": True})

    def _render(self, call: CompletionCall) -> list[list[int]]:
        if call.messages is not None:
            return [self._chat.render_prompt(call.messages, call.tools)]
        prompts = call.prompts or []
        if not 1 <= len(prompts) * call.n <= MAX_CHOICES:
            raise InvalidRequest(f"1 to {MAX_CHOICES} answers can be asked for at once", param="n")
        return [self._chat.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _room(self, call: CompletionCall, prompt: Sequence[int]) -> int:
        """How many tokens may follow the prompt. Raises InvalidRequest with the numbers when they do not fit."""
        room, wanted = self._limit - len(prompt), call.max_tokens
        if room < (wanted or 1):
            answer = f"and max_tokens is {wanted}" if wanted else "which leaves none for the answer"
            field = "messages" if call.messages is not None else "prompt"
            raise InvalidRequest(
                f"Prompt and answer may have {self._limit} tokens together here. The {field} take {len(prompt)},"
                f" {answer}; shorten them or ask for fewer.",
                param="max_tokens" if wanted else field,
                code="context_length_exceeded",
            )
        return wanted or room

    @contextmanager
    def _adapter(self, call: CompletionCall) -> Iterator[tuple[str | None, ServedPolicy | None]]:
        """The engine's key of the adapter while it is used. Raises NotFound for one that is not this tenant's."""
        assert self._runtime.base_model is not None
        if call.base_model != self._runtime.base_model.name:
            raise InfrastructureFault(
                f"asked for {call.base_model}, this worker serves {self._runtime.base_model.name}"
            )
        if call.job_id is None:
            yield None, None
            return
        with transaction() as session:
            policy = served_policy(session, call.tenant_id, call.base_model, call.job_id, call.version or 0)
        key = self._adapters.acquire(policy)
        try:
            yield key, policy
        finally:
            self._adapters.release(key)

    def _choice(self, session: Session, prompt: list[int], most: int, adapter: str | None, index: int) -> Choice:
        call = session.call
        sampling = SamplingParams(
            max_tokens=most,
            temperature=call.temperature,
            top_p=call.top_p,
            seed=call.seed + index,
            stop_ids=self._chat.stop_ids,
        )
        request = GenerationRequest(f"chat-{session.id}-{index}", prompt, adapter, sampling, pool="chat")
        return Choice(index, request, TextStream(self._chat.text, call.stop, bool(call.tools), call.one_call))

    def _generate(self, session: Session, choices: list[Choice], policy: ServedPolicy | None) -> None:
        """Runs the choices to their ends, or until nobody listens."""
        for choice in choices:
            self._start(session, choice)
        while not session.left and not all(choice.told for choice in choices):
            events = [session.events.get()]
            while not session.events.empty():
                events.append(session.events.get())
            for event in events:
                if isinstance(event, Sampled):
                    self._take(choices[event.choice], event)
                elif isinstance(event, Done):
                    choices[event.choice].done = True
            deltas = [delta for choice in choices if (delta := self._delta(session.call, choice, policy)) is not None]
            if deltas:
                session.send({"choices": [delta.model_dump() for delta in deltas]})
            if session.call.stream:
                time.sleep(CHUNK_SECONDS)

    def _start(self, session: Session, choice: Choice) -> None:
        index, events, started = choice.index, session.events, time.monotonic()

        def done(_: Future[GenerationResult]) -> None:
            choice.seconds = time.monotonic() - started
            events.put(Done(index))

        choice.future = self._engine.generate(
            choice.request, lambda token, logprob: events.put(Sampled(index, token, logprob))
        )
        choice.started = True
        choice.future.add_done_callback(done)

    def _take(self, choice: Choice, event: Sampled) -> None:
        if choice.text.stopped:  # sampled before the engine heard of it
            return
        if event.token in self._chat.stop_ids:
            choice.text.tokens += 1
            return
        choice.text.push(event.token, event.logprob)
        if choice.text.stopped:
            self._engine.abort(choice.request.id)

    def _delta(self, call: CompletionCall, choice: Choice, policy: ServedPolicy | None) -> ChoiceDelta | None:
        """What the caller has not seen of a choice; None: nothing. Raises what the engine did."""
        if choice.told or not (choice.done or call.stream):
            return None
        if not choice.done:
            new = choice.text.take()
            return _delta_of(call, choice, new) if new.text else None
        choice.told = True
        result = choice.future.result()
        if policy is not None and result.adapter_digest != policy.weights_digest:
            raise InfrastructureFault(f"the engine's slot held other weights: {result.adapter_digest}")
        new, calls = choice.text.end()
        finish = "tool_calls" if calls else "length" if result.finish_reason == "length" else "stop"
        return _delta_of(call, choice, new).model_copy(
            update={"finish": finish, "calls": [{"name": c.name, "arguments": c.arguments} for c in calls]}
        )

    def _end(self, session: Session, choices: list[Choice], prompt_tokens: int) -> int:
        """Frees the rows of what still runs and writes the request into the ledger; returns the tokens generated."""
        for choice in choices:
            self._engine.abort(choice.request.id)
        choices = [choice for choice in choices if choice.started]
        wait([choice.future for choice in choices])
        generated = sum(map(_generated, choices))
        call = session.call

        def record() -> None:
            with transaction() as database:
                record_usage(
                    database,
                    call.tenant_id,
                    call.job_id,
                    session.number,
                    prompt_tokens=prompt_tokens,
                    generated_tokens=generated,
                    seconds=sum(choice.seconds for choice in choices),
                )

        retried(record, OperationalError)
        log.info(
            "completion",
            call=session.id,
            tenant=str(call.tenant_id),
            job=str(call.job_id) if call.job_id else None,
            prompt_tokens=prompt_tokens,
            generated_tokens=generated,
            left=bool(session.left),
        )
        return generated


def _delta_of(call: CompletionCall, choice: Choice, new: Delta) -> ChoiceDelta:
    tokens = [Token(text=piece.text, logprob=piece.logprob) for piece in new.pieces] if call.logprobs else []
    return ChoiceDelta(index=choice.index, text=new.text, tokens=tokens)


def _generated(choice: Choice) -> int:
    """Tokens that the caller pays for: not those after a stop string, which the engine sampled until it heard."""
    if choice.text.stopped or choice.future.exception() is not None:
        return choice.text.tokens
    return len(choice.future.result().token_ids)


KINDS: tuple[tuple[type[MarlaasError], str], ...] = (
    (InvalidRequest, "invalid_request"),
    (NotFound, "not_found"),
    (ObjectMissing, "not_found"),
    (JobFault, "conflict"),
    (EngineUnavailable, "unavailable"),
)


def describe(error: MarlaasError) -> Message:
    """An error as the caller's side raises it again (`app.api.completions`)."""
    kind = next((name for type_, name in KINDS if isinstance(error, type_)), "infrastructure")
    return {"kind": kind, "message": error.message, "param": error.param, "code": error.code}
