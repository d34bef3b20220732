"""Data files: JSON Lines, each line an object with `messages` (a chat; the user speaks last) and further fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any, NoReturn

from app.errors import InvalidRequest
from app.specs import plain_json

MAX_FILE_BYTES = 512 << 20
MAX_LINE_BYTES = 1 << 20
MAX_ITEMS = 1_000_000
MAX_BLANK_LINES = 10_000  # reading them costs time and gives nothing
MAX_MESSAGES = 256
ROLES = ("system", "user", "assistant", "tool")


def read_items(
    stream: IO[bytes], max_bytes: int = MAX_FILE_BYTES, max_items: int = MAX_ITEMS
) -> Iterator[dict[str, Any]]:
    """Yields the items of a JSONL stream, holding one line at a time.

    Raises InvalidRequest naming the line and the field: not UTF-8, not JSON, no usable `messages`, too large, or empty.
    """
    total = count = number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        total += len(line)
        if len(line) > MAX_LINE_BYTES:
            _refuse(number, None, f"is longer than {MAX_LINE_BYTES} bytes")
        if total > max_bytes:
            _refuse(number, None, f"goes past the limit of {max_bytes} bytes a file")
        if not line.strip():
            if number - count > MAX_BLANK_LINES:
                _refuse(number, None, f"is blank, as more than {MAX_BLANK_LINES} are")
            continue
        count += 1
        if count > max_items:
            _refuse(number, None, f"goes past the limit of {max_items} items a file")
        yield check_item(_parse(line, number), number)
    if count == 0:
        raise InvalidRequest("the file holds no items", param="line 1")


def check_item(item: Any, number: int) -> dict[str, Any]:
    """Returns `item` if it is one; `number` is its line, from 1. Raises InvalidRequest."""
    if not isinstance(item, dict):
        _refuse(number, None, "must be a JSON object")
    messages = item.get("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        _refuse(number, "messages", f"must be a list of 1 to {MAX_MESSAGES} messages")
    for i, message in enumerate(messages):
        field = f"messages[{i}]"
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            _refuse(number, field, "must be an object with exactly `role` and `content`")
        if message["role"] not in ROLES:
            _refuse(number, f"{field}.role", f"must be one of {', '.join(ROLES)}")
        if not isinstance(message["content"], str) or not message["content"]:
            _refuse(number, f"{field}.content", "must be a text that is not empty")
    if messages[-1]["role"] != "user":
        _refuse(number, f"messages[{len(messages) - 1}].role", "must be user: the policy answers the last message")
    return item


def _parse(line: bytes, number: int) -> Any:
    try:
        return plain_json.parse(line)
    except ValueError as error:
        _refuse(number, None, str(error))


def _refuse(number: int, field: str | None, what: str) -> NoReturn:
    where = f"line {number}" if field is None else f"line {number}: {field}"
    raise InvalidRequest(f"{where} {what}", param=where)
