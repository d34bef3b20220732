"""The dataset environment: one of the tenant's own lines, one answer, a grader."""

from __future__ import annotations

import json
from functools import lru_cache
from random import Random
from typing import ClassVar, Literal

from app.errors import EnvironmentFault, InvalidRequest
from app.specs.dataset import check_item
from app.specs.environment import DatasetParams, parse_params
from workers.tools.environment import JSON, Action, Outcome, Prompt, Split
from workers.tools.graders import check_grader, grade
from workers.tools.grades import FAILED, SAMPLE_PARSE_ERROR, UNSCORABLE, Failure
from workers.tools.splits import held_out

MAX_FAILURES = 256  # of the first grades in a process, all of them: then it is the grader


class DatasetEnvironment:
    blocking: ClassVar[Literal["io", "cpu"]] = "cpu"  # a grader can take any time
    min_turns: ClassVar[int] = 1

    def __init__(self, params: JSON, seed: int) -> None:
        parsed = parse_params(DatasetParams, params)
        given = [check_item(item, number) for number, item in enumerate(parsed.items, start=1)]
        evals = parsed.eval_items
        if evals is None:
            evals = [item for item in given if held_out(_question(item))]
        else:
            evals = [check_item(item, number) for number, item in enumerate(evals, start=1)]
        questions = {_question(item) for item in evals}
        train = [item for item in given if _question(item) not in questions]
        check_grader(parsed.grader, given)
        check_grader(parsed.grader, evals)
        self._items: dict[Split, list[JSON]] = {"train": train, "eval": evals}
        self._grader = parsed.grader
        self._failures: int | None = 0  # grades that failed, until one has not
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def reset(self, index: int, split: Split) -> Prompt:
        items = self._items[split]
        if not items:
            raise InvalidRequest(
                f"no items are left for the {split} split: give more items, or eval_items of their own",
                param="environment.params.items",
            )
        epoch, place = divmod(index, len(items))
        position = self._order(split, epoch)[place]
        return Prompt(items[position]["messages"], state={"split": split, "position": position})

    def step(self, state: JSON, action: Action, turns_left: int) -> Outcome:
        item = self._items[state["split"]][state["position"]]
        given = grade(self._grader, item, action.text)
        if given.failure is None:
            self._failures = None
            return Outcome(state, reward=given.reward)
        flag = UNSCORABLE if given.failure.flag == SAMPLE_PARSE_ERROR else FAILED
        if flag == FAILED:
            self._refuse_if_hopeless(given.failure)
        return Outcome(state, reward=given.reward, passed=False, flags=(flag,))

    def _refuse_if_hopeless(self, failure: Failure) -> None:
        name = f"grader {self._grader.name}"
        if not failure.by_sample:
            raise EnvironmentFault(f"{name}: {failure.message}")
        if self._failures is None:
            return
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise EnvironmentFault(
                f"{name} failed on each of the first {self._failures} answers: {failure.message}."
                " If they are only bad answers, let it return 0 for them"
            )

    def _shuffled(self, split: Split, epoch: int) -> list[int]:
        order = list(range(len(self._items[split])))
        Random(f"{self._seed}:{split}:{epoch}").shuffle(order)
        return order


def _question(item: JSON) -> str:
    return json.dumps(item["messages"], sort_keys=True)
