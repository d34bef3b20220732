from __future__ import annotations

import pytest

from app.specs.arithmetic import evaluate, format_number
from workers.tools.tool_calls import MalformedToolCall, ToolCall, format_tool_call, parse_tool_call

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12*7"}}</tool_call>'


@pytest.mark.parametrize("text", [CALL, f"I need help. {CALL}\n", CALL.replace("{", " {\n", 1)])
def test_a_call_is_parsed(text: str) -> None:
    assert parse_tool_call(text) == ToolCall("calculator", {"expression": "12*7"})


@pytest.mark.parametrize("text", ["84", "", "tool_call", '{"name": "calculator"}'])
def test_text_without_a_call_is_no_call(text: str) -> None:
    assert parse_tool_call(text) is None


@pytest.mark.parametrize(
    "text",
    [
        CALL.removesuffix("</tool_call>"),
        CALL.removeprefix("<tool_call>"),
        f"{CALL} 84",
        CALL + CALL,
        f"<tool_call>{CALL}",
        "<tool_call></tool_call>",
        "<tool_call>[]</tool_call>",
        "<tool_call>{'name': 'calculator', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "calculator"}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {}, "id": 1}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": "12*7"}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
        f"<tool_call>{'[' * 10_000}</tool_call>",
        f'<tool_call>{{"name": "a", "arguments": {{"x": "{"y" * 20_000}"}}}}</tool_call>',
    ],
)
def test_a_malformed_call_is_refused(text: str) -> None:
    with pytest.raises(MalformedToolCall):
        parse_tool_call(text)


def test_a_formatted_call_parses_to_itself() -> None:
    arguments = {"expression": 'é"1"'}
    assert parse_tool_call(format_tool_call("calculator", arguments)) == ToolCall("calculator", arguments)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7", 84),
        (" 2 + 3 * 4 ", 14),
        ("-(2-5)", 3),
        ("7/2", 3.5),
        ("7//2", 3),
        ("7%4", 3),
        ("2**10", 1024),
        ("1 + 2^3", 9),
        ("1_000", 1000),
    ],
)
def test_arithmetic(expression: str, value: float) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1+",
        "1/0",
        "9**9**9",
        "2**100",
        "10**17*100",
        "1e999",
        "(-8)**0.5",
        "1j",
        "True",
        "'a'*3",
        "x",
        "abs(1)",
        "().__class__",
        "[1][0]",
        "1 if 1 else 2",
        "1;2",
        "1\x002",
        "(" * 150,
        "1+" * 150 + "1",
        "1<2",
        "~1",
        "1<<99",
    ],
)
def test_what_is_not_bounded_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        evaluate(expression)


def test_names_are_looked_up_and_nowhere_else() -> None:
    assert evaluate("0.5*a + b", {"a": 1, "b": 0.25}) == 0.75


@pytest.mark.parametrize(
    ("value", "text"), [(84, "84"), (84.0, "84"), (0.5, "0.5"), (-3, "-3"), (1 / 3, "0.333333333333")]
)
def test_numbers_are_written_plainly(value: float, text: str) -> None:
    assert format_number(value) == text
