"""The served document against the served routes: made-up requests get no 5xx, and no answer that is not documented."""

from __future__ import annotations

import json
import re

import hypothesis
import pytest
import schemathesis
from apiflask import APIFlask
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.models import Tenant
from tests import by_hand
from tests.api_client import make_key

# They wait for a worker, of which there is none here.
ASK_WORKERS = ["run_grader", "validate_grader", "create_chat_completion", "create_completion"]
EXAMPLES = 10
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture
def secret(tenant: Tenant) -> str:
    by_hand.execute("UPDATE tenants SET requests_per_minute = 1000000")
    return make_key(tenant)


@pytest.mark.parametrize("mode", GenerationMode)
def test_made_up_requests_are_answered_as_documented(
    web_app: APIFlask, secret: str, subtests: pytest.Subtests, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_wsgi("/v1/openapi.json", web_app).exclude(operation_id=ASK_WORKERS)
    for operation in schema.get_all_operations():

        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.ok().as_strategy(generation_mode=mode))
        def answered_as_documented(case: Case) -> None:
            case.headers["Authorization"] = f"Bearer {secret}"  # else what is made up of it ends all at the door
            case.call_and_validate(checks=CHECKS)

        with subtests.test(operation.ok().label):
            answered_as_documented()


def test_every_reference_of_the_document_leads_somewhere(web_app: APIFlask) -> None:
    document = web_app.test_client().get("/v1/openapi.json").json
    names = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document))
    assert set(names) <= document["components"]["schemas"].keys()
