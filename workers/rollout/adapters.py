"""Adapter folders on local disk for the engine, by policy version, proved against the digest of the version."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import uuid
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from app.db import transaction
from app.errors import AdapterInvalid
from app.manager.episodes import adapter_files
from app.settings import get_settings
from workers.cache import ObjectCache
from workers.lora import CONFIG_FILE, WEIGHTS_FILE
from workers.rollout.engine import Engine


class Policy(Protocol):
    """A committed policy version, as a round or a served model names it."""

    @property
    def job_id(self) -> uuid.UUID: ...

    @property
    def policy_version(self) -> int: ...

    @property
    def weights_digest(self) -> str: ...


@dataclass(eq=False)
class Registered:
    users: int = 0  # now
    ready: Future[None] = field(default_factory=Future)  # done when the engine has it


class AdapterStore:
    """Registers an adapter with the engine once, and forgets those used longest ago."""

    def __init__(self, engine: Engine, cache: ObjectCache, keep: int) -> None:
        self._engine = engine
        self._cache = cache
        self._keep = keep
        self._root = own_folder("adapters")
        self._lock = threading.Lock()
        self._registered: OrderedDict[str, Registered] = OrderedDict()

    def acquire(self, policy: Policy) -> str:
        """The engine's key of the policy's adapter, registered and in use until `release`.

        Who asks first loads it; others who want the same one wait for that, and nobody else does. Raises AdapterInvalid
        (not finite, or not the weights of the version), ObjectMissing, InfrastructureFault.
        """
        key = f"{policy.job_id}:{policy.policy_version}"
        with self._lock:
            loads = key not in self._registered
            entry = self._registered.setdefault(key, Registered())
            entry.users += 1
            self._registered.move_to_end(key)
            self._forget()
        if loads:
            try:
                self._register(key, policy)
            except BaseException as error:
                with self._lock:
                    del self._registered[key]
                entry.ready.set_exception(error)
                raise
            entry.ready.set_result(None)
        entry.ready.result()
        return key

    def release(self, key: str) -> None:
        with self._lock:
            self._registered[key].users -= 1

    def _register(self, key: str, policy: Policy) -> None:
        with transaction() as session:
            files = adapter_files(session, policy.job_id, policy.policy_version)
        folder = self._root / key.replace(":", "-")
        folder.mkdir(exist_ok=True)
        (folder / WEIGHTS_FILE).write_bytes(self._cache.read(files.model))
        (folder / CONFIG_FILE).write_bytes(self._cache.read(files.config))
        digest = self._engine.load_adapter(key, folder)
        if digest != policy.weights_digest:
            self._engine.unload_adapter(key)
            raise AdapterInvalid(
                f"the engine's slot holds weights {digest[:12]}…, version {policy.policy_version} of job"
                f" {policy.job_id} is {policy.weights_digest[:12]}…"
            )

    def _forget(self) -> None:
        """Unregisters unused adapters past the bound; files go after the engine has let them go."""
        unused = [key for key, entry in self._registered.items() if not entry.users]
        for key in unused[: max(0, len(self._registered) - self._keep)]:
            self._engine.unload_adapter(key)
            del self._registered[key]
            shutil.rmtree(self._root / key.replace(":", "-"), ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def own_folder(what: str) -> Path:
    """A folder of this process in the cache; those of processes of this machine that died are removed."""
    cache = get_settings().cache_path
    prefix = f"{what}-{socket.gethostname()}-"
    for folder in cache.glob(f"{prefix}*"):
        if not Path(f"/proc/{folder.name.removeprefix(prefix)}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    own = cache / f"{prefix}{os.getpid()}"
    own.mkdir(parents=True, exist_ok=True)
    return own
