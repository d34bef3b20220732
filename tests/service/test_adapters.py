"""Adapters come down whole and as they were put, or not at all."""

from __future__ import annotations

import urllib.request
import uuid
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from app import storage
from app.db import transaction
from app.errors import Conflict, NotFound, ObjectMissing
from app.manager import adapters
from app.manager.adapters import AdapterExpired, Manifest
from app.models import Job, Tenant
from tests import by_hand, stored
from tests.tiny import tiny_adapter_folder, tiny_model_folder

FILES = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture
def job_id(tenant: Tenant) -> uuid.UUID:
    """A job with the versions 0, 1 and 2."""
    job_id = stored.start_job(tenant)
    stored.step(job_id)
    stored.step(job_id)
    return job_id


def manifest(job_id: uuid.UUID, version: int | None = None) -> Manifest:
    with transaction() as session:
        return adapters.manifest(session, session.get_one(Job, job_id), version)


def expire(job_id: uuid.UUID, version: int) -> None:
    by_hand.execute("UPDATE objects SET state = 'expired' WHERE job_id = :job AND version = :v", job=job_id, v=version)


def test_manifest_tells_the_files_of_a_version(job_id: uuid.UUID) -> None:
    found = manifest(job_id, 1)
    data = {"adapter_model.safetensors": stored.weights(1), "adapter_config.json": stored.CONFIG}
    assert {f.name: (f.sha256, f.size) for f in found.files} == {
        name: (storage.sha256_of(content), len(content)) for name, content in data.items()
    }


def test_manifest_is_of_the_latest_version_by_default(job_id: uuid.UUID) -> None:
    assert manifest(job_id).version == 2


def test_manifest_urls_need_no_credentials(job_id: uuid.UUID) -> None:
    urls = {f.name: f.url for f in manifest(job_id, 1).files}
    with urllib.request.urlopen(urls["adapter_model.safetensors"]) as answer:
        assert answer.read() == stored.weights(1)


def test_a_version_that_does_not_exist_is_told_with_those_that_do(job_id: uuid.UUID) -> None:
    with pytest.raises(NotFound, match="versions 0 to 2"):
        manifest(job_id, 3)


def test_a_job_without_versions_says_so(tenant: Tenant) -> None:
    with pytest.raises(NotFound, match="none yet, being validating_files"):
        manifest(by_hand.submit(tenant))


def test_an_expired_version_is_told_with_those_that_are_kept(job_id: uuid.UUID) -> None:
    expire(job_id, 1)
    with pytest.raises(AdapterExpired, match="removed by retention; kept: 0, 2"):
        manifest(job_id, 1)


def test_versions_tell_reward_and_whether_files_are_there(job_id: uuid.UUID) -> None:
    expire(job_id, 1)
    with transaction() as session:
        rows = adapters.versions(session, session.get_one(Job, job_id))
    assert [(v.version, v.available, v.reward_mean) for v in rows] == [(0, True, None), (1, False, 0.5), (2, True, 0.5)]


def test_download_makes_a_folder_with_the_very_bytes(job_id: uuid.UUID, tmp_path: Path) -> None:
    done = adapters.download(job_id, 1, tmp_path / "new" / "adapter")
    assert done.version == 1
    assert (tmp_path / "new" / "adapter" / "adapter_model.safetensors").read_bytes() == stored.weights(1)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["adapter"]


def test_download_fills_an_empty_folder(job_id: uuid.UUID, tmp_path: Path) -> None:
    adapters.download(job_id, 1, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES


def test_download_refuses_a_folder_with_an_adapter(job_id: uuid.UUID, tmp_path: Path) -> None:
    adapters.download(job_id, 1, tmp_path / "a")
    with pytest.raises(Conflict, match="--force"):
        adapters.download(job_id, 2, tmp_path / "a")
    assert (tmp_path / "a" / "adapter_model.safetensors").read_bytes() == stored.weights(1)


def test_download_replaces_an_adapter_by_force(job_id: uuid.UUID, tmp_path: Path) -> None:
    adapters.download(job_id, 1, tmp_path / "a")
    adapters.download(job_id, 2, tmp_path / "a", force=True)
    assert (tmp_path / "a" / "adapter_model.safetensors").read_bytes() == stored.weights(2)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_download_never_replaces_other_files(job_id: uuid.UUID, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(Conflict, match=r"other files \(thesis.txt\)"):
        adapters.download(job_id, 1, tmp_path, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_object_of_other_content_leaves_nothing_behind(job_id: uuid.UUID, tmp_path: Path) -> None:
    config = next(f for f in manifest(job_id, 1).files if f.name == "adapter_config.json")
    storage.delete(config.key)
    storage.put(config.key, b"{}")
    with pytest.raises(ObjectMissing, match="does not match its digest"):
        adapters.download(job_id, 1, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_is_gone_leaves_the_old_adapter_in_place(job_id: uuid.UUID, tmp_path: Path) -> None:
    adapters.download(job_id, 1, tmp_path / "a")
    storage.delete(manifest(job_id, 2).files[0].key)
    with pytest.raises(ObjectMissing, match="gone from storage"):
        adapters.download(job_id, 2, tmp_path / "a", force=True)
    assert (tmp_path / "a" / "adapter_model.safetensors").read_bytes() == stored.weights(1)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_peft_loads_a_downloaded_folder(tenant: Tenant, tmp_path: Path) -> None:
    model = tiny_model_folder(tmp_path / "model")
    made = tiny_adapter_folder(model, tmp_path / "made", seed=1)
    job_id = stored.start_job(
        tenant,
        config=(made / "adapter_config.json").read_bytes(),
        model=(made / "adapter_model.safetensors").read_bytes(),
    )
    adapters.download(job_id, 0, tmp_path / "got")
    loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(model), tmp_path / "got").state_dict()
    for name, tensor in load_file(made / "adapter_model.safetensors").items():
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")], tensor)
