"""Prompts and reward of the round benchmarks: the same for this system and for its peers. Standard library alone."""

from __future__ import annotations

from random import Random


def messages(index: int, shots: int) -> list[dict[str, str]]:
    """A sum behind `shots` solved ones; equally long in tokens for every index."""
    random = Random(index)
    solved = [
        message
        for shot in range(shots)
        for message in (
            {"role": "user", "content": f"What is {412 + shot} + {305 + shot}?"},
            {"role": "assistant", "content": str(717 + 2 * shot)},
        )
    ]
    question = f"What is {random.randint(100, 999)} + {random.randint(100, 999)}?"
    return [
        {"role": "system", "content": "Answer with the final answer only."},
        *solved,
        {"role": "user", "content": question},
    ]


def reward(text: str) -> float:
    """The share of vowels: no two long texts have the same, so no group is without signal."""
    return sum(character in "aeiou" for character in text.lower()) / max(1, len(text))
