"""`python -m tests.rank_zero FOLDER`: trains over two ranks and alone, prints how they differ, trains until killed.

A process of its own, because it joins a process group and ends with its ranks.
"""

import itertools
import json
import math
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from app.errors import NonFinite
from app.specs.job import HyperparametersSpec, LoraSpec
from workers.lora import fresh_adapter
from workers.training.grpo import Trajectory
from workers.training.optimizer import initial_state
from workers.training.ranks import make_trainer

CONFIG = Qwen3Config(  # with biases: every parameter that a layer of any family has
    attention_bias=True,
    head_dim=8,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
BUDGET = 48  # a group of four is two or three micro-batches
TEMPERATURE = 0.8
ROUNDS = {
    "one group of one micro-batch": [2],
    "an even number": [4, 4],
    "an odd number, a group without signal, an empty one": [4, 1, 0, 3, 2],
}
HYPERPARAMETERS = {
    "one step": HyperparametersSpec(learning_rate=1e-2),
    "one step with KL": HyperparametersSpec(learning_rate=1e-2, kl_coefficient=0.05),
    "two steps with KL": HyperparametersSpec(learning_rate=1e-2, kl_coefficient=0.05, minibatches=2),
}


def make_adapter():
    weights = fresh_adapter(CONFIG, LoraSpec(), seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.tensors.items():
        if "lora_B" in name:
            tensor.normal_(std=0.05, generator=generator)
    return weights


def make_groups(sizes):
    """Groups of ragged answers to prompts of nine tokens; rewards differ."""
    generator = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(3, 64, (n,), generator=generator).tolist()

    def episode(prompt, index):
        answer = ids(6 + 3 * index)
        engine = [0.0] * 9 + [-4.0] * len(answer)
        return Trajectory(prompt + answer, [0] * 9 + [1] * len(answer), engine, float(index), index, False)

    prompts = [ids(9) for _ in sizes]
    return [[episode(prompt, i) for i in range(size)] for prompt, size in zip(prompts, sizes, strict=True)]


def same(one, other):
    """Whether two updates gave the same bits, figures of the clock apart."""
    tensors = [
        (one.adapter.tensors, other.adapter.tensors),
        (one.optimizer.exp_avg, other.optimizer.exp_avg),
        (one.optimizer.exp_avg_sq, other.optimizer.exp_avg_sq),
    ]
    return (
        all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in tensors)
        and one.optimizer.step == other.optimizer.step
        and one.metrics | {"seconds": 0} == other.metrics | {"seconds": 0}
    )


def run(trainer, sizes, h, sums=None):
    ticks = []
    adapter = make_adapter()
    state = initial_state(adapter.tensors)
    result = trainer.update(
        adapter, state, make_groups(sizes), h, TEMPERATURE, lambda *t: ticks.append(t), sums=sums or {}
    )
    return result, ticks


def not_finite(trainer):
    """What is said of a round whose second micro-batch, so the second rank's, has a loss that is not a number."""
    groups = make_groups([4, 4])
    groups[0][0].engine_logprobs[-1] = math.nan
    adapter = make_adapter()
    try:
        trainer.update(adapter, initial_state(adapter.tensors), groups, HyperparametersSpec(), TEMPERATURE)
    except NonFinite as error:
        return error.message


def layer_bytes(trainer):
    """Of all layers; linear weights lie in another layout there, and count by their shapes."""
    model = trainer.model
    named = [pair for layer in model.layers for pair in layer.named_parameters()]
    others = sum(p.nbytes for name, p in named if not (name.startswith("projections") and name.endswith("weight")))
    return others + sum(out * in_ for out, in_ in model.shapes.values()) * model.dtype.itemsize


def compare(ranked, alone):
    found = {"layer bytes": ranked.held_bytes, "all layer bytes": layer_bytes(alone)}
    found["not finite"], found["not finite alone"] = not_finite(ranked), not_finite(alone)
    found["differ"] = []
    for (how, h), (which, sizes) in itertools.product(HYPERPARAMETERS.items(), ROUNDS.items()):
        (one, ticks), (other, other_ticks) = run(alone, sizes, h), run(ranked, sizes, h)
        if not (one.signal and same(one, other) and ticks == other_ticks):
            found["differ"].append(f"{which}, {how}")
    h, sizes = HYPERPARAMETERS["one step"], [4, 1, 0, 3, 2]
    sums = {p: ranked.group_sums(make_adapter(), make_groups(sizes)[p], h, TEMPERATURE) for p in (0, 1, 3)}
    if not same(run(alone, sizes, h)[0], run(ranked, sizes, h, sums)[0]):
        found["differ"].append("sums of groups")
    found["layer bytes after it"] = ranked.model.held_bytes()
    return found


def main(folder: Path) -> None:
    torch.manual_seed(0)
    Qwen3ForCausalLM(CONFIG).save_pretrained(folder)
    ranked = make_trainer(folder, torch.bfloat16, threads=1, microbatch_tokens=BUDGET, ranks=2)
    alone = make_trainer(folder, torch.bfloat16, threads=1, microbatch_tokens=BUDGET, ranks=1)
    print(json.dumps(compare(ranked, alone)), flush=True)
    print(ranked.others[0].process.pid, flush=True)
    while True:  # until a rank is killed
        run(ranked, [4, 4], HYPERPARAMETERS["one step"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
