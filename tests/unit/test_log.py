"""Log lines: JSON with bound ids, and no secrets."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from app.log import hide_secrets

PROGRAM = """
import logging, structlog
from app.log import configure_logging
configure_logging("tools")
with structlog.contextvars.bound_contextvars(tenant="t1", job="j1", round=3, episode=7):
    structlog.get_logger("workers.tools").info("stepped", reward=1.0)
    logging.getLogger("library").warning("slow call to %s", "redis://:hunter2@127.0.0.1/0")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger("workers.tools").exception("failed")
"""


@pytest.fixture(scope="module")
def lines() -> list[dict[str, object]]:
    """What a process logs, as it comes out of its standard error."""
    result = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    return [json.loads(line) for line in result.stderr.splitlines()]


@pytest.mark.parametrize("line", [0, 1], ids=["structlog", "standard library"])
def test_lines_carry_process_and_bound_ids(lines: list[dict[str, object]], line: int) -> None:
    expected = {"process": "tools", "tenant": "t1", "job": "j1", "round": 3, "episode": 7}
    assert lines[line].items() >= expected.items()


def test_ids_end_with_their_block(lines: list[dict[str, object]]) -> None:
    assert "tenant" not in lines[2]


def test_a_traceback_stays_on_one_line(lines: list[dict[str, object]]) -> None:
    assert "ZeroDivisionError" in str(lines[2]["exception"])


def test_passwords_in_messages_are_hidden(lines: list[dict[str, object]]) -> None:
    assert lines[1]["event"] == "slow call to redis://:***@127.0.0.1/0"


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        ({"password": "hunter2"}, {"password": "***"}),
        ({"url": "postgresql://marlaas:hunter2@db/marlaas"}, {"url": "postgresql://marlaas:***@db/marlaas"}),
        ({"event": "key mk-abcdefXYZ_123 used"}, {"event": "key mk-abcdef*** used"}),
        ({"url": "http://s3/b/k?X-Amz-Signature=0a1b2c&x=1"}, {"url": "http://s3/b/k?X-Amz-Signature=***&x=1"}),
        ({"tokens": 12, "token_rate": "3"}, {"tokens": 12, "token_rate": "3"}),
    ],
    ids=["by name", "in a URL", "API key", "presigned URL", "tokens of text are no secrets"],
)
def test_secrets_are_hidden(event: dict[str, object], shown: dict[str, object]) -> None:
    assert hide_secrets(logging.getLogger(), "info", event) == shown
