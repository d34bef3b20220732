"""Graders, in the words of OpenAI's reinforcement fine-tuning.

Templates read the item, `{{ item.* }}`, and the policy's answer, `{{ sample.output_text }}`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from app.specs.job import Spec

OUTPUT = "{{ sample.output_text }}"
Template = Annotated[str, Field(max_length=16_384)]


class StringCheckGrader(Spec):
    """1 if the operation holds, else 0. `like` is containment, `ilike` the same without regard to case."""

    type: Literal["string_check"]
    name: str = "string_check"
    input: Template = OUTPUT
    reference: Template
    operation: Literal["eq", "ne", "like", "ilike"] = "eq"


class TextSimilarityGrader(Spec):
    """Share of matching characters, 0 to 1 (Ratcliff and Obershelp)."""

    type: Literal["text_similarity"]
    name: str = "text_similarity"
    input: Template = OUTPUT
    reference: Template
    evaluation_metric: Literal["fuzzy_match"] = "fuzzy_match"


class MathVerifyGrader(Spec):
    """1 if both are the same mathematical object (math-verify), else 0."""

    type: Literal["math_verify"]
    name: str = "math_verify"
    input: Template = OUTPUT
    reference: Template


SimpleGrader = Annotated[StringCheckGrader | TextSimilarityGrader | MathVerifyGrader, Field(discriminator="type")]


class MultiGrader(Spec):
    """An arithmetic expression over the results of other graders, e.g. `0.8 * exact + 0.2 * close`."""

    type: Literal["multi"]
    name: str = "multi"
    graders: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,63}$")], SimpleGrader] = Field(
        min_length=1, max_length=16
    )
    calculate_output: str = Field(max_length=200)


GraderSpec = Annotated[
    StringCheckGrader | TextSimilarityGrader | MathVerifyGrader | MultiGrader, Field(discriminator="type")
]
