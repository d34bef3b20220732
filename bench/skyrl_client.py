"""Jobs of GRPO-like steps on SkyRL's Tinker backend, as its own client makes them, in its own environment.

A step is what a round is here: weights to the sampler, 4 × 8 episodes, rewards, forward and backward with the
importance-sampling loss, AdamW. The weights stay in the server's memory, which spares it the writing of a checkpoint.
Started by `bench.skyrl`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import count
from statistics import fmean, stdev
from typing import Any

import tinker
from tinker import types
from transformers import AutoTokenizer

from bench.child import answers, serve
from bench.sums import messages, reward

LEARNING_RATE = 1e-4


class Job:
    def __init__(self, training: Any, tokenizer: Any, prompts: int, group: int, tokens: int) -> None:
        self.training, self.tokenizer = training, tokenizer
        self.prompts, self.group = prompts, group
        self.sampling = types.SamplingParams(max_tokens=tokens, temperature=1.0)  # no stop: all tokens are forced
        self.indices = count()

    async def step(self) -> float:
        """Seconds from one set of weights to the next."""
        started = time.perf_counter()
        sampler = await self.training.save_weights_and_get_sampling_client_async()
        prompts = [
            list(
                self.tokenizer.apply_chat_template(
                    messages(next(self.indices), 0), add_generation_prompt=True, return_dict=False
                )
            )
            for _ in range(self.prompts)
        ]
        groups = await asyncio.gather(
            *(sampler.sample_async(types.ModelInput.from_ints(ids), self.group, self.sampling) for ids in prompts)
        )
        data = [
            datum(prompt, sequence, advantage)
            for prompt, found in zip(prompts, groups, strict=True)
            for sequence, advantage in zip(found.sequences, self.advantages(found.sequences), strict=True)
        ]
        passed = await self.training.forward_backward_async(data, "importance_sampling")
        stepped = await self.training.optim_step_async(types.AdamParams(learning_rate=LEARNING_RATE))
        await passed.result_async()
        await stepped.result_async()
        return time.perf_counter() - started

    def advantages(self, sequences: Any) -> list[float]:
        if any(len(sequence.tokens) != self.sampling.max_tokens for sequence in sequences):
            raise RuntimeError(f"{[len(s.tokens) for s in sequences]} tokens, not {self.sampling.max_tokens} each")
        rewards = [reward(self.tokenizer.decode(sequence.tokens)) for sequence in sequences]
        mean, spread = fmean(rewards), stdev(rewards)
        return [(value - mean) / (spread + 1e-4) for value in rewards]


def datum(prompt: list[int], sequence: Any, advantage: float) -> Any:
    """The loss is on what was sampled; everything is shifted by one, as targets are."""
    ids = prompt + list(sequence.tokens)
    before = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": ids[1:],
            "logprobs": [0.0] * before + list(sequence.logprobs),
            "advantages": [0.0] * before + [advantage] * len(sequence.tokens),
        },
    )


def main() -> None:
    pipe = answers()
    url, model, jobs, rank, prompts, group, tokens = sys.argv[1:]
    loop = asyncio.new_event_loop()
    service = tinker.ServiceClient(base_url=url, api_key="tml-bench")
    tokenizer = AutoTokenizer.from_pretrained(model)

    async def create() -> list[Job]:
        made = [
            await service.create_lora_training_client_async(base_model=model, rank=int(rank), seed=seed)
            for seed in range(int(jobs))
        ]
        return [Job(training, tokenizer, int(prompts), int(group), int(tokens)) for training in made]

    ready = loop.run_until_complete(create())

    async def several(job: Job, steps: int) -> list[float]:
        return [await job.step() for _ in range(steps)]

    async def run(jobs: int, steps: int) -> dict[str, Any]:
        started = time.perf_counter()
        seconds = await asyncio.gather(*(several(job, steps) for job in ready[:jobs]))
        return {"seconds": time.perf_counter() - started, "steps": list(seconds)}

    serve(pipe, lambda jobs, steps: loop.run_until_complete(run(jobs, steps)))


if __name__ == "__main__":
    main()
