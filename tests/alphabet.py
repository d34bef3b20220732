"""What the tiny model reads and writes, apart from the model: processes that load no model need no torch."""

from __future__ import annotations

import string

SPECIAL = ("<pad>", "<|im_end|>", "<|im_start|>", "<unk>")
CHARACTERS = string.ascii_lowercase + string.digits + "\n .,?!:;+-*/=()<>_{}[]\"'"
VOCAB_SIZE = len(SPECIAL) + len(CHARACTERS)  # 64
