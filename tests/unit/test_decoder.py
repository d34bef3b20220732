"""The decoder's logits against transformers' and peft's, in float32."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from app.errors import InvalidRequest
from tests.tiny import VOCAB_SIZE, tiny_adapter_folder, tiny_config, tiny_model_folder
from workers.lora import read_adapter
from workers.rollout.attention import DecodeAttention, KVCache, PrefillAttention, Span
from workers.rollout.decoder import FUSED, Decoder
from workers.rollout.slots import AdapterBatch, Slot, fill_slot

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(tiny_config())


def llama_tied() -> PreTrainedModel:
    return LlamaForCausalLM(tiny_config(tie_word_embeddings=True))


def llama3_rope() -> PreTrainedModel:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return LlamaForCausalLM(tiny_config(rope_parameters=rope))


def qwen2_with_bias() -> PreTrainedModel:
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    return model


def qwen3_with_head_norms() -> PreTrainedModel:
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32))
    for name, parameter in model.named_parameters():
        if "_norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def cache_of(decoder: Decoder, rows: int) -> KVCache:
    cache = KVCache(len(decoder.layers), rows, decoder.kv_heads, 64, decoder.head_dim, decoder.dtype)
    cache.fit(64, 0)
    return cache


def prefill(decoder: Decoder, cache: KVCache, prompts: list[list[int]], lora: object = None) -> torch.Tensor:
    """Logits of every token of the prompts, packed; prompt i goes to cache row i."""
    spans = [Span(row, 0, len(ids)) for row, ids in enumerate(prompts)]
    attend = PrefillAttention(cache, spans, decoder.heads // decoder.kv_heads)
    return decoder.logits(decoder.forward(torch.tensor(sum(prompts, [])), attend, lora))


def random_ids(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
@pytest.mark.parametrize("make", [llama, llama_tied, llama3_rope, qwen2_with_bias, qwen3_with_head_norms])
def test_prefill_and_cached_decode_equal_transformers(make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make().save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    decoder = Decoder(tmp_path, torch.float32, rows=2)
    cache = cache_of(decoder, 2)
    sequences = [random_ids(40, 1), random_ids(33, 2)]
    expected = [reference(torch.tensor([ids])).logits[0] for ids in sequences]

    prompts = [sequences[0][:35], sequences[1][:28]]
    got = prefill(decoder, cache, prompts)
    torch.testing.assert_close(got, torch.cat((expected[0][:35], expected[1][:28])), atol=1e-4, rtol=0)
    for step in range(5):
        attend = DecodeAttention(cache, torch.tensor([35 + step, 28 + step]))
        tokens = torch.tensor([sequences[0][35 + step], sequences[1][28 + step]])
        got = decoder.logits(decoder.forward(tokens, attend, None))
        torch.testing.assert_close(
            got, torch.stack((expected[0][35 + step], expected[1][28 + step])), atol=1e-4, rtol=0
        )


@torch.inference_mode()
def test_prefill_in_chunks_equals_prefill_at_once(tmp_path: Path) -> None:
    decoder = Decoder(tiny_model_folder(tmp_path), torch.float32, rows=1)
    ids, group = random_ids(40, 1), decoder.heads // decoder.kv_heads
    at_once = prefill(decoder, cache_of(decoder, 1), [ids])
    cache, chunks = cache_of(decoder, 1), []
    for start, stop in ((0, 17), (17, 30), (30, 40)):
        attend = PrefillAttention(cache, [Span(0, start, stop)], group)
        chunks.append(decoder.logits(decoder.forward(torch.tensor(ids[start:stop]), attend, None)))
    torch.testing.assert_close(torch.cat(chunks), at_once, atol=1e-4, rtol=0)


def test_another_model_family_is_refused(tmp_path: Path) -> None:
    MistralForCausalLM(MistralConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match="mistral"):
        Decoder(tmp_path, torch.float32, rows=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Different ranks, scalings and sets of modules."""
    root = tmp_path_factory.mktemp("adapters")
    return [
        tiny_adapter_folder(model, root / "full", seed=1, rank=8),
        tiny_adapter_folder(model, root / "high", seed=2, rank=16, alpha=24),
        tiny_adapter_folder(model, root / "some", seed=3, rank=1, target_modules=("q_proj", "v_proj", "down_proj")),
    ]


@pytest.fixture(scope="module")
def decoder(model: Path) -> Decoder:
    return Decoder(model, torch.float32, rows=4)


def slot_of(decoder: Decoder, folder: Path) -> Slot:
    layers = len(decoder.layers)
    return fill_slot(str(folder), read_adapter(folder), decoder.shapes, layers, decoder.dtype, max_rank=16)


