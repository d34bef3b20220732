"""Ids as the API shows them: a prefix that tells the kind, and the UUID as 32 hex digits.

Anything malformed is not found, like anything that is another tenant's.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from app.errors import NotFound
from app.models import Job

HEX = r"([0-9a-f]{32})"
MAX_INTEGER = 2**31 - 1
MAX_BIG_INTEGER = 2**63 - 1


def file_id(file: uuid.UUID) -> str:
    return f"file-{file.hex}"


def job_id(job: uuid.UUID) -> str:
    return f"ftjob-{job.hex}"


def preflight_id(job: uuid.UUID) -> str:
    return f"preflight-{job.hex}"


def event_id(event: int) -> str:
    return f"ftevent-{event}"


def checkpoint_id(job: uuid.UUID, version: int) -> str:
    return f"ftckpt-{job.hex}-{version}"


def model_id(job: Job, tenant_name: str, version: int | None = None) -> str:
    """The model that a job makes, or (`version`) the one that it had at a checkpoint."""
    name = f"ft:{job.base_model}:{tenant_name}:{job.name}:{job.id.hex}"
    return name if version is None else f"{name}:ckpt-step-{version}"


def parse_file(text: str, param: str = "file_id") -> uuid.UUID:
    return _parse_uuid("file-", text, "file", param)


def parse_job(text: str, param: str = "fine_tuning_job_id") -> uuid.UUID:
    return _parse_uuid("ftjob-", text, "fine-tuning job", param)


def parse_preflight(text: str, param: str = "preflight_id") -> uuid.UUID:
    return _parse_uuid("preflight-", text, "preflight", param)


def parse_event(text: str, param: str = "after") -> int:
    if match := re.fullmatch(r"ftevent-([0-9]{1,19})", text, re.ASCII):
        number = int(match[1])
        if number <= MAX_BIG_INTEGER:
            return number
    raise not_found("event", text, param)


def parse_checkpoint(text: str, param: str = "fine_tuning_checkpoint_id") -> tuple[uuid.UUID, int]:
    """(job, version) of a checkpoint."""
    if match := re.fullmatch(rf"ftckpt-{HEX}-([0-9]{{1,10}})", text, re.ASCII):
        job, version = uuid.UUID(match[1]), int(match[2])
        if version <= MAX_INTEGER and checkpoint_id(job, version) == text:
            return job, version
    raise not_found("checkpoint", text, param)


@dataclass(frozen=True)
class Adapter:
    """What the name of an adapter `ft:…` says. Compare `model_id` of the job that is found with the whole name."""

    job: uuid.UUID
    version: int | None


def parse_adapter(text: str) -> Adapter | None:
    """None where the name is none of an adapter, so perhaps a base model's."""
    match = re.fullmatch(rf"ft:.+:{HEX}(?::ckpt-step-([0-9]{{1,10}}))?", text, re.ASCII | re.DOTALL)
    if match is None or (match[2] is not None and int(match[2]) > MAX_INTEGER):
        return None
    return Adapter(uuid.UUID(match[1]), None if match[2] is None else int(match[2]))


def not_found(kind: str, text: str, param: str | None = None) -> NotFound:
    shown = text if len(text) <= 80 else text[:77] + "…"
    return NotFound(f"There is no {kind} {shown!r}. Check the id and the API key.", param=param)


def _parse_uuid(prefix: str, text: str, kind: str, param: str) -> uuid.UUID:
    if match := re.fullmatch(re.escape(prefix) + HEX, text, re.ASCII):
        return uuid.UUID(match[1])
    raise not_found(kind, text, param)
