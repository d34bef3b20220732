from __future__ import annotations

import io
import json

import pytest

from app.errors import InvalidRequest
from app.specs.dataset import MAX_LINE_BYTES, read_items

GOOD = {"messages": [{"role": "user", "content": "1+1?"}], "answer": "2"}


def lines(*items: object) -> io.BytesIO:
    return io.BytesIO(b"".join(json.dumps(item).encode() + b"\n" for item in items))


def with_message(**message: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "x", **message}]}


def test_items_come_back_as_they_are() -> None:
    assert list(read_items(lines(GOOD, GOOD))) == [GOOD, GOOD]


def test_blank_lines_and_a_missing_last_newline_are_fine() -> None:
    assert list(read_items(io.BytesIO(b"\n" + json.dumps(GOOD).encode()))) == [GOOD]


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ([], "line 2 must be a JSON object"),
        ({}, "line 2: messages must be"),
        ({"messages": []}, "line 2: messages must be"),
        ({"messages": ["hi"]}, r"line 2: messages\[0\] must be"),
        (with_message(name="x"), r"line 2: messages\[0\] must be"),
        (with_message(role="developer"), r"line 2: messages\[0\].role must be one of"),
        (with_message(role=["user"]), r"line 2: messages\[0\].role must be one of"),
        (with_message(content=""), r"line 2: messages\[0\].content must be"),
        (with_message(content=7), r"line 2: messages\[0\].content must be"),
        (with_message(role="assistant"), r"line 2: messages\[0\].role must be user"),
        (with_message(content="a\x00"), "line 2 holds a NUL"),
    ],
)
def test_a_bad_line_is_named_with_its_field(bad: object, where: str) -> None:
    with pytest.raises(InvalidRequest, match=where) as caught:
        list(read_items(lines(GOOD, bad)))
    assert caught.value.param is not None
    assert caught.value.param.startswith("line 2")


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        (b"{not json}\n", "line 1 is not JSON"),
        (b'{"messages": NaN}\n', "line 1 is not JSON: NaN"),
        (b"[" * 100_000 + b"\n", "line 1 is nested deeper"),
        (b"\xff\n", "line 1 is not UTF-8"),
        (b"", "holds no items"),
        (b"\n\n", "holds no items"),
        (b"x" * (MAX_LINE_BYTES + 1), "line 1 is longer than"),
    ],
)
def test_broken_bytes_are_refused(raw: bytes, where: str) -> None:
    with pytest.raises(InvalidRequest, match=where):
        list(read_items(io.BytesIO(raw)))


def test_the_limits_of_a_file_hold() -> None:
    with pytest.raises(InvalidRequest, match="line 2 goes past the limit of 100 bytes"):
        list(read_items(lines(GOOD, GOOD), max_bytes=100))
    with pytest.raises(InvalidRequest, match="line 3 goes past the limit of 2 items"):
        list(read_items(lines(GOOD, GOOD, GOOD), max_items=2))
