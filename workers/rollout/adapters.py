"""Adapter folders on local disk for the engine, by policy version, proved against the digest of the version."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections import OrderedDict
from pathlib import Path

from app.db import transaction
from app.errors import AdapterInvalid
from app.manager.episodes import RoundContext, adapter_files
from app.settings import get_settings
from workers.cache import ObjectCache
from workers.lora import CONFIG_FILE, WEIGHTS_FILE
from workers.rollout.engine import Engine


class AdapterStore:
    """Registers a round's adapter with the engine once, and forgets those used longest ago."""

    def __init__(self, engine: Engine, cache: ObjectCache, keep: int) -> None:
        self._engine = engine
        self._cache = cache
        self._keep = keep
        self._root = _own_folder(get_settings().cache_path)
        self._lock = threading.Lock()
        self._registered: OrderedDict[str, int] = OrderedDict()  # key -> users now

    def acquire(self, round_: RoundContext) -> str:
        """The engine's key of the round's adapter, registered and in use until `release`.

        Raises AdapterInvalid (not finite, or not the weights of the version), ObjectMissing, InfrastructureFault.
        """
        key = f"{round_.job_id}:{round_.policy_version}"
        with self._lock:
            if key not in self._registered:
                self._register(key, round_)
            self._registered.move_to_end(key)
            self._registered[key] += 1
            self._forget()
        return key

    def release(self, key: str) -> None:
        with self._lock:
            self._registered[key] -= 1

    def _register(self, key: str, round_: RoundContext) -> None:
        with transaction() as session:
            files = adapter_files(session, round_.job_id, round_.policy_version)
        folder = self._root / key.replace(":", "-")
        folder.mkdir(exist_ok=True)
        (folder / WEIGHTS_FILE).write_bytes(self._cache.read(files.model))
        (folder / CONFIG_FILE).write_bytes(self._cache.read(files.config))
        digest = self._engine.load_adapter(key, folder)
        if digest != round_.weights_digest:
            self._engine.unload_adapter(key)
            raise AdapterInvalid(
                f"the engine's slot holds weights {digest[:12]}…, version {round_.policy_version} of job"
                f" {round_.job_id} is {round_.weights_digest[:12]}…"
            )
        self._registered[key] = 0

    def _forget(self) -> None:
        """Unregisters unused adapters past the bound; files go after the engine has let them go."""
        unused = [key for key, users in self._registered.items() if users == 0]
        for key in unused[: max(0, len(self._registered) - self._keep)]:
            self._engine.unload_adapter(key)
            del self._registered[key]
            shutil.rmtree(self._root / key.replace(":", "-"), ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def _own_folder(cache: Path) -> Path:
    """A folder of this process; those of processes of this machine that died are removed."""
    prefix = f"adapters-{socket.gethostname()}-"
    for folder in cache.glob(f"{prefix}*"):
        if not Path(f"/proc/{folder.name.removeprefix(prefix)}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    own = cache / f"{prefix}{os.getpid()}"
    own.mkdir(parents=True, exist_ok=True)
    return own
