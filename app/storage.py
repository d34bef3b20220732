"""S3 through boto3: immutable puts with checksums, verified reads, presigned downloads (rule 4)."""

from __future__ import annotations

import hashlib
import uuid
from base64 import b64encode
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from app.errors import InfrastructureFault, ObjectMissing
from app.settings import get_settings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def version_prefix(tenant_id: uuid.UUID, job_id: uuid.UUID, version: int, attempt: int) -> str:
    """Everything that one attempt makes of a version. A policy on `tenants/<tenant>/` scopes to one tenant;
    `<prefix>adapter/` is a complete PEFT folder."""
    return f"tenants/{tenant_id}/jobs/{job_id}/versions/{version:06d}/{attempt}/"


def file_key(tenant_id: uuid.UUID, file_id: uuid.UUID) -> str:
    return f"tenants/{tenant_id}/files/{file_id}.jsonl"


PROBE_SECONDS = 3


@lru_cache
def client(public: bool = False, *, probe: bool = False) -> S3Client:
    """`public`: signs for the endpoint that tenants reach, as a presigned URL signs its host. `probe`: tries once, and
    not for long."""
    settings = get_settings()
    endpoint = (settings.s3_public_endpoint_url if public else None) or settings.s3_endpoint_url
    secret = settings.s3_secret_key
    access = settings.s3_access_key
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=settings.s3_region,
        aws_access_key_id=access.get_secret_value() if access else None,
        aws_secret_access_key=secret.get_secret_value() if secret else None,
        config=Config(
            signature_version="s3v4",
            # Of an upload the headers are signed, with the checksum among them, which storage holds the body against.
            s3={"addressing_style": "path", "payload_signing_enabled": False},
            connect_timeout=PROBE_SECONDS if probe else 5,
            read_timeout=PROBE_SECONDS if probe else 30,
            retries={"total_max_attempts": 1 if probe else 5, "mode": "standard"},
            max_pool_connections=32,
        ),
    )


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(key: str, data: bytes, sha256: str | None = None) -> None:
    """Uploads once: an object that exists already is never overwritten. The same bytes again are a success. `sha256` is
    for who knows it already.

    Raises InfrastructureFault when storage cannot be reached or holds other bytes under this key.
    """
    _put(key, data, sha256 or sha256_of(data))


def put_stream(key: str, stream: IO[bytes], sha256: str) -> None:
    """As `put`, from a seekable stream that is never whole in memory. Storage refuses bytes of another digest."""
    _put(key, stream, sha256)


def _put(key: str, body: bytes | IO[bytes], sha256: str) -> None:
    try:
        client().put_object(
            Bucket=get_settings().s3_bucket,
            Key=key,
            Body=body,
            IfNoneMatch="*",
            ChecksumSHA256=b64encode(bytes.fromhex(sha256)).decode(),
            Metadata={"sha256": sha256},
        )
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") not in (
            "PreconditionFailed",
            "412",
            "ConditionalRequestConflict",
        ):
            raise InfrastructureFault(f"upload of {key} failed: {error}") from error
        if sha256_of(_read(key)) != sha256:
            raise InfrastructureFault(f"{key} exists already with other content") from error
    except BotoCoreError as error:
        raise InfrastructureFault(f"upload of {key} failed: {error}") from error


def get(key: str, sha256: str) -> bytes:
    """Downloads and checks an object. Raises ObjectMissing (gone, or other bytes than put), InfrastructureFault."""
    data = _read(key)
    if sha256_of(data) != sha256:
        raise ObjectMissing(f"object {key} does not match its digest {sha256[:12]}…", param=key)
    return data


def copy_to(key: str, sha256: str, sink: IO[bytes]) -> None:
    """As `get`, into a file and never whole in memory. What was written is worthless when it raises."""
    digest = hashlib.sha256()
    for chunk in _chunks(key):
        digest.update(chunk)
        sink.write(chunk)
    if digest.hexdigest() != sha256:
        raise ObjectMissing(f"object {key} does not match its digest {sha256[:12]}…", param=key)


def stream(key: str) -> Iterator[bytes]:
    """The bytes as they come, unchecked. Raises ObjectMissing or InfrastructureFault before there are any."""
    chunks = _chunks(key)
    return chain([next(chunks, b"")], chunks)


def _read(key: str) -> bytes:
    return b"".join(_chunks(key))


def _chunks(key: str) -> Iterator[bytes]:
    try:
        yield from client().get_object(Bucket=get_settings().s3_bucket, Key=key)["Body"].iter_chunks(1 << 20)
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") in ("NoSuchKey", "404"):
            raise ObjectMissing(f"object {key} is gone from storage", param=key) from error
        raise InfrastructureFault(f"download of {key} failed: {error}") from error
    except (BotoCoreError, OSError) as error:
        raise InfrastructureFault(f"download of {key} failed: {error}") from error


def delete(key: str) -> None:
    """Deletes an object; one that is gone already is fine."""
    try:
        client().delete_object(Bucket=get_settings().s3_bucket, Key=key)
    except (ClientError, BotoCoreError) as error:
        raise InfrastructureFault(f"deletion of {key} failed: {error}") from error


def presign(key: str, filename: str) -> str:
    """A URL that downloads the object for a short while, without credentials."""
    return client(public=True).generate_presigned_url(
        "get_object",
        Params={
            "Bucket": get_settings().s3_bucket,
            "Key": key,
            "ResponseContentDisposition": f'attachment; filename="{Path(filename).name}"',
        },
        ExpiresIn=get_settings().presign_seconds,
    )


def check() -> None:
    """Raises botocore's errors, soon, when the bucket cannot be reached."""
    client(probe=True).head_bucket(Bucket=get_settings().s3_bucket)
