"""This system's trainer, in a process of its own: one update for each question. Started by `bench.training`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from app.settings import get_settings
from app.specs.job import HyperparametersSpec, LoraSpec
from bench.child import answers, serve
from bench.decoding import Episode, episodes
from bench.memory import resident
from workers.lora import fresh_adapter
from workers.training.grpo import Trajectory
from workers.training.optimizer import initial_state
from workers.training.trainer import Trainer


def trajectory(episode: Episode, index: int) -> Trajectory:
    prompt, response = len(episode.prompt), len(episode.response)
    return Trajectory(
        token_ids=[*episode.prompt, *episode.response],
        loss_mask=[0] * prompt + [1] * response,
        engine_logprobs=[0.0] * prompt + [-5.0] * response,
        reward=episode.reward,
        index=index,
        truncated=True,
    )


def main() -> None:
    pipe = answers()
    spec = json.loads(sys.argv[1])
    model = Path(spec["model"])
    trainer = Trainer(
        model, torch.bfloat16, threads=spec["threads"], microbatch_tokens=get_settings().train_microbatch_tokens
    )
    adapter = fresh_adapter(model, LoraSpec(rank=spec["rank"], alpha=2 * spec["rank"]), seed=0)
    optimizer = initial_state(adapter.tensors)
    found = episodes(spec["prompts"], spec["group_size"], spec["prompt"], spec["tokens"], seed=0)
    groups = [[trajectory(episode, index) for index, episode in enumerate(group)] for group in found]
    base = resident()

    def update() -> dict[str, Any]:
        started = time.perf_counter()
        trainer.update(adapter, optimizer, groups, HyperparametersSpec(), temperature=1.0)
        return {"seconds": time.perf_counter() - started, "base": base, "peak": resident("VmHWM")}

    serve(pipe, update)


if __name__ == "__main__":
    main()
