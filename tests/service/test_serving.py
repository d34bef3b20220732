"""Completions over the real Redis, database and storage, by OpenAI's own client, with the engine on a tiny model."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from queue import Empty
from urllib.parse import urlsplit

import openai
import pytest
import torch
from kombu import Connection
from safetensors.torch import load_file
from sqlalchemy import select

from app import broker, calls, storage
from app.api import ids
from app.db import transaction
from app.manager import commit, objects, workers
from app.manager.commit import NewVersion
from app.manager.objects import Upload
from app.manager.serving import NO_JOB
from app.models import BaseModel, Tenant, UsageEntry
from app.models.object import ObjectKind
from app.models.worker import WorkerKind
from app.settings import get_settings
from tests import by_hand
from tests.api_client import make_key
from tests.tiny import tiny_adapter_folder, tiny_model_folder
from workers.cache import ObjectCache
from workers.gate import Gate
from workers.lora import weights_digest
from workers.rollout.adapters import AdapterStore
from workers.rollout.chat import Chat
from workers.rollout.engine import GenerationRequest, SamplingParams
from workers.rollout.serving import Serving
from workers.rollout.torch_engine import TorchEngine
from workers.runtime import Runtime

WAIT = 20  # seconds; no test needs them
SLOTS = 2
LIMIT = 256
QUESTION = [{"role": "user", "content": "what is 2+2?"}]


class Stage:
    """A rollout worker's serving part, fed from the real queue by a thread."""

    def __init__(self, folder: Path) -> None:
        self.engine = TorchEngine(
            folder,
            torch.float32,
            slots=4,
            adapter_slots=2,
            kv_tokens=4 * LIMIT,
            max_lora_rank=16,
            threads=1,
            chat_slots=SLOTS,
        )
        self.chat = Chat.load(folder)
        self.adapters = AdapterStore(self.engine, ObjectCache(), keep=8)
        self.runtime = Runtime(WorkerKind.ROLLOUT, "rollout@hand", base_model=BaseModel(name=by_hand.MODEL))
        self.gate = Gate()
        self.serving = Serving(self.runtime, self.engine, self.chat, self.adapters, self.gate, LIMIT, SLOTS)
        self._taking, self._resting = threading.Event(), threading.Event()
        self._taking.set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._consume, daemon=True)
        self._thread.start()

    def _consume(self) -> None:
        with Connection(get_settings().redis_url.get_secret_value()) as connection:
            messages = connection.SimpleQueue("rollout")
            while not self._stop.is_set():
                if not self._taking.is_set():
                    self._resting.set()
                    self._taking.wait(WAIT)
                    self._resting.clear()
                try:
                    message = messages.get(timeout=0.2)
                except Empty:
                    continue
                message.ack()
                self.serving.answer(message.payload[1]["call_id"])

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Messages stay in the queue."""
        self._taking.clear()
        assert self._resting.wait(WAIT)
        try:
            yield
        finally:
            self._taking.set()

    def idle(self) -> bool:
        stats = self.engine.stats()
        return stats.chat_running + stats.chat_waiting == 0 and self.serving.load()["chat_waiting"] == 0

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.serving.close()
        self.engine.close()
        self.adapters.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_adapter_folder(model, tmp_path_factory.mktemp("adapter"), seed=1)


@pytest.fixture(scope="module")
def stage(model: Path, database: str) -> Iterator[Stage]:
    calls.connection.cache_clear()
    calls.client().flushall()
    stage = Stage(model)
    yield stage
    stage.close()


@pytest.fixture
def announced(hand: None, stage: Stage) -> None:
    """The worker says that it serves completions."""
    said = by_hand.ROLLOUT
    with transaction() as session:
        load = stage.serving.load()
        workers.heartbeat(
            session, workers.Announcement(said.name, said.boot, said.kind, said.base_model, slots=4, load=load)
        )
    by_hand.execute("UPDATE workers SET seen_at = now() + interval '1 h'")


@pytest.fixture
def client(announced: None, openai_client: openai.OpenAI) -> openai.OpenAI:
    return openai_client


def publish(tenant: Tenant, folder: Path) -> uuid.UUID:
    """A running job whose version 0 is this adapter."""
    job_id = by_hand.queue_job(tenant)
    with transaction() as session:
        by_hand.jobs.start_queued(session)
    prefix = storage.version_prefix(tenant.id, job_id, 0, 0)
    uploads = [
        Upload(ObjectKind.ADAPTER_MODEL, f"{prefix}a", (folder / "adapter_model.safetensors").read_bytes()),
        Upload(ObjectKind.ADAPTER_CONFIG, f"{prefix}c", (folder / "adapter_config.json").read_bytes()),
        Upload(ObjectKind.OPTIMIZER, f"{prefix}o", b"optimizer"),
    ]
    with transaction() as session:
        made = objects.announce(session, tenant.id, job_id, 0, uploads)
    for upload in uploads:
        storage.put(upload.key, upload.data)
    digest = weights_digest(load_file(folder / "adapter_model.safetensors"), torch.float32)
    with transaction() as session:
        assert commit.commit_initial(session, job_id, NewVersion(digest, *made, optimizer_steps=0, signal=True))
    return job_id


def name_of(job_id: uuid.UUID, tenant: Tenant, version: int | None = None) -> str:
    return ids.model_id(by_hand.job(job_id), tenant.name, version)


@pytest.fixture
def job_id(tenant: Tenant, adapter: Path) -> uuid.UUID:
    return publish(tenant, adapter)


def direct(stage: Stage, adapter: str | None, max_tokens: int, **sampling: float) -> tuple[str, list[float]]:
    """What the engine says to the same prompt without any of the serving."""
    prompt = stage.chat.render_prompt(QUESTION)
    params = SamplingParams(max_tokens, stop_ids=stage.chat.stop_ids, **sampling)  # type: ignore[arg-type]
    result = stage.engine.generate(GenerationRequest(uuid.uuid4().hex, prompt, adapter, params)).result(WAIT)
    return stage.chat.decode(result.token_ids), result.logprobs


def usage_rows() -> list[UsageEntry]:
    with transaction() as session:
        return list(session.scalars(select(UsageEntry).where(UsageEntry.round_id == 0)))


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "the condition never came"
        time.sleep(0.02)


def refused(act: Callable[[], object]) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        act()
    return caught.value


# --- what it answers


def test_greedy_chat_with_an_adapter_equals_the_engine(
    client: openai.OpenAI, stage: Stage, tenant: Tenant, job_id: uuid.UUID
) -> None:
    answer = client.chat.completions.create(
        model=name_of(job_id, tenant), messages=QUESTION, temperature=0, max_tokens=24, logprobs=True
    )
    text, logprobs = direct(stage, f"{job_id}:0", 24, temperature=0)
    choice = answer.choices[0]
    assert choice.message.content == text
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [token.logprob for token in choice.logprobs.content] == pytest.approx(logprobs[: len(text)], abs=1e-5)
    assert "".join(token.token for token in choice.logprobs.content) == text


def test_an_adapter_answers_otherwise_than_its_base_model(
    client: openai.OpenAI, tenant: Tenant, job_id: uuid.UUID
) -> None:
    answers = {
        client.chat.completions.create(model=name, messages=QUESTION, temperature=0, max_tokens=24)
        .choices[0]
        .message.content
        for name in (by_hand.MODEL, name_of(job_id, tenant), name_of(job_id, tenant, 0))
    }
    assert len(answers) == 2


def test_a_stream_joins_to_the_whole_answer(client: openai.OpenAI, tenant: Tenant, job_id: uuid.UUID) -> None:
    asked = {"model": name_of(job_id, tenant), "messages": QUESTION, "seed": 5, "max_tokens": 60}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    assert len({c.id for c in chunks}) == 1


def test_a_stream_of_bytes_is_server_sent_events_to_the_end(client: openai.OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(
        model=by_hand.MODEL, messages=QUESTION, max_tokens=4, stream=True
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_a_temperature_near_zero_is_taken_for_the_least_there_is(client: openai.OpenAI) -> None:
    def answer(temperature: float) -> str | None:
        answers = client.chat.completions.create(
            model=by_hand.MODEL, messages=QUESTION, temperature=temperature, seed=3, max_tokens=24
        )
        return answers.choices[0].message.content

    assert answer(1e-6) == answer(0.01)


def test_the_same_seed_samples_the_same_and_n_samples_differently(client: openai.OpenAI) -> None:
    asked = {"model": by_hand.MODEL, "messages": QUESTION, "max_tokens": 20, "n": 3, "seed": -7}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]


def test_a_stop_string_ends_the_answer_across_tokens(client: openai.OpenAI) -> None:
    asked = {"model": by_hand.MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    text = client.chat.completions.create(**asked).choices[0].message.content or ""
    stop = text[1:3]
    answer = client.chat.completions.create(**asked, stop=[stop])
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == text.index(stop) + 2


def test_bare_text_completions_of_several_prompts(client: openai.OpenAI, stage: Stage) -> None:
    answer = client.completions.create(
        model=by_hand.MODEL, prompt=["abc", "hello <|im_end|>"], max_tokens=6, temperature=0, logprobs=0, n=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.usage is not None and answer.usage.prompt_tokens == len("abc") + len("hello <|im_end|>")
    logprobs = answer.choices[2].logprobs
    assert logprobs is not None and "".join(logprobs.tokens or ()) == answer.choices[2].text
    by_ids = client.completions.create(
        model=by_hand.MODEL, prompt=stage.chat.encode("abc"), max_tokens=6, temperature=0
    )
    assert by_ids.choices[0].text == answer.choices[0].text


def test_tools_are_in_the_prompt_unless_none_may_be_called(client: openai.OpenAI) -> None:
    asked = {
        "model": by_hand.MODEL,
        "messages": QUESTION,
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        "max_tokens": 1,
    }
    without = client.chat.completions.create(**asked, tool_choice="none")
    assert without.usage is not None and without.usage.prompt_tokens < 50
    error = refused(lambda: client.chat.completions.create(**asked))
    assert error.code == "context_length_exceeded"  # their definitions are many characters, each a token here


def test_parts_of_text_tool_turns_and_what_is_ignored(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=by_hand.MODEL,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]},
            {"role": "user", "content": "1+1", "name": "ann"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "2"},
        ],
        tools=[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        tool_choice="none",
        max_completion_tokens=1,
        temperature=0,
        user="u",
        metadata={"a": "b"},
        store=False,
        frequency_penalty=0,
        response_format={"type": "text"},
        parallel_tool_calls=True,
    )
    assert answer.choices[0].finish_reason == "length"


# --- what it refuses


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("frequency_penalty", {"frequency_penalty": 0.5}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("audio", {"audio": {"voice": "alloy", "format": "wav"}}),
        ("top_logprobs", {"top_logprobs": 2, "logprobs": True}),
        ("tool_choice", {"tool_choice": "required"}),
        ("n", {"n": 9}),
        ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"temperature": 3}),
        ("stop", {"stop": ["a", "b", "c", "d", "e"]}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("nonsense", {"extra_body": {"nonsense": 1}}),
        (
            "messages.0.content",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        ),
        ("messages", {"messages": []}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client: openai.OpenAI, field: str, asked: dict[str, object]) -> None:
    error = refused(
        lambda: client.chat.completions.create(**{"model": by_hand.MODEL, "messages": QUESTION, **asked})  # type: ignore[call-overload]
    )
    assert (error.status_code, error.param) == (400, field)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(client: openai.OpenAI, stream: bool) -> None:
    error = refused(
        lambda: client.chat.completions.create(
            model=by_hand.MODEL, messages=[{"role": "user", "content": "x" * 400}], stream=stream
        )
    )
    assert (error.status_code, error.code) == (400, "context_length_exceeded")
    assert str(LIMIT) in error.message


def test_other_tenants_jobs_and_unknown_models_are_not_found(
    client: openai.OpenAI, tenant: Tenant, adapter: Path, job_id: uuid.UUID
) -> None:
    other = by_hand.make_tenant("other")
    theirs = publish(other, adapter)
    name = name_of(job_id, tenant)
    for model in (
        name_of(theirs, other),
        name_of(theirs, tenant),
        name_of(job_id, tenant, 7),
        name.replace("digits", "digit"),
        "ft:tiny:" + "0" * 32,
        "nobody",
    ):
        error = refused(lambda model=model: client.chat.completions.create(model=model, messages=QUESTION))  # type: ignore[misc]
        assert (error.status_code, error.code) == (404, "model_not_found"), model


def test_a_forged_call_for_another_tenants_adapter_is_refused_by_the_worker(
    client: openai.OpenAI, job_id: uuid.UUID
) -> None:
    forged = {
        "tenant_id": str(by_hand.make_tenant("other").id),
        "base_model": by_hand.MODEL,
        "job_id": str(job_id),
        "version": 0,
        "messages": QUESTION,
    }
    with calls.Call(broker.CHAT, "rollout", forged, WAIT) as call:
        (message,) = call
    assert message["error"]["code"] == "model_not_found"


def test_without_a_live_worker_it_fails_at_once(hand: None, openai_client: openai.OpenAI) -> None:
    error = refused(lambda: openai_client.chat.completions.create(model=by_hand.MODEL, messages=QUESTION))
    assert (error.status_code, error.code) == (503, "engine_unavailable")


def test_a_draining_worker_is_none(client: openai.OpenAI) -> None:
    by_hand.execute("UPDATE workers SET draining = true")
    error = refused(lambda: client.chat.completions.create(model=by_hand.MODEL, messages=QUESTION))
    assert error.code == "engine_unavailable"


def test_a_tenant_has_so_many_at_once(client: openai.OpenAI, stage: Stage, tenant: Tenant, server: str) -> None:
    by_hand.execute("UPDATE tenants SET max_chat_requests = 1")
    with client.chat.completions.create(
        model=by_hand.MODEL, messages=QUESTION, stream=True, max_tokens=200, seed=1
    ) as stream:
        next(iter(stream))
        error = refused(lambda: client.chat.completions.create(model=by_hand.MODEL, messages=QUESTION))
    assert error.status_code == 429
    assert error.response.headers["Retry-After"] == "1"
    wait_until(lambda: not calls.client().zcard(f"marlaas:places:{tenant.id.hex}"))
    assert client.chat.completions.create(model=by_hand.MODEL, messages=QUESTION, max_tokens=1).choices


# --- what it costs, and how it ends


def test_each_request_is_one_row_in_the_ledger(client: openai.OpenAI, tenant: Tenant, job_id: uuid.UUID) -> None:
    answers = [
        client.chat.completions.create(model=model, messages=QUESTION, max_tokens=5, n=2)
        for model in (by_hand.MODEL, name_of(job_id, tenant))
    ]
    rows = usage_rows()
    assert {(row.tenant_id, row.job_id) for row in rows} == {(tenant.id, NO_JOB), (tenant.id, job_id)}
    counted = sorted((row.prompt_tokens, row.generated_tokens) for row in rows)
    assert counted == sorted((a.usage.prompt_tokens, a.usage.completion_tokens) for a in answers if a.usage)
    assert all(row.busy_seconds > 0 for row in rows)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_rows(
    client: openai.OpenAI, stage: Stage, server: str, tenant: Tenant, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(stage, monkeypatch)
    body = {"model": by_hand.MODEL, "messages": QUESTION, "n": 8, "stream": stream, "max_tokens": 200}
    with leaving(server, tenant, body):
        wait_until(lambda: stage.engine.stats().chat_running == SLOTS)
    wait_until(stage.idle)
    wait_until(usage_rows)
    (row,) = usage_rows()
    assert row.generated_tokens < 8 * 200


@contextmanager
def leaving(server: str, tenant: Tenant, body: dict[str, object]) -> Iterator[None]:
    """A client that asks, and closes its connection at the end of the block."""
    connection = HTTPConnection(urlsplit(server).netloc)
    headers = {"Authorization": f"Bearer {make_key(tenant)}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    try:
        yield
    finally:
        connection.close()


def slow(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    step = stage.engine._step

    def slowly() -> None:
        time.sleep(0.05)
        step()

    monkeypatch.setattr(stage.engine, "_step", slowly)


def test_a_client_that_goes_away_in_the_queue_is_never_served(
    client: openai.OpenAI, stage: Stage, server: str, tenant: Tenant
) -> None:
    with stage.resting():
        with leaving(server, tenant, {"model": by_hand.MODEL, "messages": QUESTION}):
            wait_until(lambda: calls.client().keys("marlaas:call:*"))
        wait_until(lambda: not calls.client().keys("marlaas:call:*"))
    assert client.chat.completions.create(model=by_hand.MODEL, messages=QUESTION, max_tokens=1).choices
    assert len(usage_rows()) == 1


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(
    client: openai.OpenAI, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(stage, monkeypatch)
    stream = client.chat.completions.create(model=by_hand.MODEL, messages=QUESTION, max_tokens=200, stream=True, seed=2)
    next(iter(stream))

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(stage.engine, "_decode", fail)
    with pytest.raises(openai.APIError, match="infrastructure"):
        list(stream)


def test_the_deadline_ends_a_request_that_nobody_takes(
    client: openai.OpenAI, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_settings(), "chat_deadline_seconds", 0.5)
    with stage.resting():
        error = refused(lambda: client.chat.completions.create(model=by_hand.MODEL, messages=QUESTION))
    assert (error.status_code, error.code) == (503, "timeout")


def test_a_stopping_worker_ends_what_it_holds_with_a_reason(
    client: openai.OpenAI, tenant: Tenant, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.rollout.serving.STOP_SECONDS", 0.0)
    another = Serving(stage.runtime, stage.engine, stage.chat, stage.adapters, stage.gate, LIMIT, 1)
    slow(stage, monkeypatch)
    payload = {"tenant_id": str(tenant.id), "base_model": by_hand.MODEL, "messages": QUESTION, "max_tokens": 200}
    with (
        calls.Call("test.echo", "nobody", payload, WAIT) as call,
        calls.Call("test.echo", "nobody", payload, WAIT) as waiting,
        calls.Call("test.echo", "nobody", payload, WAIT) as late,
    ):
        another.answer(call.id)
        messages = iter(call)
        assert "begun" in next(messages)
        another.answer(waiting.id)
        another.close()
        another.answer(late.id)
        for told in (messages, iter(waiting), iter(late)):
            assert next(told)["error"]["code"] == "engine_unavailable"
    calls.client().delete("nobody")
