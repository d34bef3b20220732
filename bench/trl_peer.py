"""TRL's GRPOTrainer in a process of its own: one optimizer step a line on standard input, its seconds as JSON back.

Started by `bench.peer`. Between two lines it waits on the pipe and computes nothing.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped]
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from app.specs.job import LINEAR_LAYERS
from bench.environments import messages, reward
from bench.peer import PeerSpec

ITEMS = 256  # prompts until the first one comes again


class Pipe(TrainerCallback):
    """Waits for a line before a step; answers with its seconds, and with what the log says of its tokens."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers
        self.started = self.seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not sys.stdin.readline():
            sys.exit(0)
        self.started = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds = time.monotonic() - self.started

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        logs = others["logs"]
        if "completions/mean_length" in logs:
            answer = {
                "seconds": self.seconds,
                "tokens": logs["completions/mean_length"],
                "without_signal": logs["frac_reward_zero_std"],
            }
            print(json.dumps(answer), file=self.answers, flush=True)


def score(completions: list[Any], **_: Any) -> list[float | None]:
    return [reward(completion[0]["content"]) for completion in completions]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    spec = PeerSpec(**json.loads(sys.argv[1]))
    torch.set_num_threads(spec.threads)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            # What is quickest for it on a CPU: bfloat16 weights under autocast (without autocast a step takes minutes),
            # the round in one batch (four of a group each take a tenth longer), nothing recomputed.
            model_init_kwargs={"dtype": "bfloat16"},
            bf16=True,
            gradient_checkpointing=False,
            per_device_train_batch_size=spec.prompts * spec.group_size,
            num_generations=spec.group_size,
            max_completion_length=spec.tokens,
            generation_kwargs={"min_new_tokens": spec.tokens},
            beta=0.0,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_steps=10**6,
            shuffle_dataset=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            spec.model,
            reward_funcs=score,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": messages(i, spec.shots)} for i in range(ITEMS)]),
            peft_config=LoraConfig(
                r=spec.rank, lora_alpha=2 * spec.rank, target_modules=list(LINEAR_LAYERS), task_type="CAUSAL_LM"
            ),
            callbacks=[Pipe(answers)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
