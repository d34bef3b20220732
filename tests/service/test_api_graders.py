"""Graders over the API, run by a tools worker's own code at the other end of the real queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from flask.testing import FlaskClient

from app import calls
from app.broker import celery
from app.db import transaction
from app.manager import grading, workers
from app.models import Tenant
from tests import by_hand
from workers.tools.grader_runs import GraderRuns

JSON = dict[str, Any]

RUN, VALIDATE = "/v1/fine_tuning/alpha/graders/run", "/v1/fine_tuning/alpha/graders/validate"
EXACT: JSON = {"type": "string_check", "name": "exact", "input": "{{ sample.output_text }}", "operation": "eq"}
EXACT |= {"reference": "{{ item.answer }}"}
PYTHON: JSON = {"type": "python", "name": "half", "source": "def grade(sample, item):\n    return 0.5"}
MULTI: JSON = {"type": "multi", "name": "both", "graders": {"exact": EXACT, "half": PYTHON}}
MULTI |= {"calculate_output": "0.5 * exact + half", "invalid_grade": -1.0}


@pytest.fixture(scope="module")
def runs() -> Iterator[GraderRuns]:
    runs = GraderRuns(seconds=10)
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def tools_worker(database: str, runs: GraderRuns) -> Iterator[None]:
    """A thread that takes messages of the tools queue, as the worker's Celery threads do."""
    calls.connection.cache_clear()
    calls.client().delete(grading.QUEUE)
    stop = threading.Event()

    def work() -> None:
        with celery.connection_for_read() as connection:
            messages = connection.SimpleQueue(grading.QUEUE)
            while not stop.is_set():
                try:
                    message = messages.get(timeout=0.1)
                except queue.Empty:
                    continue
                message.ack()
                runs.answer(message.payload[1]["call_id"])

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stop.set()
    thread.join()


def errors(answer: JSON) -> set[str]:
    return {name for name, value in answer["metadata"]["errors"].items() if value is True}


def test_the_openai_client_runs_a_grader(openai_client: openai.OpenAI, tools_worker: None) -> None:
    run = openai_client.fine_tuning.alpha.graders.run
    good = run(grader=EXACT, model_sample="Rome", item={"answer": "Rome"})  # type: ignore[arg-type]
    assert (good.reward, good.sub_rewards, good.api_model_grader_token_usage_per_model) == (1.0, {}, {})
    assert (good.metadata.name, good.metadata.type, good.metadata.scores) == ("exact", "string_check", {})
    assert good.metadata.execution_time > 0
    assert not any(value is True for value in good.metadata.errors.to_dict().values())
    both = run(grader=MULTI, model_sample="Rome", item={"answer": "Rome"})  # type: ignore[arg-type]
    assert (both.reward, both.sub_rewards) == (1.0, {"exact": 1.0, "half": 0.5})
    assert both.metadata.scores == both.sub_rewards


def test_the_openai_client_validates_a_grader(openai_client: openai.OpenAI, tools_worker: None) -> None:
    validate = openai_client.fine_tuning.alpha.graders.validate
    for grader in (EXACT, PYTHON, MULTI):
        answer = validate(grader=grader).grader  # type: ignore[arg-type]
        assert answer is not None
        assert (answer.type, answer.name) == (grader["type"], grader["name"])
    with pytest.raises(openai.BadRequestError, match="Too many positional") as caught:
        validate(grader=PYTHON | {"source": "def grade(sample): return 1"})  # type: ignore[arg-type]
    assert caught.value.param == "grader.source"


@pytest.mark.parametrize(
    ("grader", "sample", "item", "reward", "flag"),
    [
        (EXACT, "Rome", {}, 0.0, "invalid_variable_error"),
        (EXACT | {"input": "{{ sample.output_json.a }}"}, "Rome", {"answer": ""}, 0.0, "sample_parse_error"),
        (MULTI | {"calculate_output": "half / exact"}, "x", {"answer": "Rome"}, -1.0, "formula_parse_error"),
        (PYTHON | {"source": "def grade(s, i): return i['x']"}, "x", {}, 0.0, "python_grader_runtime_error"),
        (PYTHON | {"source": "def grade(s, i): return 'x'"}, "x", {}, 0.0, "python_grader_runtime_error"),
        (PYTHON | {"source": "def grade(:"}, "x", {}, 0.0, "python_grader_runtime_error"),
    ],
)
def test_a_grader_that_fails_tells_which_error(
    client: FlaskClient, tools_worker: None, grader: JSON, sample: str, item: JSON, reward: float, flag: str
) -> None:
    response = client.post(RUN, json={"grader": grader, "model_sample": sample, "item": item})
    assert response.status_code == 200, response.text
    answer = response.get_json()
    assert (answer["reward"], errors(answer)) == (reward, {flag})
    assert answer["metadata"]["errors"]["message"]
    details = answer["metadata"]["errors"]["python_grader_runtime_error_details"]
    assert bool(details) == (flag == "python_grader_runtime_error")


