"""TRL's GRPOTrainer in a process of its own: one optimizer step for each question. Started by `bench.rounds`.

`python -m bench.trl_peer` runs whole steps, generation included; `bench.training_trl` trains on given tokens.
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
from bench.child import answers
from bench.memory import resident
from bench.peer import PeerSpec
from bench.sums import messages, reward

ITEMS = 256  # prompts until the first one comes again


class Steps(TrainerCallback):
    """Waits for a question before a step; answers with its seconds, and with what the log says of it."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.base = pipe, 0
        self.started = self.seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.base = resident()
        sys.stdin.readline()
        print(json.dumps({}), file=self.pipe, flush=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not sys.stdin.readline():
            os._exit(0)
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds = time.perf_counter() - self.started

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if "loss" in others["logs"]:
            answer = {"seconds": self.seconds, "base": self.base, "peak": resident("VmHWM"), "log": others["logs"]}
            print(json.dumps(answer), file=self.pipe, flush=True)


def train(spec: PeerSpec, pipe: Any, trainer_class: type[GRPOTrainer] = GRPOTrainer) -> None:
    """Steps until the pipe is closed."""
    torch.set_num_threads(spec.threads)
    episodes = spec.prompts * spec.group_size
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            # What is quickest for it on a CPU: bfloat16 weights under autocast (without autocast a step takes minutes),
            # nothing recomputed.
            model_init_kwargs={"dtype": "bfloat16"},
            bf16=True,
            gradient_checkpointing=False,
            per_device_train_batch_size=spec.batch,
            gradient_accumulation_steps=episodes // spec.batch,
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
        trainer_class(
            spec.model,
            reward_funcs=score,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": messages(i, spec.shots)} for i in range(ITEMS)]),
            peft_config=LoraConfig(
                r=spec.rank, lora_alpha=2 * spec.rank, target_modules=list(LINEAR_LAYERS), task_type="CAUSAL_LM"
            ),
            callbacks=[Steps(pipe)],
        ).train()


def score(completions: list[Any], **_: Any) -> list[float | None]:
    return [reward(completion[0]["content"]) for completion in completions]


if __name__ == "__main__":
    train(PeerSpec(**json.loads(sys.argv[1])), answers())