def mixed_logits(decoder: Decoder, slots: list[Slot | None], prompts: list[list[int]]) -> torch.Tensor:
    """Logits of each row's last token after prefill and one decode step, all rows in one batch."""
    active = list(dict.fromkeys(slot for slot in slots if slot is not None))
    batch = AdapterBatch(decoder.shapes, len(decoder.layers))
    batch.hold(active)
    cache = cache_of(decoder, len(prompts))
    heads = [ids[:-1] for ids in prompts]
    by_token = [slot for slot, ids in zip(slots, heads, strict=True) for _ in ids]
    prefill(decoder, cache, heads, batch.rows(by_token))
    attend = DecodeAttention(cache, torch.tensor([len(ids) for ids in heads]))
    return decoder.logits(decoder.forward(torch.tensor([ids[-1] for ids in prompts]), attend, batch.rows(slots)))


PROMPTS = [random_ids(length, seed) for seed, length in enumerate((20, 9, 31, 14))]


@torch.inference_mode()
def test_mixed_adapters_equal_peft_one_by_one(decoder: Decoder, model: Path, adapters: list[Path]) -> None:
    slots = [*(slot_of(decoder, folder) for folder in adapters), None]
    got = mixed_logits(decoder, slots, PROMPTS)
    for row, folder in enumerate([*adapters, None]):
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        if folder is not None:
            reference = PeftModel.from_pretrained(reference, folder)
        expected = reference(input_ids=torch.tensor([PROMPTS[row]])).logits[0, -1]
        torch.testing.assert_close(got[row], expected, atol=1e-4, rtol=0)


def relative_gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@torch.inference_mode()
def test_each_row_of_a_mixed_batch_equals_its_adapter_alone(decoder: Decoder, adapters: list[Path]) -> None:
    slots = [*(slot_of(decoder, folder) for folder in adapters), None]
    mixed = mixed_logits(decoder, slots, PROMPTS)
    alone = [mixed_logits(decoder, [slot], [ids])[0] for slot, ids in zip(slots, PROMPTS, strict=True)]
    assert max(relative_gap(mixed[row], alone[row]) for row in range(4)) < 1e-5


@torch.inference_mode()
def test_swapped_adapters_do_not_pass_for_each_other(decoder: Decoder, adapters: list[Path]) -> None:
    first, second, third = (slot_of(decoder, folder) for folder in adapters)
    swapped = mixed_logits(decoder, [second, first, third, None], PROMPTS)
    alone = [mixed_logits(decoder, [slot], [ids])[0] for slot, ids in zip((first, second), PROMPTS[:2], strict=True)]
    assert min(relative_gap(swapped[row], alone[row]) for row in range(2)) > 1e-2


@torch.inference_mode()
def test_a_huge_adapter_does_not_touch_its_neighbours(decoder: Decoder, adapters: list[Path]) -> None:
    """Its low-rank activations overflow, also those that are computed for other rows."""
    huge, other = slot_of(decoder, adapters[0]), slot_of(decoder, adapters[1])
    for tensor in (*huge.a.values(), *huge.b.values()):
        tensor.fill_(1e38)
    mixed = mixed_logits(decoder, [huge, other], PROMPTS[:2])
    alone = mixed_logits(decoder, [other], PROMPTS[1:2])
    assert not mixed[0].isfinite().all()
    assert relative_gap(mixed[1], alone[0]) < 1e-5


@torch.inference_mode()
def test_adapters_come_and_go_and_have_unequal_numbers_of_rows(decoder: Decoder, adapters: list[Path]) -> None:
    """The batch's products against each row's own, over projections of one and of several modules."""
    first, second, third = (slot_of(decoder, folder) for folder in adapters)
    fourth = slot_of(decoder, adapters[0])
    batch = AdapterBatch(decoder.shapes, len(decoder.layers))
    for held in ([first, second], [third, first, fourth], [fourth, second], [first]):
        batch.hold(held)
        slots = [None, *held, *[held[-1]] * 9, held[0], None]
        lora = batch.rows(slots)
        for fused, modules in FUSED.items():
            x = torch.randn(len(slots), decoder.shapes[modules[0]][1])
            expected = [torch.zeros(len(slots), decoder.shapes[module][0]) for module in modules]
            for row, slot in enumerate(slots):
                for out, module in zip(expected, modules, strict=True):
                    if slot is not None and module in slot.a:
                        out[row] = x[row] @ slot.a[module][1].T @ slot.b[module][1].T * slot.scaling
            got = torch.zeros(len(slots), sum(out.shape[1] for out in expected))
            lora.add(fused, 1, x, got)
            torch.testing.assert_close(got, torch.cat(expected, 1), atol=1e-4, rtol=1e-4)


def test_the_cache_keeps_its_rows_when_their_reach_changes() -> None:
    cache = KVCache(layers=2, rows=3, kv_heads=2, length=100, head_dim=4, dtype=torch.float32)
    cache.data.fill_(torch.nan)  # of earlier requests
    for row in (0, 1):
        cache.copy(2, row, 0)
    tokens = torch.randn(2, 2, 2, 2, 20, 4)
    cache.data[:, :, :2, :, :20] = tokens
    for length, reach in ((33, 64), (99, 100), (40, 100), (21, 32), (64, 64)):
        cache.fit(length, rows=2)
        assert cache.reach == reach
        assert torch.equal(cache.data[:, :, :2, :, :20], tokens)
        assert not cache.data[:, :, :2, :, 20:].any()
