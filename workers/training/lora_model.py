"""The frozen base model with a LoRA adapter: a micro-batch in, logprobs of its loss tokens out, differentiable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from app.errors import AdapterInvalid, InvalidRequest
from workers.lora import tensor_name
from workers.training.attention import SharedPrefixAttention
from workers.training.head import ChosenLogprobs, Head
from workers.training.layer import FUSED, Branch, Branches, Layer, Norm, Rotary
from workers.training.packing import MicroBatch

FAMILIES = ("llama", "qwen2", "qwen3")
PACKED_ROWS = 512  # of a usual micro-batch


@dataclass(frozen=True)
class Adapter:
    """An adapter's tensors, by PEFT name in the model's dtype, and the fused branches that the layers compute with."""

    tensors: Mapping[str, Tensor]
    layers: list[Branches]


class _Hidden(torch.autograd.Function):
    """Hidden states after the last norm at the batch's source positions [n, hidden], differentiable by `tensors`."""

    @staticmethod
    def forward(ctx: Any, model: LoraModel, batch: MicroBatch, adapter: Adapter, *tensors: Tensor) -> Tensor:
        keep = any(ctx.needs_input_grad)
        around = model.rotary(batch), SharedPrefixAttention(batch.layout, model.kv_heads, model.group, model.scaling)
        x = model.embedding[batch.input_ids[0]]
        kept: list[Any] = []
        for layer, branches in zip(model.in_turn(), adapter.layers, strict=True):
            out, activations = layer.forward(x, branches, *around)
            if keep:
                kept.append(x if model.checkpointing else activations)
            x = out
        ctx.model, ctx.batch, ctx.adapter, ctx.around, ctx.kept = model, batch, adapter, around, kept
        ctx.last = last = x[batch.sources]
        return model.norm.forward(last, model.norm.scale(last))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        model, adapter, around, kept = ctx.model, ctx.adapter, ctx.around, ctx.kept
        grad = model.norm.backward(grad, ctx.last, model.norm.scale(ctx.last))
        # Several rows' first tokens have one source.
        grad = grad.new_zeros(ctx.batch.layout.tokens, grad.shape[1]).index_add_(0, ctx.batch.sources, grad)
        gradients: dict[str, Tensor] = {}
        last = len(model.layers) - 1
        for index, layer in zip(range(last, -1, -1), model.in_turn(back=True), strict=True):
            branches, activations = adapter.layers[index], kept.pop()
            if model.checkpointing:
                activations = layer.forward(activations, branches, *around)[1]
            grad, fused = layer.backward(grad, activations, branches, *around, wants_x=index > 0)
            for name, pair in fused.items():
                gradients |= model.split(index, name, pair, adapter)
        return None, None, None, *(gradients[name] for name in adapter.tensors)


