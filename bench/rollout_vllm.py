"""vLLM itself, without any code of this system, in a process and an environment of its own.

Started by `bench.rollout` with the Python of the vLLM environment. Its settings are the quickest that were found for
it on a CPU: engine in this process (no serialisation between two), OpenMP's threads bound to cores, no seeds, no
logprobs.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.child import answers, serve
from bench.decoding import Clock, adapter_of, prompts


def main() -> None:
    pipe = answers()
    model, slots, adapters, length, *folders = sys.argv[1:]

    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    lora = {"enable_lora": True, "max_loras": int(adapters), "max_cpu_loras": int(adapters), "max_lora_rank": 8}
    engine = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=int(length),
        max_num_seqs=int(slots),
        disable_log_stats=True,
        **(lora if int(adapters) else {}),
    ).llm_engine
    requests = [LoRARequest(str(n), n + 1, folder) for n, folder in enumerate(folders[: int(adapters)])]
    for request in requests:
        engine.add_lora(request)

    def generate(batch: int, adapters: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        clock = Clock(batch)
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        for row, ids in enumerate(prompts(batch, prompt, seed)):
            adapter = adapter_of(row, adapters)
            engine.add_request(
                str(row),
                {"prompt_token_ids": ids},
                sampling,
                lora_request=None if adapter is None else requests[adapter],
            )
        while engine.has_unfinished_requests():
            for output in engine.step():
                row = int(output.request_id)
                for _ in range(len(output.outputs[0].token_ids) - len(clock.times[row])):
                    clock.token(row)
        return clock.answer()

    serve(pipe, generate)


if __name__ == "__main__":
    main()
