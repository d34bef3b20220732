"""Completions by OpenAI's client through gunicorn, the broker and a real rollout worker, while it trains as well."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from sqlalchemy import select

from app import calls
from app.api import ids
from app.db import transaction
from app.manager.workers import live_workers
from app.models import Tenant, UsageEntry
from app.models.worker import WorkerKind
from tests.api_client import make_key
from tests.e2e.conftest import Service, live_stages
from tests.workers import ROOT, STAGES, wait_for

QUESTION: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "abcd"}]
SETTINGS = {"MARLAAS_ENGINE_KV_TOKENS": str(32 * 512), "MARLAAS_ENGINE_CHAT_SLOTS": "2"}


@pytest.fixture(scope="module")
def port(service: Service) -> Iterator[int]:
    """The web process, as the Procfile starts it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = (service.workers.logs / "web.log").open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", "gunicorn", "-c", "app/gunicorn_config.py", "app.web:create_app()"],
        cwd=ROOT,
        env=os.environ | {"MARLAAS_WEB_PORT": str(port)},
        stdout=log,
        stderr=log,
    )
    try:
        wait_for(lambda: answers(port), 30, "the web process is to answer", service.workers)
        yield port
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def answers(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@pytest.fixture
def tenant(service: Service) -> Tenant:
    return service.tenant("acme")


@pytest.fixture
def client(port: int, tenant: Tenant) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=make_key(tenant), max_retries=0) as client:
        yield client


def chat_load() -> int:
    with transaction() as session:
        (worker,) = live_workers(session, WorkerKind.ROLLOUT)
    return int(worker.load.get("chat_running", -1))


def usage_of(tenant: Tenant) -> list[UsageEntry]:
    with transaction() as session:
        return list(
            session.scalars(select(UsageEntry).where(UsageEntry.tenant_id == tenant.id, UsageEntry.round_id == 0))
        )


def test_a_job_is_served_while_it_trains_and_after(service: Service, client: openai.OpenAI, tenant: Tenant) -> None:
    job_id = service.submit(tenant, hyperparameters={"n_steps": 6})
    service.wait_version(job_id, 1)
    model = ids.model_id(service.job(job_id), tenant.name)
    during = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8)
    assert during.choices[0].message.content is not None
    service.wait(job_id, "succeeded")
    texts = set()
    for name in (model, ids.model_id(service.job(job_id), tenant.name, 6)):
        stream = client.chat.completions.create(
            model=name, messages=QUESTION, max_tokens=40, temperature=0, stream=True
        )
        texts.add("".join(chunk.choices[0].delta.content or "" for chunk in stream))
    assert len(texts) == 1


def test_a_client_that_leaves_a_stream_is_generated_for_no_more(service: Service, port: int, tenant: Tenant) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    body = {"model": "tiny", "messages": QUESTION, "stream": True, "n": 8, "max_tokens": 400}
    headers = {"Authorization": f"Bearer {make_key(tenant)}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    response.close()
    connection.close()
    wait_for(lambda: usage_of(tenant), 20, "what was generated is to be in the ledger", service.workers)
    assert usage_of(tenant)[0].generated_tokens < 8 * 400
    wait_for(lambda: chat_load() == 0, 20, "the rows are to be free", service.workers)


def test_a_worker_that_is_asked_to_stop_ends_what_it_has_begun(service: Service, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="tiny", messages=QUESTION, n=4, max_tokens=300, stream=True)
    next(iter(stream))
    process = service.workers.processes.pop("rollout")
    process.terminate()
    ends = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices[0].finish_reason]
    assert len(ends) == 4
    assert process.wait(15) == 0
    service.workers.start("rollout")
    wait_for(lambda: live_stages() == set(STAGES), 60, "the worker is to be back", service.workers)


def test_a_worker_that_is_killed_ends_the_stream_with_a_reason(service: Service, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="tiny", messages=QUESTION, n=8, max_tokens=400, stream=True)
    next(iter(stream))
    service.workers.kill("rollout")
    with pytest.raises(openai.APIError, match="timeout"):
        list(stream)
    assert not calls.client().keys("marlaas:answer:*")
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="tiny", messages=QUESTION)
    assert (caught.value.status_code, caught.value.code) == (503, "engine_unavailable")