def test_a_grader_that_does_not_end_is_ended(client: FlaskClient, tools_worker: None) -> None:
    endless = PYTHON | {"source": "def grade(s, i):\n    while True: pass"}
    answer = client.post(RUN, json={"grader": endless, "model_sample": "x"}).get_json()
    assert (answer["reward"], errors(answer)) == (0.0, {"python_grader_server_error"})
    assert answer["metadata"]["errors"]["python_grader_server_error_type"] == "timeout"


@pytest.mark.parametrize("path", [RUN, VALIDATE])
@pytest.mark.parametrize(
    ("grader", "param", "message"),
    [
        ({"type": "score_model", "model": "gpt"}, "grader", "use python"),
        ({"type": "string_check", "name": "x", "input": "x", "operation": "eq"}, "grader.reference", "is required"),
        (EXACT | {"input": "{{ foo.x }}"}, "grader.input", "only {{ item"),
        (MULTI | {"calculate_output": "exact + x"}, "grader.calculate_output", "only numbers"),
        (MULTI | {"graders": {"a": PYTHON | {"source": 3}}}, "grader.graders.a.source", "string"),
    ],
)
def test_a_wrong_grader_is_refused_with_its_field(
    client: FlaskClient, path: str, grader: JSON, param: str, message: str
) -> None:
    body = {"grader": grader} | ({"model_sample": "x", "item": {}} if path == RUN else {})
    response = client.post(path, json=body)
    assert response.status_code == 400
    error = response.get_json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert message in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"grader": EXACT}, "model_sample"),
        ({"grader": EXACT, "model_sample": 3}, "model_sample"),
        ({"grader": EXACT, "model_sample": "x" * (257 << 10)}, "model_sample"),
        ({"grader": EXACT, "model_sample": "x", "item": [1]}, "item"),
        ({"grader": EXACT, "model_sample": "x", "items": {}}, "items"),
    ],
)
def test_a_wrong_request_is_refused_with_its_field(client: FlaskClient, body: JSON, param: str) -> None:
    response = client.post(RUN, json=body)
    assert (response.status_code, response.get_json()["error"]["param"]) == (400, param)


def test_without_a_tools_worker_the_answer_comes_at_once(client: FlaskClient, tenant: Tenant) -> None:
    with transaction() as session:
        workers.retire(session, by_hand.TOOLS)
    for path, body in ((RUN, {"grader": EXACT, "model_sample": "x"}), (VALIDATE, {"grader": PYTHON})):
        response = client.post(path, json=body)
        assert (response.status_code, response.get_json()["error"]["code"]) == (503, "no_tools_worker")
    assert client.post(VALIDATE, json={"grader": EXACT}).status_code == 200


def test_a_tenant_that_has_many_runs_under_way_is_told_to_wait(
    client: FlaskClient, tenant: Tenant, tools_worker: None, runs: GraderRuns
) -> None:
    own = str(tenant.id)
    with runs._place(own), runs._place(own), runs._place(own):
        response = client.post(RUN, json={"grader": EXACT, "model_sample": "x"})
    assert response.status_code == 429
    assert response.headers["Retry-After"] == "1"


def test_a_message_of_nobody_is_left_alone(clean: str, runs: GraderRuns) -> None:
    runs.answer("0" * 32)


def test_a_call_that_is_late_is_not_begun(clean: str, runs: GraderRuns) -> None:
    with calls.Call("test", "graders-test", {"tenant": "t", "request": {"do": "no such thing"}}, 0.5) as call:
        runs.answer(call.id)
        calls.client().delete("graders-test")
        assert calls.client().xlen(calls.stream_key(call.id)) == 1
