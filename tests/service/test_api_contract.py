"""schemathesis over the served OpenAPI document: no 5xx, no status or shape of an answer that is not documented."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app import broker, calls, storage
from app.api import ids
from app.db import transaction
from app.manager import files, grading, jobs, preflight
from app.models import Job
from app.settings import get_settings
from app.web import create_app
from tests import by_hand, stored
from tests.api_client import make_key
from tests.service.conftest import empty

EXAMPLES = 12
GRADERS = "/v1/fine_tuning/alpha/graders"
ASK_WORKERS = ("/v1/chat/completions", "/v1/completions", f"{GRADERS}/run", f"{GRADERS}/validate")
LINE = {"messages": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)


@pytest.fixture(scope="module")
def world(database: str) -> Iterator[dict[str, str]]:
    """A tenant with one of everything; yields its key and the ids by the names that routes give them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker, "ring", lambda *_, **__: None)
        # The workers only announced themselves: a call to one comes to its deadline soon.
        patch.setattr(get_settings(), "chat_deadline_seconds", 0.1)
        patch.setattr(grading, "SECONDS", 0.1)
        calls.connection.cache_clear()
        storage.client.cache_clear()
        by_hand.register_model()
        by_hand.announce(by_hand.ROLLOUT, by_hand.TOOLS, by_hand.TRAINING)
        tenant = by_hand.make_tenant()
        with transaction() as session:
            held = session.merge(tenant)
            held.requests_per_minute = 10**6
            held.max_live_jobs = 10**6
        file = files.upload(tenant.id, "items.jsonl", io.BytesIO(json.dumps(LINE).encode()))
        job_id = stored.start_job(tenant)
        stored.step(job_id)
        with transaction() as session:
            job = session.get_one(Job, job_id)
            trial = preflight.submit(session, session.merge(tenant), jobs.parse_spec(job.spec), 1, 2)
            model = ids.model_id(job, tenant.name, 1)
        yield {
            "key": make_key(tenant),
            "fine_tuning_job_id": ids.job_id(job_id),
            "fine_tuning_checkpoint_id": ids.checkpoint_id(job_id, 1),
            "file_id": ids.file_id(file.id),
            "preflight_id": ids.preflight_id(trial.id),
            "model": model,
        }
        empty()


@pytest.fixture(scope="module")
def operations(world: dict[str, str]) -> list[APIOperation]:
    schema = schemathesis.openapi.from_wsgi("/v1/openapi.json", create_app())
    found = [result.ok() for result in schema.get_all_operations()]
    assert len(found) >= 26
    return found


def for_all_cases(
    operation: APIOperation,
    examples: int,
    check: Callable[[Case], None],
    mode: GenerationMode = GenerationMode.POSITIVE,
) -> None:
    """`check` on made-up requests to one operation: as its document has them (positive), or not (negative)."""

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def checked(case: Case) -> None:
        check(case)

    checked()


@pytest.mark.parametrize("mode", GenerationMode)
def test_every_answer_is_documented(
    operations: list[APIOperation], world: dict[str, str], mode: GenerationMode
) -> None:
    """Half of the cases name things that exist."""
    statuses: Counter[int] = Counter()

    def check(case: Case) -> None:
        names = case.path_parameters or {}
        if sum(map(len, map(str, names.values()))) % 2 and case.method != "DELETE":
            case.path_parameters = {name: world[name] for name in names}
        case.headers["Authorization"] = f"Bearer {world['key']}"  # else what is made up of it ends all at the door
        response = case.call()
        statuses[response.status_code] += 1
        asked_nobody = response.status_code == 503 and case.operation.path in ASK_WORKERS
        case.validate_response(response, checks=CHECKS[1:] if asked_nobody else CHECKS)

    for operation in operations:
        for_all_cases(operation, EXAMPLES, check, mode)
    assert statuses[200] > len(operations) and statuses[404] and statuses[400]


def test_without_a_key_every_route_answers_401(operations: list[APIOperation]) -> None:
    def check(case: Case) -> None:
        case.headers = {name: v for name, v in (case.headers or {}).items() if name.lower() != "authorization"}
        response = case.call()
        assert response.status_code == 401, case.operation.label
        case.validate_response(response, checks=CHECKS)

    for operation in operations:
        if operation.path != "/v1/openapi.json":
            for_all_cases(operation, 2, check)


def test_every_reference_of_the_document_leads_somewhere() -> None:
    document = create_app().test_client().get("/v1/openapi.json").json
    names = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document))
    assert set(names) <= document["components"]["schemas"].keys()
