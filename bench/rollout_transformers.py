"""transformers' `generate` with PEFT's mixed adapters, in a process of its own. Started by `bench.rollout`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from bench.child import answers, serve
from bench.decoding import Clock, adapter_of, prompts


class Ticks(LogitsProcessor):
    """Called with the logits of each step: the tokens before it are there."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.first = clock, True

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if not self.first:
            tick(self.clock)
        self.first = False
        return scores


def tick(clock: Clock) -> None:
    for row in range(clock.rows):
        clock.token(row)


def main() -> None:
    pipe = answers()
    model_path, adapters, threads, *folders = sys.argv[1:]
    torch.set_num_threads(int(threads))
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    model: Any = base
    if int(adapters):
        model = PeftModel.from_pretrained(base, folders[0], adapter_name="0")
        for number, folder in enumerate(folders[1 : int(adapters)], start=1):
            model.load_adapter(folder, adapter_name=str(number))
        for module in model.modules():  # PEFT loads them as float32; on bfloat16 activations that is one more cast
            for name in ("lora_A", "lora_B"):
                if hasattr(module, name):
                    getattr(module, name).to(torch.bfloat16)
    model.eval()
    model.generation_config.eos_token_id = None  # no token ends a row

    def generate(batch: int, adapters: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        ids = torch.tensor(prompts(batch, prompt, seed))
        clock = Clock(batch)
        mixed: dict[str, Any] = {}
        if adapters == 1:
            model.set_adapter("0")  # one adapter for all rows needs no mixing
        elif adapters:
            mixed = {"adapter_names": [str(adapter_of(row, adapters)) for row in range(batch)]}
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=tokens,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([Ticks(clock)]),
                **mixed,
            )
        tick(clock)
        return clock.answer()

    serve(pipe, generate)


if __name__ == "__main__":
    main()
