"""The training part of a TRL step: loss, backward and AdamW on tokens that are given. Started by `bench.training`.

What TRL would generate and score is put in its place; the rest of its step is as it is.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from trl import GRPOTrainer

from bench.child import answers
from bench.decoding import episodes
from bench.peer import PeerSpec
from bench.trl_peer import train


def main() -> None:
    pipe = answers()
    question = json.loads(sys.argv[1])
    prompt = question.pop("prompt")
    spec = PeerSpec(**question)

    class GivenTokens(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            rows = [
                row for group in episodes(spec.prompts, spec.group_size, prompt, spec.tokens, seed=0) for row in group
            ]
            prompts = torch.tensor([row.prompt for row in rows])
            completions = torch.tensor([row.response for row in rows])
            return {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": completions,
                "completion_mask": torch.ones_like(completions),
                "advantages": torch.tensor([row.reward - 0.5 for row in rows]),
                "num_items_in_batch": torch.tensor(completions.numel()),
            }

    train(spec, pipe, GivenTokens)


if __name__ == "__main__":
    main()
