"""The stand-in for pycosat finds exactly the models that trying every assignment finds."""

from __future__ import annotations

from itertools import product

import pycosat
from hypothesis import given
from hypothesis import strategies as st

LITERAL = st.integers(-5, 5).filter(bool)
FORMULA = st.lists(st.lists(LITERAL, min_size=1, max_size=3), min_size=1, max_size=10)


@given(FORMULA)
def test_models_are_those_of_brute_force(formula: list[list[int]]) -> None:
    variables = sorted({abs(literal) for clause in formula for literal in clause})
    assignments = (
        [s * v for s, v in zip(signs, variables, strict=True)] for signs in product((1, -1), repeat=len(variables))
    )
    expected = [model for model in assignments if all(not set(clause).isdisjoint(model) for clause in formula)]
    assert sorted(pycosat.itersolve(formula)) == sorted(expected)
