"""Random credentials of the embedded stack, made once and kept in one file of mode 0600."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


def _secret() -> str:
    return secrets.token_hex(24)  # hex: needs no quoting in URLs, SQL or configuration files


class Credentials(BaseModel):
    model_config = ConfigDict(frozen=True)

    postgres_owner: str = Field(default_factory=_secret)
    postgres_service: str = Field(default_factory=_secret)
    postgres_api: str = Field(default_factory=_secret)
    valkey: str = Field(default_factory=_secret)
    s3_access_key: str = Field(default_factory=lambda: secrets.token_hex(10))
    s3_secret_key: str = Field(default_factory=_secret)
    seaweedfs_signing_key: str = Field(default_factory=_secret)
    web_sessions: str = Field(default_factory=_secret)  # signs the console's sessions


def load_or_create(path: Path) -> Credentials:
    """Reads the credentials, or makes them. Raises pydantic.ValidationError when the file is damaged."""
    if not path.exists():
        write_private(path, Credentials().model_dump_json(indent=2))
    credentials = Credentials.model_validate_json(path.read_text())
    if credentials.model_fields_set != Credentials.model_fields.keys():  # an older version made the file
        write_private(path, credentials.model_dump_json(indent=2))
    return credentials


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
