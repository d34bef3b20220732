"""Fresh adapters and the PEFT folder."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from app.errors import AdapterInvalid, ObjectMissing
from app.specs.job import LoraSpec
from workers.lora import fresh_adapter, read_adapter, write_adapter
from workers.training.grpo import Trajectory
from workers.training.lora_model import LoraModel
from workers.training.packing import pack_group

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(CONFIG).save_pretrained(folder)
    return folder


def random_adapter(spec, seed=0):
    """A fresh adapter whose B is not zero, so that its branch shows."""
    weights = fresh_adapter(CONFIG, spec, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, tensor in weights.tensors.items():
        if "lora_B" in name:
            tensor.normal_(std=0.2, generator=generator)
    return weights


def test_fresh_adapter_has_pefts_names_shapes_and_ranges():
    spec = LoraSpec(rank=8, target_modules=("q_proj", "down_proj"))
    weights = fresh_adapter(CONFIG, spec, 0)
    peft_model = get_peft_model(LlamaForCausalLM(CONFIG), LoraConfig(r=8, target_modules=list(spec.target_modules)))
    theirs = {n.replace(".default", ""): p for n, p in peft_model.named_parameters() if "lora_" in n}
    assert {n: t.shape for n, t in weights.tensors.items()} == {n: p.shape for n, p in theirs.items()}
    for name, tensor in weights.tensors.items():
        bound = tensor.shape[1] ** -0.5
        if "lora_B" in name:
            assert not tensor.any()
        else:
            assert 0.9 * bound < tensor.abs().max() <= bound


def test_the_seed_fixes_a_fresh_adapter(base):
    first, again, other = (fresh_adapter(base, LoraSpec(), seed).tensors for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    "spec", [LoraSpec(rank=8, alpha=24.0), LoraSpec(rank=1, alpha=0.5, target_modules=("v_proj",))]
)
def test_peft_loads_a_written_adapter_and_computes_the_same_logprobs(base, tmp_path, spec):
    weights = random_adapter(spec)
    write_adapter(tmp_path, weights, str(base))
    ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(3)).tolist()

    peft_model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
    with torch.no_grad():
        logits = peft_model(torch.tensor([ids])).logits[0, :-1] / 0.7
    theirs = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)

    model = LoraModel(base, torch.float32)
    (batch,) = pack_group([Trajectory(ids, [0] + [1] * 11, [0.0] * 12, 0.0, 0, False)], [1.0], 100)
    with torch.no_grad():
        ours, _ = model.chosen_logprobs(batch, 0.7, model.fuse(weights.tensors, weights.scaling))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_what_is_written_is_read_back_bit_for_bit(tmp_path):
    weights = random_adapter(LoraSpec(rank=16, alpha=32.0))
    write_adapter(tmp_path, weights, "base")
    again = read_adapter(tmp_path)
    assert (again.rank, again.alpha, again.target_modules) == (16, 32.0, weights.target_modules)
    assert again.tensors.keys() == weights.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in weights.tensors.items())


def test_the_same_weights_give_the_same_bytes(tmp_path):
    weights = random_adapter(LoraSpec())
    write_adapter(tmp_path / "a", weights, "base")
    write_adapter(tmp_path / "b", read_adapter(tmp_path / "a"), "base")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_missing_adapter_file_is_named(tmp_path):
    write_adapter(tmp_path, random_adapter(LoraSpec()), "base")
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ObjectMissing, match="adapter"):
        read_adapter(tmp_path)


def test_an_adapter_with_nan_is_refused_at_load(tmp_path):
    weights = random_adapter(LoraSpec())
    name = next(iter(weights.tensors))
    weights.tensors[name][0, 0] = torch.nan
    write_adapter(tmp_path, weights, "base")
    with pytest.raises(AdapterInvalid, match=name):
        read_adapter(tmp_path)


def test_an_adapter_of_another_shape_does_not_fit(base):
    weights = random_adapter(LoraSpec())
    name = next(iter(weights.tensors))
    with pytest.raises(AdapterInvalid, match=name):
        LoraModel(base, torch.float32).check_fits(weights.tensors | {name: torch.zeros(8, 5)}, 8)
