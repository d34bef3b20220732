"""Pass rates on held-out prompts, with plain transformers and PEFT: none of the service's own engine has a part in it.

Run as a process of its own, before the workers start and after they stopped: one line of JSON a job on stdout.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, Cache

from app.specs.job import JobSpec
from workers.rollout.chat import Chat
from workers.tools.environment import JSON, Action, Environment
from workers.tools.registry import build_registry

PROMPTS = 64
BATCH = 32
CALLS_AT_ONCE = 32  # environments may take their time to answer


@dataclass
class Episode:
    context: list[int]
    state: JSON
    answer: str = ""
    passed: bool = False
    done: bool = False


@dataclass(frozen=True)
class Generator:
    """A model, and how a job samples from it."""

    model: Any
    spec: JobSpec
    stop_ids: Sequence[int]

    def __call__(self, contexts: Sequence[list[int]]) -> Iterator[list[int]]:
        """Sampled ids of each context, the stop id included where there is one."""
        # The solved examples are the same for all: their keys and values are computed once.
        shared = list(commonprefix(contexts))[: min(map(len, contexts)) - 1]
        with torch.inference_mode():
            prefix = self.model(input_ids=torch.tensor([shared]), use_cache=True, logits_to_keep=1).past_key_values
        for start in range(0, len(contexts), BATCH):
            yield from self._batch(shared, prefix, contexts[start : start + BATCH])

    def _batch(self, shared: list[int], prefix: Cache, contexts: Sequence[list[int]]) -> Iterator[list[int]]:
        width, pad = max(map(len, contexts)), self.stop_ids[0]
        # The padding stands between what is cached and what is a context's own; positions do not count it.
        padding = [width - len(context) for context in contexts]
        ids = [shared + [pad] * n + context[len(shared) :] for n, context in zip(padding, contexts, strict=True)]
        mask = [[1] * len(shared) + [0] * n + [1] * (width - n - len(shared)) for n in padding]
        cache = copy.deepcopy(prefix)
        cache.batch_repeat_interleave(len(contexts))
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                past_key_values=cache,
                do_sample=True,
                temperature=self.spec.sampling.temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self.spec.sampling.max_tokens,
                eos_token_id=list(self.stop_ids),
                pad_token_id=pad,
            )
        for row in output[:, width:].tolist():
            end = next((i + 1 for i, id in enumerate(row) if id in self.stop_ids), len(row))
            yield row[:end]


def play(spec: JobSpec, chat: Chat, environment: Environment, generator: Generator) -> list[Episode]:
    """An episode of each held-out prompt, played to its end."""
    prompts = [environment.reset(index, "eval") for index in range(PROMPTS)]
    episodes = [Episode(chat.render_prompt(prompt.messages, prompt.tools), prompt.state) for prompt in prompts]
    with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
        for turns_left in reversed(range(spec.environment.max_turns)):
            live = [episode for episode in episodes if not episode.done]
            if not live:
                break
            sampled = list(generator([episode.context for episode in live]))

            def step(episode: Episode, ids: list[int], turns_left: int = turns_left) -> None:
                episode.answer = chat.decode(ids)
                outcome = environment.step(
                    episode.state, Action(episode.answer, truncated=ids[-1] not in chat.stop_ids), turns_left
                )
                episode.state, episode.done = outcome.state, outcome.done
                if outcome.done:
                    reward = outcome.reward or 0.0
                    episode.passed = reward >= 1 if outcome.passed is None else outcome.passed
                else:
                    episode.context += ids + chat.extend(ids, outcome.observation)

            list(pool.map(step, live, sampled))
    return episodes


def evaluate(spec: JobSpec, model_folder: Path, adapter: Path | None) -> dict[str, Any]:
    """The pass rate, and how often the most frequent answer was given: a policy that always says the same shows."""
    started = time.monotonic()
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    model.eval()
    torch.manual_seed(spec.seed)
    chat = Chat.load(model_folder)
    environment = build_registry().create(spec.environment.type, spec.environment.params, spec.seed)
    episodes = play(spec, chat, environment, Generator(model, spec, chat.stop_ids))
    (most_frequent, count), *_ = Counter(episode.answer.strip() for episode in episodes).most_common(1)
    return {
        "job": spec.name,
        "prompts": PROMPTS,
        "episodes": len(episodes),
        "pass_rate": sum(episode.passed for episode in episodes) / len(episodes),
        "most_frequent_answer": most_frequent[:80],
        "most_frequent_share": count / len(episodes),
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, help="a folder with a PEFT folder a job; none: the base model alone")
    parser.add_argument("jobs", type=Path, nargs="+")
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    for path in arguments.jobs:
        spec = JobSpec.model_validate(yaml.safe_load(path.read_text()))
        adapter = arguments.adapters / spec.name if arguments.adapters else None
        print(json.dumps(evaluate(spec, arguments.model, adapter)), flush=True)


if __name__ == "__main__":
    main()
