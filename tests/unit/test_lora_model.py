"""The trainer's model against transformers' own autograd, in float64, for each family."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from app.errors import InvalidRequest
from app.specs.job import LINEAR_LAYERS, LoraSpec
from workers.lora import fresh_adapter
from workers.training.grpo import Trajectory
from workers.training.lora_model import LoraModel
from workers.training.packing import pack_group

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
TEMPERATURE = 0.7
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama with one head a key head": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 4})),
    "llama tied, with biases": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    ),
    "llama 3": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
}


def save(family, folder):
    """A random model whose norms and biases are not trivial."""
    torch.manual_seed(0)
    model = FAMILIES[family]()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


def adapter_of(folder, target_modules):
    weights = fresh_adapter(folder, LoraSpec(rank=8, alpha=12.0, target_modules=target_modules), 0)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights.tensors.items():
        if "lora_B" in name:
            tensor.normal_(std=0.1, generator=generator)
    return weights


def ids(n, generator):
    return torch.randint(3, 64, (n,), generator=generator).tolist()


def ragged_group():
    """Rows of unlike length behind a prompt."""
    generator = torch.Generator().manual_seed(0)
    prompt = ids(6, generator)
    return [
        Trajectory(prompt + ids(n, generator), [0] * 6 + [1] * n, [0.0] * (6 + n), 0.0, i, False)
        for i, n in enumerate([5, 9, 1, 5])
    ]


def group_with_history():
    """Rows that share a sampled turn and a tool's answer, and go different ways after it."""
    generator = torch.Generator().manual_seed(0)
    history, mask = ids(12, generator), [0] * 5 + [1] * 4 + [0] * 3
    return [
        Trajectory(history + ids(n, generator), mask + [1] * n, [0.0] * (12 + n), 0.0, i, False)
        for i, n in enumerate([4, 4, 2])
    ]


VALUES = [1.0, -0.5, 0.75, -1.25]


def theirs(folder, group, weights):
    """Sum of advantage times logprob and its gradients by name: one row at a time, nothing shared."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    masters = {name: t.double().requires_grad_() for name, t in weights.tensors.items()}
    for name, module in model.named_modules():
        a, b = (masters.get(f"base_model.model.{name}.lora_{side}.weight") for side in "AB")
        if a is not None:
            module.register_forward_hook(lambda _, x, y, a=a, b=b: y + (x[0] @ a.T @ b.T) * weights.scaling)
    total = torch.zeros((), dtype=torch.float64)
    for trajectory, value in zip(group, VALUES, strict=False):
        tokens = torch.tensor(trajectory.token_ids)
        logprobs = (model(tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        chosen = logprobs.gather(-1, tokens[1:, None]).squeeze(-1)
        total = total + value * (chosen * torch.tensor(trajectory.loss_mask[1:])).sum()
    return total.item(), dict(zip(masters, torch.autograd.grad(total, list(masters.values())), strict=True))


def ours(model, batches, weights):
    tensors = {name: t.to(model.dtype, copy=True).requires_grad_() for name, t in weights.tensors.items()}
    adapter = model.fuse(tensors, weights.scaling)
    totals = [(model.chosen_logprobs(b, TEMPERATURE, adapter)[0] * b.advantages).sum() for b in batches]
    total = torch.stack(totals).sum()
    return total.item(), dict(zip(tensors, torch.autograd.grad(total, list(tensors.values())), strict=True))


@pytest.mark.parametrize("target_modules", [LINEAR_LAYERS, ("k_proj", "up_proj")], ids=["all", "some"])
@pytest.mark.parametrize("group", [ragged_group, group_with_history])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_equal_transformers(tmp_path, family, group, target_modules):
    folder = save(family, tmp_path)
    weights, group = adapter_of(folder, target_modules), group()
    want, want_gradients = theirs(folder, group, weights)
    (batch,) = pack_group(group, VALUES[: len(group)], 4096)
    total, gradients = ours(LoraModel(folder, torch.float64), [batch], weights)
    assert total == pytest.approx(want, rel=1e-6)
    assert gradients.keys() == want_gradients.keys()
    for name, gradient in want_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_gives_the_same_gradients_bit_for_bit(tmp_path, dtype):
    folder = save("qwen3", tmp_path)
    weights = adapter_of(folder, LINEAR_LAYERS)
    batches = pack_group(ragged_group(), VALUES, 16)
    _, plain = ours(LoraModel(folder, dtype), batches, weights)
    _, checkpointed = ours(LoraModel(folder, dtype, checkpointing=True), batches, weights)
    assert all(torch.equal(checkpointed[name], gradient) for name, gradient in plain.items())


def test_a_model_of_another_family_is_refused(tmp_path):
    MistralForCausalLM(MistralConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match="model type mistral is not one of llama, qwen2, qwen3"):
        LoraModel(tmp_path, torch.float32)


def test_an_activation_other_than_silu_is_refused(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu")).save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match="SiLU"):
        LoraModel(tmp_path, torch.float32)
