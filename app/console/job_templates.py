"""What the form of a new job can start from: a small job of each built-in environment, and graders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JobTemplate:
    title: str
    text: str
    document: dict[str, Any]


TEMPLATES = {
    "reasoning_gym": JobTemplate(
        "Reasoning puzzle",
        "Generated problems with a checker, from the reasoning-gym library. Needs no data.",
        {
            "name": "reverse-words",
            "environment": {
                "type": "reasoning_gym",
                "params": {"task": "word_sequence_reversal", "config": {"min_words": 2, "max_words": 2}, "shots": 4},
            },
            "sampling": {"max_tokens": 16},
            "hyperparameters": {"n_steps": 14, "prompts_per_round": 6, "learning_rate": 3e-4},
            "evaluation": {"every": 5, "prompts": 32},
        },
    ),
    "calculator": JobTemplate(
        "Tool use: calculator",
        "Call a tool, wait for its result, answer with it. Two generations an episode.",
        {
            "name": "calculator",
            "environment": {"type": "calculator", "max_turns": 3},
            "sampling": {"max_tokens": 40},
            "hyperparameters": {"n_steps": 12, "prompts_per_round": 6, "learning_rate": 3e-4},
        },
    ),
    "dataset": JobTemplate(
        "Own data and grader",
        "A JSONL file of prompts, scored by a grader in OpenAI's words.",
        {
            "name": "own-data",
            "environment": {
                "type": "dataset",
                "params": {"grader": {"type": "string_check", "reference": "{{ item.answer }}", "operation": "eq"}},
            },
            "sampling": {"max_tokens": 128},
            "hyperparameters": {"n_steps": 20},
            "evaluation": {"every": 5},
        },
    ),
}

# Presets of the grader's field, as YAML.
GRADERS = {
    "Exact answer": """type: string_check
reference: "{{ item.answer }}"
operation: eq""",
    "Contains the answer": """type: string_check
input: "{{ sample.output_text }}"
reference: "{{ item.answer }}"
operation: like""",
    "Similar text": """type: text_similarity
reference: "{{ item.answer }}"
evaluation_metric: fuzzy_match""",
    "Equal mathematics": """type: math_verify
reference: "{{ item.answer }}\"""",
    "Python": """type: python
source: |
  def grade(sample, item):
      return 1.0 if item["answer"] in sample["output_text"] else 0.0""",
    "Weighted mix": """type: multi
graders:
  exact: {type: string_check, reference: "{{ item.answer }}", operation: eq}
  close: {type: text_similarity, reference: "{{ item.answer }}", evaluation_metric: fuzzy_match}
calculate_output: 0.8 * exact + 0.2 * close""",
}
