"""Objects by digest on local disk, bounded; a file that is not there comes from S3. A machine's processes share it."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from app import storage
from app.models import StoredObject
from app.settings import get_settings
from app.storage import sha256_of


class ObjectCache:
    """Files are named by their SHA-256 and put in place by rename, so a name that exists holds the right bytes."""

    def __init__(self, root: Path | None = None, max_bytes: int | None = None) -> None:
        self.root = root or get_settings().cache_path / "objects"
        self.max_bytes = max_bytes or get_settings().cache_bytes
        self.root.mkdir(parents=True, exist_ok=True)

    def path(self, sha256: str) -> Path:
        return self.root / sha256

    def read(self, obj: StoredObject) -> bytes:
        """The object's bytes, from disk if whole there, else from S3. Raises ObjectMissing, InfrastructureFault."""
        path = self.path(obj.sha256)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        if sha256_of(data) == obj.sha256:
            path.touch()
            return data
        data = storage.get(obj.key, obj.sha256)
        self.put(data, obj.sha256)
        return data

    def put(self, data: bytes, sha256: str | None = None) -> Path:
        """Stores bytes under their digest and drops the files that were used longest ago, past the bound."""
        path = self.path(sha256 or sha256_of(data))
        handle, name = tempfile.mkstemp(dir=self.root, prefix=".new-")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
        self._trim(keep=path)
        return path

    def _trim(self, keep: Path) -> None:
        files = []
        for entry in os.scandir(self.root):
            if not entry.name.startswith(".new-"):
                with suppress(FileNotFoundError):  # dropped meanwhile by another thread or process
                    stat = entry.stat()
                    files.append((stat.st_mtime, stat.st_size, entry.path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.max_bytes:
                return
            if path != str(keep):
                Path(path).unlink(missing_ok=True)
                total -= size
