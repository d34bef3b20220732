"""The reasoning-gym environment: one question, one answer, the library's own scorer (arXiv 2505.24760)."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any, ClassVar, Literal

from app.errors import EnvironmentFault, InvalidRequest
from app.specs.environment import ReasoningGymParams, parse_params
from workers.tools.environment import JSON, Action, Outcome, Prompt, Split
from workers.tools.splits import derive, find_item, held_out

SIZE = 20_000  # items a dataset can number; the largest that every dataset of the library takes
PLATFORM_FIELDS = {"seed", "size"}  # of a dataset's config: the job's seed decides
NOT_AN_ANSWER = "?!"
PROBES = 8  # items on which a scorer is tried with NOT_AN_ANSWER before it is trusted


class ReasoningGymEnvironment:
    blocking: ClassVar[Literal["io", "cpu"]] = "cpu"
    min_turns: ClassVar[int] = 1

    def __init__(self, params: JSON, seed: int) -> None:
        self._params = parse_params(ReasoningGymParams, params)
        self._seed = seed
        self._dataset = _create_dataset(self._params, seed)
        self._entry = lru_cache(maxsize=64)(self._dataset.__getitem__)  # a group's episodes share their entry
        self._refuse_free_marks()
        self._shots = self._make_shots()

    def reset(self, index: int, split: Split) -> Prompt:
        if split == "train" and self._params.train_size:
            index %= self._params.train_size
        position = find_item(self._seed, split, index, self._position, lambda p: self._belongs(p, split))
        system = [{"role": "system", "content": self._params.system}] if self._params.system else []
        shots = [message for shot in self._shots for message in _solved(self._entry(shot))]
        question = self._question(position)
        messages = [*system, *shots, {"role": "user", "content": question}]
        # The question's own number shows a library that makes another item of the same position.
        return Prompt(messages, state={"position": position, "question": derive(question)})

    def step(self, state: JSON, action: Action, turns_left: int) -> Outcome:
        entry = self._entry(state["position"])
        if derive(entry["question"]) != state["question"]:
            raise EnvironmentFault("reasoning_gym makes another question than the one asked: library version changed?")
        try:
            score = float(self._dataset.score_answer(action.text.strip(), entry))
        except Exception:
            # Some scorers raise on answers that do not parse: a wrong answer, not a broken grader.
            return Outcome(state, reward=0.0, passed=False, flags=("unscorable",))
        passed = score >= 1.0
        # Some scorers give a little to anything: that is not paid out.
        partial = score if self._params.reward == "score" and score > self._free_marks(entry) else 0.0
        return Outcome(state, reward=1.0 if passed else partial, passed=passed)

    def _position(self, number: int) -> int:
        return number % SIZE

    def _question(self, position: int) -> str:
        return self._entry(position)["question"]

    def _belongs(self, position: int, split: Split) -> bool:
        question = self._question(position)
        if split == "eval":
            return held_out(question)
        return not held_out(question) and all(question != self._question(shot) for shot in self._shots)

    def _make_shots(self) -> list[int]:
        """Positions of the solved examples: different questions, none of them held out, none of them trained on."""
        shots: list[int] = []

        def is_new_example(position: int) -> bool:
            question = self._question(position)
            known = any(question == self._question(shot) for shot in shots)
            return not held_out(question) and not known and self._entry(position)["answer"] is not None

        for i in range(self._params.shots):
            shots.append(find_item(self._seed, "shots", i, self._position, is_new_example))
        return shots

    def _free_marks(self, entry: dict[str, Any]) -> float:
        try:
            return float(self._dataset.score_answer(NOT_AN_ANSWER, entry))
        except Exception:
            return 0.0

    def _refuse_free_marks(self) -> None:
        positions = (derive(self._seed, "probe", i) % SIZE for i in range(PROBES))
        if any(self._free_marks(self._entry(position)) >= 1.0 for position in positions):
            raise InvalidRequest(
                f"reasoning_gym task {self._params.task!r} gives full marks to any answer: nothing to learn",
                param="environment.params.task",
            )


def _create_dataset(params: ReasoningGymParams, seed: int) -> Any:
    # Imported here: it takes two seconds that no other environment should pay.
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if params.task not in DATASETS:
        raise InvalidRequest(
            f"unknown reasoning_gym task {params.task!r}; known: {', '.join(sorted(DATASETS))}",
            param="environment.params.task",
        )
    known = {field.name for field in fields(DATASETS[params.task][1])} - PLATFORM_FIELDS
    for name in params.config:
        if name not in known:
            field = f"environment.params.config.{name}"
            raise InvalidRequest(f"{field}: unknown; known fields: {', '.join(sorted(known))}", param=field)
    try:
        return reasoning_gym.create_dataset(params.task, seed=derive(seed) % 2**31, size=SIZE, **params.config)
    except (AssertionError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"environment.params.config: {error or 'refused by the dataset'}", param="environment.params.config"
        ) from error


def _solved(entry: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": entry["question"]},
        {"role": "assistant", "content": str(entry["answer"])},
    ]
