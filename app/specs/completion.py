"""A completion that a tenant asks for, as the web process hands it to a rollout worker, and what comes back."""

from __future__ import annotations

import uuid
from typing import Any

from pydantic import Field

from app.specs.job import Spec

MAX_CHOICES = 8  # of one request, over all its prompts


class CompletionCall(Spec):
    """Checked by who sends it; who takes it checks the bounds and the tenant's right to the adapter again."""

    tenant_id: uuid.UUID
    base_model: str
    job_id: uuid.UUID | None = None  # None: the base model itself
    version: int | None = None
    messages: list[dict[str, str]] | None = None  # a chat to go on with, or else `prompts`
    tools: list[dict[str, Any]] | None = None
    prompts: list[str | list[int]] | None = None
    max_tokens: int | None = Field(None, ge=1)  # None: as many as fit
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(0, ge=0, lt=2**63)
    stop: list[str] = Field(default_factory=list, max_length=4)
    n: int = Field(1, ge=1, le=MAX_CHOICES)  # answers to each prompt
    stream: bool = False  # text as it comes, not all at the end
    logprobs: bool = False
    one_call: bool = False  # the first tool call ends an answer


class Token(Spec):
    """A sampled token: the text that it added, and its logprob under the distribution it was sampled from."""

    text: str
    logprob: float


class ChoiceDelta(Spec):
    """What one choice has more than before; with `finish` it is complete."""

    index: int
    text: str = ""
    tokens: list[Token] = Field(default_factory=list)  # if logprobs were asked for
    calls: list[dict[str, Any]] = Field(default_factory=list)  # {name, arguments} of each tool call, at the end
    finish: str | None = None  # stop | length | tool_calls
