"""Arithmetic on text, by a walk over its syntax tree: numbers, names, operators and brackets, nothing else.

The operators are `+ - * / ^`, where `^` is a power; Python's `**`, `//` and `%` are understood too.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

Number = int | float
Function = Callable[..., Number]

OPERATORS = "+ - * / ^"  # as they are told everywhere

MAX_LENGTH = 200
MAX_MAGNITUDE = 10**18
MAX_EXPONENT = 64
MAX_ARGUMENTS = 16

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


class NoValue(ValueError):
    """The expression is well-formed, but has no value with these numbers: out of range, division by zero."""


def evaluate(
    expression: str,
    names: Mapping[str, Number] | None = None,
    functions: Mapping[str, Function] | None = None,
    max_length: int = MAX_LENGTH,
) -> Number:
    """The value of `expression`. Raises ValueError saying why there is none (syntax, bounds), NoValue where other
    numbers in it could have one."""
    if len(expression) > max_length:
        raise ValueError(f"expression is longer than {max_length} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")  # Python's own ^ binds as none here does
        return _value(tree.body, names or {}, functions or {})
    except (SyntaxError, MemoryError, RecursionError) as error:  # the parser's ways to say: too deep
        raise ValueError("invalid expression") from error
    except ArithmeticError as error:
        raise NoValue(str(error)) from error


def format_number(value: Number) -> str:
    """`84`, `0.5`; a whole float is written as an integer."""
    return str(int(value)) if value == int(value) else f"{value:.12g}"


def _value(node: ast.expr, names: Mapping[str, Number], functions: Mapping[str, Function]) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand, names, functions))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left, names, functions), _value(right, names, functions)
            if isinstance(op, ast.Pow) and abs(b) > MAX_EXPONENT:
                raise NoValue(f"exponent is larger than {MAX_EXPONENT}")
            return _bounded(_BINARY[type(op)](a, b))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as given, keywords=[]) if name in functions:
            if len(given) > MAX_ARGUMENTS:
                raise ValueError(f"{name} takes at most {MAX_ARGUMENTS} values")
            return _called(name, functions[name], [_value(value, names, functions) for value in given])
    allowed = [f"numbers and {OPERATORS}", *sorted(names), *(f"{name}(…)" for name in sorted(functions))]
    raise ValueError(f"only {', '.join(allowed)} are allowed")


def _called(name: str, function: Function, values: list[Number]) -> Number:
    try:
        return _bounded(function(*values))
    except TypeError as error:
        raise ValueError(f"{name} does not take {len(values)} values") from error
    except NoValue:
        raise
    except ValueError as error:  # as of log(0)
        raise NoValue(f"{name}: {error}") from error


def _bounded(value: Number) -> Number:
    # A negative base under a broken exponent is complex.
    if isinstance(value, complex) or not math.isfinite(value) or abs(value) > MAX_MAGNITUDE:
        raise NoValue("value is out of range")
    return value
