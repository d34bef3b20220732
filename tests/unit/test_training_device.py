"""A pass of the trainer's model makes nothing on another device than its own. No device is needed to see it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3ForCausalLM

from tests.rank_zero import CONFIG, make_adapter, make_groups
from workers.training.lora_model import LoraModel
from workers.training.packing import pack_group

aten = torch.ops.aten
ACROSS = (aten._to_copy.default, aten.index.Tensor, aten.index_put_.default)  # indices may be anywhere


class OneDevice(TorchDispatchMode):
    """Fails an operation on tensors of two devices."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor) and t.dim()]
        assert function in ACROSS or len({t.device for t in tensors}) < 2, function
        return result


@pytest.mark.parametrize("checkpointing", [False, True])
def test_forward_and_backward_stay_on_the_models_device(tmp_path, checkpointing, monkeypatch):
    Qwen3ForCausalLM(CONFIG).save_pretrained(tmp_path)
    model = LoraModel(tmp_path, torch.bfloat16, checkpointing, device="meta")
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor)  # nothing can be copied from this device
    (batch,) = pack_group(make_groups([4])[0], [1.0, -1.0, 2.0, -2.0], 4096)
    tensors = {n: t.to("meta", torch.bfloat16).requires_grad_() for n, t in make_adapter().tensors.items()}
    with OneDevice():
        logprobs, _ = model.chosen_logprobs(batch, 1.0, model.fuse(tensors, 1.0))
        gradients = torch.autograd.grad(logprobs.sum(), list(tensors.values()))
    assert {gradient.device.type for gradient in gradients} == {"meta"}
