"""Converts a GGUF file into a model folder: `python -m workers.convert_gguf SOURCE.gguf FOLDER`.

Quantized weights are dequantized and kept as bfloat16 safetensors, with the tokenizer and chat template of the file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(source: Path, target: Path) -> None:
    """Writes config, weights and tokenizer of the GGUF file `source` into the folder `target`."""
    folder, file = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=file, dequantize=True),
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
