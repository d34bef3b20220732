"""Adapter slots: what they hold, what they refuse, which one makes room."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.errors import AdapterInvalid, Conflict, ObjectMissing
from tests.tiny import tiny_adapter_folder, tiny_config, tiny_model_folder
from workers.lora import weights_digest
from workers.rollout.slots import AdapterSlots

CONFIG = tiny_config()
HEAD_DIM = CONFIG.hidden_size // CONFIG.num_attention_heads
KV = CONFIG.num_key_value_heads * HEAD_DIM
SHAPES = {
    "q_proj": (64, 64),
    "k_proj": (KV, 64),
    "v_proj": (KV, 64),
    "o_proj": (64, 64),
    "gate_proj": (96, 64),
    "up_proj": (96, 64),
    "down_proj": (64, 96),
}


def make_slots(limit: int, dtype: torch.dtype = torch.bfloat16, max_rank: int = 16) -> AdapterSlots:
    return AdapterSlots(limit, SHAPES, CONFIG.num_hidden_layers, dtype, max_rank)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    model = tiny_model_folder(tmp_path_factory.mktemp("model"))
    root = tmp_path_factory.mktemp("adapters")
    return [tiny_adapter_folder(model, root / str(seed), seed) for seed in range(3)]


@pytest.fixture
def folders(made: list[Path], tmp_path: Path) -> list[Path]:
    """Copies, for tests that break them."""
    return [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in made]


def edit_tensor(folder: Path, index: int, value: torch.Tensor) -> str:
    """Replaces the tensor at `index` of the sorted names and returns its name."""
    tensors = load_file(folder / "adapter_model.safetensors")
    name = sorted(tensors)[index]
    tensors[name] = value
    save_file(tensors, folder / "adapter_model.safetensors")
    return name


def test_digest_is_that_of_the_file_in_the_compute_dtype(made: list[Path]) -> None:
    expected = weights_digest(load_file(made[0] / "adapter_model.safetensors"), torch.bfloat16)
    assert make_slots(1).register("a", made[0]) == expected


def test_slot_reads_back_to_its_digest(made: list[Path]) -> None:
    slots = make_slots(1)
    slots.register("a", made[0])
    slot = slots.acquire("a")
    assert slot is not None
    held = {}
    for name in load_file(made[0] / "adapter_model.safetensors"):
        layer, module, side = int(name.split(".")[4]), name.split(".")[6], name.split(".")[7]
        held[name] = (slot.a if side == "lora_A" else slot.b)[module][layer]
    assert weights_digest(held, torch.bfloat16) == slot.digest


def test_least_recently_used_adapter_makes_room(made: list[Path]) -> None:
    slots = make_slots(2)
    for key, folder in zip("abc", made, strict=True):
        slots.register(key, folder)
        if key == "b":
            slots.release(slots.acquire("a"))
    assert set(slots.resident()) == {"a", "c"}


def test_evicted_adapter_is_read_again_on_demand(made: list[Path]) -> None:
    slots = make_slots(1)
    digest = slots.register("a", made[0])
    slots.register("b", made[1])
    slot = slots.acquire("a")
    assert slot is not None and slot.digest == digest


def test_adapter_with_a_live_request_is_not_evicted(made: list[Path]) -> None:
    slots = make_slots(1)
    slots.register("a", made[0])
    slots.register("b", made[1])
    held = slots.acquire("b")
    assert slots.acquire("a") is None
    assert held is not None and set(slots.resident()) == {"b"}


def test_deleted_file_is_missing_on_reload(folders: list[Path]) -> None:
    slots = make_slots(1)
    slots.register("a", folders[0])
    slots.register("b", folders[1])
    shutil.rmtree(folders[0])
    with pytest.raises(ObjectMissing):
        slots.acquire("a")


def test_changed_file_is_missing_on_reload(folders: list[Path]) -> None:
    slots = make_slots(1)
    slots.register("a", folders[0])
    slots.register("b", folders[1])
    shutil.copytree(folders[2], folders[0], dirs_exist_ok=True)
    with pytest.raises(ObjectMissing, match="changed"):
        slots.acquire("a")


def test_key_is_never_reused_for_other_weights(made: list[Path]) -> None:
    slots = make_slots(1)
    slots.register("a", made[0])
    with pytest.raises(Conflict):
        slots.register("a", made[1])


def test_removed_adapter_leaves_when_its_last_request_ends(made: list[Path]) -> None:
    slots = make_slots(2)
    slots.register("a", made[0])
    slot = slots.acquire("a")
    assert slot is not None
    slots.remove("a")
    assert set(slots.resident()) == {"a"}
    slots.release(slot)
    assert not slots.resident()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_not_finite_adapter_is_refused(folders: list[Path], value: float) -> None:
    """3.4e38 is finite in float32 and infinite in bfloat16."""
    name = edit_tensor(folders[0], 0, torch.full((8, 96), value))
    with pytest.raises(AdapterInvalid, match=name.replace(".", r"\.")):
        make_slots(1).register("a", folders[0])


def test_adapter_of_another_shape_is_refused(folders: list[Path]) -> None:
    edit_tensor(folders[0], 0, torch.zeros(8, 97))
    with pytest.raises(AdapterInvalid, match=r"\[8, 97\], not \[8, 96\]"):
        make_slots(1).register("a", folders[0])


def test_adapter_for_an_unknown_layer_is_refused(folders: list[Path]) -> None:
    config = json.loads((folders[0] / "adapter_config.json").read_text())
    tensors = load_file(folders[0] / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(config["r"], 64)
    save_file(tensors, folders[0] / "adapter_model.safetensors")
    with pytest.raises(AdapterInvalid, match="lm_head"):
        make_slots(1).register("a", folders[0])


def test_rank_over_the_maximum_is_refused_with_both_numbers(made: list[Path]) -> None:
    with pytest.raises(AdapterInvalid, match="8 .* 4"):
        make_slots(1, max_rank=4).register("a", made[0])
