"""Arithmetic on text, by a walk over its syntax tree: numbers, names, + - * / // % ** and brackets, nothing else."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

Number = int | float

MAX_LENGTH = 200
MAX_MAGNITUDE = 10**18
MAX_EXPONENT = 64

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate(expression: str, names: Mapping[str, Number] | None = None) -> Number:
    """The value of `expression`. Raises ValueError saying why there is none (syntax, bounds, division by zero)."""
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"expression is longer than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:  # the parser's ways to say: too deep
        raise ValueError("invalid expression") from error
    try:
        return _value(tree.body, names or {})
    except ArithmeticError as error:
        raise ValueError(str(error)) from error


def format_number(value: Number) -> str:
    """`84`, `0.5`; a whole float is written as an integer."""
    return str(int(value)) if value == int(value) else f"{value:.12g}"


def _value(node: ast.expr, names: Mapping[str, Number]) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left, names), _value(right, names)
            if isinstance(op, ast.Pow) and abs(b) > MAX_EXPONENT:
                raise ValueError(f"exponent is larger than {MAX_EXPONENT}")
            return _bounded(_BINARY[type(op)](a, b))
    raise ValueError("only numbers and + - * / // % ** are allowed")


def _bounded(value: Number) -> Number:
    # A negative base under a broken exponent is complex.
    if isinstance(value, complex) or not math.isfinite(value) or abs(value) > MAX_MAGNITUDE:
        raise ValueError("value is out of range")
    return value
