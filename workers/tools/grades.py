"""What a grader says of a sample: a reward, or why there is none.

A text of the policy on which a grader fails is a bad answer: it is worth the grader's `invalid_grade` (0 by default),
is flagged and trains, as at OpenAI. So does a failing answer not end a job (nor a policy that learns to make graders
fail earn anything by it), and nothing is sampled again until it succeeds. A grader that has not graded any of the
first answers is at fault itself: see `workers.tools.dataset_env`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Of an episode on whose answer the grader failed, and of one whose answer is not of the form that the grader reads.
FAILED, UNSCORABLE = "grader_error", "unscorable"

# Of a failure that is of the second kind; as all flags of failures, one of OpenAI's `metadata.errors`.
SAMPLE_PARSE_ERROR = "sample_parse_error"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no grade."""

    flag: str
    message: str
    by_sample: bool = True  # whether another answer to the same item could be graded


@dataclass(frozen=True, slots=True)
class Grade:
    reward: float
    scores: dict[str, float] = field(default_factory=dict)  # of a multi grader's parts
    failure: Failure | None = None


class Ungraded(Exception):
    """A grader could not grade."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
