"""One of this system's engines behind its protocol, in a process of its own. Started by `bench.rollout`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.child import answers, serve
from bench.decoding import Clock, adapter_of, prompts
from workers.rollout.engine import Engine, GenerationRequest, SamplingParams


def make(kind: str, model: Path, *, slots: int, adapters: int, length: int, threads: int) -> Engine:
    sizes: dict[str, Any] = {
        "slots": slots,
        "adapter_slots": max(1, adapters),
        "kv_tokens": slots * length,
        "max_lora_rank": 8,
        "threads": threads,
    }
    if kind == "torch":
        from workers.rollout.torch_engine import TorchEngine

        return TorchEngine(model, torch.bfloat16, **sizes)
    from workers.rollout.vllm_engine import VllmEngine

    return VllmEngine(model, torch.bfloat16, **sizes)


def ticked(clock: Clock, row: int, token: int, logprob: float) -> None:
    clock.token(row)


def main() -> None:
    pipe = answers()
    kind, model, slots, adapters, length, threads, *folders = sys.argv[1:]
    engine = make(kind, Path(model), slots=int(slots), adapters=int(adapters), length=int(length), threads=int(threads))
    for number, folder in enumerate(folders[: int(adapters)]):
        engine.load_adapter(str(number), Path(folder))

    def generate(batch: int, adapters: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        clock = Clock(batch)
        waiting = []
        for row, ids in enumerate(prompts(batch, prompt, seed)):
            adapter = adapter_of(row, adapters)
            request = GenerationRequest(
                id=f"{seed}-{row}",
                token_ids=ids,
                adapter=None if adapter is None else str(adapter),
                sampling=SamplingParams(max_tokens=tokens, seed=seed + row),
            )
            waiting.append(engine.generate(request, partial(ticked, clock, row)))
        for future in waiting:
            future.result()
        return clock.answer()

    serve(pipe, generate)


if __name__ == "__main__":
    main()
