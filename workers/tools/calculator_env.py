"""The calculator environment: a question, a tool call, the tool's result, an answer. At least two generations."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Literal

from app.specs.arithmetic import evaluate, format_number
from app.specs.environment import CalculatorParams, parse_params
from workers.tools.environment import JSON, Action, Outcome, Prompt, Split
from workers.tools.splits import find_item, held_out
from workers.tools.tool_calls import MalformedToolCall, ToolCall, format_tool_call, parse_tool_call

TOOL: JSON = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Problem:
    expression: str
    latency: float  # seconds that each call takes

    @property
    def question(self) -> str:
        return f"What is {self.expression}?"


class CalculatorEnvironment:
    blocking: ClassVar[Literal["io", "cpu"]] = "io"
    min_turns: ClassVar[int] = 2

    def __init__(self, params: JSON, seed: int) -> None:
        self._params = parse_params(CalculatorParams, params)
        self._seed = seed
        self._shots: list[Problem] = []
        for i in range(self._params.shots):
            self._shots.append(find_item(seed, "shots", i, self._problem, self._trains))

    def reset(self, index: int, split: Split) -> Prompt:
        wanted = self._trains if split == "train" else lambda problem: held_out(problem.question)
        problem = find_item(self._seed, split, index, self._problem, wanted)
        system = [{"role": "system", "content": self._params.system}] if self._params.system else []
        shots = [message for shot in self._shots for message in _dialogue(shot)]
        return Prompt(
            messages=[*system, *shots, {"role": "user", "content": problem.question}],
            state={"expression": problem.expression, "latency": problem.latency, "called": False},
            # Examples show the tool by themselves; a small model calls it less when it also reads the definition.
            tools=None if self._shots else [TOOL],
        )

    def step(self, state: JSON, action: Action, turns_left: int) -> Outcome:
        try:
            call = parse_tool_call(action.text)
        except MalformedToolCall:
            return _failed(state, "malformed_call")
        if call is None:
            return self._answer(state, action)
        if not _is_calculator(call):
            return _failed(state, "malformed_call")
        if turns_left == 0:
            return _failed(state, "no_answer")
        time.sleep(state["latency"])
        try:
            result = format_number(evaluate(call.arguments["expression"]))
        except ValueError as error:
            return Outcome(state, [{"role": "tool", "content": f"error: {error}"}], done=False, flags=("tool_error",))
        return Outcome(state | {"called": True}, [{"role": "tool", "content": result}], done=False)

    def _answer(self, state: JSON, action: Action) -> Outcome:
        if not state["called"]:
            return _failed(state, "no_call")
        correct = action.text.strip().removesuffix(".") == format_number(evaluate(state["expression"]))
        return Outcome(state, reward=float(correct), passed=correct)

    def _trains(self, problem: Problem) -> bool:
        return not held_out(problem.question) and all(problem.question != shot.question for shot in self._shots)

    def _problem(self, number: int) -> Problem:
        random = Random(number)
        expression = str(random.randint(2, self._params.max_operand))
        for _ in range(self._params.terms - 1):
            expression += random.choice(self._params.operators) + str(random.randint(2, self._params.max_operand))
        return Problem(expression, random.uniform(*self._params.latency_seconds))


def _is_calculator(call: ToolCall) -> bool:
    return (
        call.name == "calculator"
        and set(call.arguments) == {"expression"}
        and isinstance(call.arguments["expression"], str)
    )


def _failed(state: JSON, flag: str) -> Outcome:
    return Outcome(state, reward=0.0, passed=False, flags=(flag,))


def _dialogue(problem: Problem) -> list[dict[str, str]]:
    result = format_number(evaluate(problem.expression))
    return [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": format_tool_call("calculator", {"expression": problem.expression})},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]
