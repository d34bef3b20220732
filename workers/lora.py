"""LoRA adapters in PEFT's format: read, check, digest. Shared by the engines and the trainer.

The file holds float32 masters (rule 8). Both the engines and the trainer's forward use the cast to the base
model's compute dtype; `weights_digest` is taken over that cast, so an engine can prove what its slot holds.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from app.errors import AdapterInvalid, ObjectMissing
from app.specs.job import LoraSpec

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class LoraWeights:
    """Float32 masters by PEFT name (see `tensor_name`): `…lora_A.weight` [rank, in], `…lora_B.weight` [out, rank]."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    tensors: Mapping[str, torch.Tensor]

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


def tensor_name(module: str, side: Literal["A", "B"]) -> str:
    """PEFT's name of a LoRA tensor of `module`, e.g. `model.layers.0.self_attn.q_proj`."""
    return f"base_model.model.{module}.lora_{side}.weight"


def weights_digest(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> str:
    """SHA-256 over (name, shape, bytes) of each tensor cast to `dtype`, in order of name."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        cast = tensors[name].detach().to("cpu", dtype).contiguous()
        sha.update(f"{name}:{tuple(cast.shape)}:{dtype};".encode())
        sha.update(cast.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises AdapterInvalid naming the first tensor that holds NaN or infinity."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise AdapterInvalid(f"adapter tensor {name} holds NaN or infinity", param=name)


def read_adapter(folder: Path) -> LoraWeights:
    """Reads and checks a PEFT folder.

    Raises ObjectMissing (no file) or AdapterInvalid (broken, not plain LoRA, not finite).
    """
    try:
        return parse_adapter((folder / CONFIG_FILE).read_bytes(), (folder / WEIGHTS_FILE).read_bytes())
    except FileNotFoundError as error:
        raise ObjectMissing(f"adapter file {error.filename or folder} is missing") from error


def parse_adapter(config_file: bytes, weights_file: bytes) -> LoraWeights:
    """Checks what the two files hold. Raises AdapterInvalid (broken, not plain LoRA, not finite)."""
    try:
        config = json.loads(config_file)
        tensors = load(weights_file)
    except (ValueError, SafetensorError) as error:
        raise AdapterInvalid(f"adapter cannot be read: {error}") from error
    if (
        config.get("peft_type") != "LORA"
        or config.get("bias", "none") != "none"
        or config.get("use_dora")
        or config.get("use_rslora")
    ):
        raise AdapterInvalid("adapter is not a plain LoRA (peft_type LORA, bias none, no DoRA, no rsLoRA)")
    check_finite(tensors)
    return LoraWeights(
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        target_modules=tuple(config["target_modules"]),
        tensors=tensors,
    )


def fresh_adapter(model: PretrainedConfig | Path, spec: LoraSpec, seed: int) -> LoraWeights:
    """Version 0: PEFT's initialisation from a seed: A kaiming-uniform (a = sqrt(5), so within 1/sqrt(in)), B zero."""
    config = model if isinstance(model, PretrainedConfig) else AutoConfig.from_pretrained(model)
    with torch.device("meta"):  # shapes only
        skeleton = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in skeleton.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in spec.target_modules:
            a = torch.empty(spec.rank, module.in_features)
            tensors[tensor_name(name, "A")] = torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
            tensors[tensor_name(name, "B")] = torch.zeros(module.out_features, spec.rank)
    return LoraWeights(spec.rank, spec.alpha, spec.target_modules, tensors)


def write_adapter(folder: Path, weights: LoraWeights, base_model_name: str) -> None:
    """Writes a folder that `PeftModel.from_pretrained` and vLLM load as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in adapter_files(weights, base_model_name).items():
        (folder / name).write_bytes(data)


def adapter_files(weights: LoraWeights, base_model_name: str) -> dict[str, bytes]:
    """The folder's files by name; the same weights give the same bytes."""
    config = {
        "base_model_name_or_path": base_model_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(weights.alpha) if weights.alpha.is_integer() else weights.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": weights.rank,
        "target_modules": list(weights.target_modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    tensors = {name: tensor.to(torch.float32).contiguous() for name, tensor in weights.tensors.items()}
    return {
        CONFIG_FILE: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
        WEIGHTS_FILE: save(tensors, metadata={"format": "pt"}),
    }
