"""A tenant's whole way with unmodified clients: `openai` for the API, `boto3`-free HTTP and PEFT for the adapter."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
import torch
from openai import OpenAI
from peft import PeftModel
from transformers import AutoModelForCausalLM

from app.db import transaction
from app.embedded.ports import choose_ports
from app.manager import tenants
from app.models import Tenant
from app.settings import get_settings
from app.storage import sha256_of
from tests.e2e.conftest import Service
from tests.workers import wait_for

(PORT,) = choose_ports([18_000])
SETTINGS = {"MARLAAS_WEB_PORT": str(PORT)}
BASE_URL = f"http://127.0.0.1:{PORT}"

LINES = [{"messages": [{"role": "user", "content": f"say a {n} times"}], "answer": "a" * n} for n in range(1, 9)]
GRADER = {
    "type": "text_similarity",
    "name": "close",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
    "evaluation_metric": "fuzzy_match",
}


@pytest.fixture(scope="module")
def web(service: Service) -> Iterator[Service]:
    service.workers.start("web")
    wait_for(answers, 60, "the web server is to answer", service.workers)
    yield service


def answers() -> bool:
    try:
        return requests.get(f"{BASE_URL}/readyz", timeout=5).ok
    except requests.RequestException:  # not there yet, or slow while it starts
        return False


@pytest.fixture(scope="module")
def acme(web: Service) -> Tenant:
    return web.tenant("acme")


@pytest.fixture(scope="module")
def client(acme: Tenant) -> OpenAI:
    with transaction() as session:
        _, secret = tenants.create_key(session, acme, "laptop")
    return OpenAI(base_url=f"{BASE_URL}/v1", api_key=secret, max_retries=0, timeout=60)


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return "\n".join(map(json.dumps, lines)).encode()


def wait_status(client: OpenAI, job_id: str, *states: str, seconds: float = 120) -> Any:
    wait_for(
        lambda: client.fine_tuning.jobs.retrieve(job_id).status in states,
        seconds,
        f"{job_id} is to be {' or '.join(states)}",
    )
    return client.fine_tuning.jobs.retrieve(job_id)


def test_the_openai_client_goes_all_the_way(web: Service, client: OpenAI, tmp_path: Path) -> None:
    # files
    train = client.files.create(file=("train.jsonl", jsonl(LINES)), purpose="fine-tune")
    held_out = client.files.create(file=("held-out.jsonl", jsonl(LINES[:2])), purpose="fine-tune")
    assert train.bytes == len(jsonl(LINES)) and train.status == "processed"
    assert {f.id for f in client.files.list()} >= {train.id, held_out.id}
    assert client.files.content(train.id).read() == jsonl(LINES)

    # graders
    client.fine_tuning.alpha.graders.validate(grader=GRADER)  # type: ignore[arg-type]
    run = client.fine_tuning.alpha.graders.run(grader=GRADER, model_sample="aaaa", item={"answer": "aaaa"})  # type: ignore[arg-type]
    assert run.reward == 1.0 and not run.metadata.errors.other_error

    # a job
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=train.id,
        validation_file=held_out.id,
        suffix="letters",
        seed=7,
        metadata={"team": "night"},
        method={
            "type": "reinforcement",
            "reinforcement": {
                "grader": GRADER,
                "hyperparameters": {
                    "n_steps": 6,
                    "prompts_per_round": 2,
                    "group_size": 4,
                    "learning_rate": 1e-2,
                    "max_tokens": 8,
                    "eval_interval": 3,
                },  # type: ignore[typeddict-unknown-key]
            },
        },
    )
    assert job.status in ("validating_files", "queued", "running") and job.method.type == "reinforcement"

    # pause and resume
    wait_for(lambda: client.fine_tuning.jobs.checkpoints.list(job.id).data, 90, "a checkpoint is there", web.workers)
    client.fine_tuning.jobs.pause(job.id)
    paused = wait_status(client, job.id, "paused")
    assert paused.fine_tuned_model is None
    client.fine_tuning.jobs.resume(job.id)
    done = wait_status(client, job.id, "succeeded")
    assert done.fine_tuned_model.startswith("ft:tiny:") and done.error is None and done.trained_tokens > 0

    # events, checkpoints, models
    messages = [event.message for event in client.fine_tuning.jobs.list_events(job.id)]
    assert len(messages) > 5 and any("paused" in m for m in messages)
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id))
    assert {c.step_number for c in checkpoints} >= set(range(1, 7))
    assert done.fine_tuned_model in {model.id for model in client.models.list()}

    # the trained adapter answers, whole and streamed, and is not the base model
    chat = {"messages": [{"role": "user", "content": "say a 3 times"}], "max_tokens": 8, "temperature": 0.0}
    whole = client.chat.completions.create(model=done.fine_tuned_model, **chat)  # type: ignore[call-overload]
    assert whole.usage.completion_tokens > 0 and whole.choices[0].finish_reason in ("stop", "length")
    stream = client.chat.completions.create(model=done.fine_tuned_model, stream=True, **chat)  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    base = client.chat.completions.create(model="tiny", **chat)  # type: ignore[call-overload]
    assert base.choices[0].message.content != whole.choices[0].message.content

    check_download(client, job.id, checkpoints[0].id, tmp_path)

    # cancel
    other = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=train.id,
        method={
            "type": "reinforcement",
            "reinforcement": {"grader": GRADER, "hyperparameters": {"n_steps": 1000, "max_tokens": 8}},  # type: ignore[typeddict-item,typeddict-unknown-key]
        },
    )
    client.fine_tuning.jobs.cancel(other.id)
    assert client.fine_tuning.jobs.retrieve(other.id).status == "cancelled"
    assert {j.id for j in client.fine_tuning.jobs.list()} == {job.id, other.id}


def check_download(client: OpenAI, job_id: str, checkpoint_id: str, folder: Path) -> None:
    """By the presigned URL and without any key; PEFT loads it, and it changes what the base model says."""
    answer = requests.get(
        f"{BASE_URL}/v1/fine_tuning/jobs/{job_id}/checkpoints/{checkpoint_id}/adapter",
        headers={"Authorization": f"Bearer {client.api_key}"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    said = answer.json()
    zipped = requests.get(said["url"], timeout=60)
    assert zipped.status_code == 200 and sha256_of(zipped.content) == said["sha256"]
    with zipfile.ZipFile(io.BytesIO(zipped.content)) as archive:
        archive.extractall(folder / "adapter")
    for file in said["files"]:
        single = requests.get(file["url"], timeout=60).content
        assert sha256_of(single) == file["sha256"] and (folder / "adapter" / file["name"]).read_bytes() == single
    base = AutoModelForCausalLM.from_pretrained(get_settings().models_path / "tiny")
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        before = base(ids).logits
        after = PeftModel.from_pretrained(base, folder / "adapter")(ids).logits
    assert (before - after).abs().max() > 1e-4
    assert os.path.exists(folder / "adapter" / "adapter_config.json")


def test_another_tenants_adapter_cannot_be_asked(web: Service, client: OpenAI) -> None:
    with transaction() as session:
        _, secret = tenants.create_key(session, web_tenant(web, "globex"), "laptop")
    stranger = OpenAI(base_url=f"{BASE_URL}/v1", api_key=secret, max_retries=0)
    models = [model.id for model in client.models.list() if model.id.startswith("ft:")]
    assert models
    with pytest.raises(openai.NotFoundError):
        stranger.chat.completions.create(model=models[0], messages=[{"role": "user", "content": "a"}])


def web_tenant(web: Service, name: str) -> Tenant:
    return web.tenant(name)