class LoraModel:
    """One base model in `dtype`, frozen. With `checkpointing`, backward computes each layer's forward again."""

    def __init__(self, model_path: Path, dtype: torch.dtype, checkpointing: bool = False, device: str = "cpu") -> None:
        """Raises InvalidRequest for a model outside the Llama, Qwen2 and Qwen3 families or with sliding windows."""
        config = AutoConfig.from_pretrained(model_path)
        if config.model_type not in FAMILIES:
            raise InvalidRequest(
                f"model type {config.model_type} is not one of {', '.join(FAMILIES)}", param="base_model"
            )
        if getattr(config, "use_sliding_window", False) or config.hidden_act != "silu":
            raise InvalidRequest(
                "models with sliding window attention or an activation but SiLU are not served", param="base_model"
            )
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).requires_grad_(False)
        for part in (model.model.embed_tokens, model.lm_head, model.model.norm, model.model.rotary_emb):
            part.to(device)  # and layers by `place`, which may leave some of them elsewhere
        self.dtype, self.device, self.checkpointing = dtype, torch.device(device), checkpointing
        self.kv_heads = config.num_key_value_heads
        self.group = config.num_attention_heads // self.kv_heads
        self.scaling: float = model.model.layers[0].self_attn.scaling
        self.rotary_embedding = model.model.rotary_emb
        # Copies, as all that is taken over: one tensor of the file would keep the whole of it mapped.
        self.embedding = model.model.embed_tokens.weight.clone()
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        self.head = Head(self.embedding if tied else model.lm_head.weight.clone())
        self.shapes = {  # [out, in] of each linear layer, by name
            f"model.layers.{i}.{name}": tuple(block.get_submodule(name).weight.shape)
            for i, block in enumerate(model.model.layers)
            for names in FUSED.values()
            for name in names
        }
        blocks = model.model.layers
        self.layers = self.place([Layer(block, config.num_attention_heads, self.kv_heads) for block in blocks])
        self.norm = Norm(model.model.norm.weight, model.model.norm.variance_epsilon)
        self.bare = self.fuse({}, 0.0)

    def place(self, layers: list[Layer]) -> list[Layer]:
        """Where the layers' parameters live: here."""
        for layer in layers:
            layer.to(self.device)
            # In float32 the packed product sums in another order than the plain one, which several ranks compute.
            if self.device.type == "cpu" and self.dtype == torch.bfloat16:
                layer.pack(PACKED_ROWS)
        return layers

    def in_turn(self, back: bool = False) -> Iterator[Layer]:
        """The layers in the order in which they are used, each ready while it is."""
        return iter(self.layers[::-1] if back else self.layers)

    def check_fits(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Raises AdapterInvalid naming a tensor that has no place in this model, the wrong shape, or no partner."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (outputs, inputs) in self.shapes.items():
            shapes[tensor_name(name, "A")] = (rank, inputs)
            shapes[tensor_name(name, "B")] = (outputs, rank)
        for name, tensor in tensors.items():
            partner = name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("lora_B", "lora_A")
            if tuple(tensor.shape) != shapes.get(name) or partner not in tensors:
                raise AdapterInvalid(
                    f"adapter tensor {name} {tuple(tensor.shape)} does not fit the base model: wants "
                    f"{shapes.get(name, 'nothing of that name')}, lora_A and lora_B in pairs",
                    param=name,
                )

    def fuse(self, tensors: Mapping[str, Tensor], scaling: float) -> Adapter:
        """An adapter from tensors by PEFT name in the model's dtype, for as long as they do not change."""

        def branch(index: int, fused: str) -> Branch | None:
            names = [f"model.layers.{index}.{name}" for name in FUSED[fused]]
            present = [name for name in names if tensor_name(name, "A") in tensors]
            if not present:
                return None
            a = torch.cat([tensors[tensor_name(name, "A")] for name in present])
            none = {name: a.new_empty(self.shapes[name][0], 0) for name in names}
            b = torch.block_diag(*(tensors.get(tensor_name(name, "B"), none[name]) for name in names))
            return Branch(a.detach(), b.detach(), scaling)

        layers = range(len(self.layers))
        return Adapter(tensors, [{f: b for f in FUSED if (b := branch(i, f)) is not None} for i in layers])

    def split(self, index: int, fused: str, pair: tuple[Tensor, Tensor], adapter: Adapter) -> dict[str, Tensor]:
        """Gradients by a fused branch's (a, b), as those by the adapter's tensors, by name."""
        gradients: dict[str, Tensor] = {}
        row = column = 0
        for name in (f"model.layers.{index}.{name}" for name in FUSED[fused]):
            outputs = self.shapes[name][0]
            if (a := adapter.tensors.get(tensor_name(name, "A"))) is not None:
                ranks = slice(column, column + len(a))
                gradients[tensor_name(name, "A")] = pair[0][ranks]
                gradients[tensor_name(name, "B")] = pair[1][row : row + outputs, ranks]
                column += len(a)
            row += outputs
        return gradients

    def chosen_logprobs(self, batch: MicroBatch, temperature: float, adapter: Adapter) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of the batch's n loss tokens, float32 or wider, each [n] on the CPU.

        Logprobs are differentiable by the adapter's tensors, if these require it.
        """
        batch = batch.to(self.device)
        hidden = _Hidden.apply(self, batch, adapter, *adapter.tensors.values())
        logprobs, entropies = ChosenLogprobs.apply(hidden, batch.targets, self.head, temperature)
        return logprobs.cpu(), entropies.cpu()

    def rotary(self, batch: MicroBatch) -> Rotary:
        cos, sin = self.rotary_embedding(self.embedding, batch.position_ids)
        low, high = sin[0].chunk(2, dim=-1)
        return Rotary(cos[0].unsqueeze(1), torch.cat((-low, high), dim=-1).unsqueeze(1))
