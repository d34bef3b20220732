"""A tiny random model with a character tokenizer, as a transformers folder: loads and learns in no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.alphabet import CHARACTERS, SPECIAL, VOCAB_SIZE

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, upper case folded; ChatML; `<|im_end|>` is the end-of-sequence token."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(**changes: Any) -> LlamaConfig:
    """Vocabulary 64, hidden 64, 2 layers, 4 heads on 2 key heads, context 512."""
    return LlamaConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.1,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
        }
        | changes
    )


def tiny_model_folder(path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Path:
    """Saves a random tiny Llama and its tokenizer under `path`; the same seed gives the same weights.

    `changes` are those of `tiny_config`.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_config(**changes))
    model.to(dtype).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def tiny_adapter_folder(
    model_folder: Path,
    path: Path,
    seed: int,
    rank: int = 8,
    alpha: float = 16.0,
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
) -> Path:
    """Saves a random LoRA (B not zero) for the tiny model, made and written by peft."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(target_modules), task_type="CAUSAL_LM")
        adapted = get_peft_model(model, config)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(path)
    return path
