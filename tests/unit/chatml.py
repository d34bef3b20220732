"""A small byte-level tokenizer with ChatML templates, one that knows tools and one that does not."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PLAIN = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen's: tools in the system turn, tool results in a user turn, contents trimmed, thoughts of past turns dropped.
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}\n{% endif %}"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}Call with <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<|im_start|>user\n"
    "<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{% elif message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ message.content.split('</think>')[-1] | trim }}<|im_end|>\n"
    "{% elif message.role != 'system' or not tools %}"
    "<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# As Qwen's: added tokens, but not special.
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def make_tokenizer(template: str = PLAIN, markup: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE over a few words; ids 0 to 2 are SPECIAL, and `<|im_end|>` ends a turn."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["system user assistant tool What is the answer? the calculator\n\n" * 4], trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in markup])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)
