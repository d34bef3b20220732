"""All models of a formula in conjunctive normal form, by unit propagation and backtracking (DPLL).

Literals are non-zero integers as in the DIMACS format: 3 is variable 3, -3 its negation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

Clause = frozenset[int]


def itersolve(clauses: Iterable[Sequence[int]]) -> Iterator[list[int]]:
    """Yields each model once, as the list of its true literals ordered by variable."""
    formula = [frozenset(clause) for clause in clauses]
    variables = {abs(literal) for clause in formula for literal in clause}
    for true in _models(formula, frozenset()):
        free = sorted(variables - {abs(literal) for literal in true})
        for signs in product((1, -1), repeat=len(free)):
            yield sorted([*true, *(s * v for s, v in zip(signs, free, strict=True))], key=abs)


def _models(formula: list[Clause], true: frozenset[int]) -> Iterator[frozenset[int]]:
    """Assignments that satisfy the formula whatever the variables that they leave open are."""
    while units := frozenset().union(*(clause for clause in formula if len(clause) == 1)):
        if any(-literal in units for literal in units):
            return
        formula, true = _assume(formula, units), true | units
    if frozenset() in formula:
        return
    if not formula:
        yield true
        return
    shortest = min(map(len, formula))
    counts = Counter(literal for clause in formula if len(clause) == shortest for literal in clause)
    (branch, _), *_ = counts.most_common(1)
    for literal in (branch, -branch):
        yield from _models(_assume(formula, frozenset({literal})), true | {literal})


def _assume(formula: list[Clause], literals: Clause) -> list[Clause]:
    """The formula under the assumption that all of `literals` are true."""
    negations = frozenset(-literal for literal in literals)
    return [clause - negations for clause in formula if literals.isdisjoint(clause)]
