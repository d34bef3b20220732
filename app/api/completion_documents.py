"""Completions as OpenAI's clients read them: whole, and as the chunks of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from app.specs.completion import ChoiceDelta, Token

Document = dict[str, Any]


class CompletionUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[Any]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class MadeToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[MadeToolCall] | None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: CompletionUsage


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    text_offset: list[int]
    top_logprobs: None


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[TextChoice]
    usage: CompletionUsage


@dataclass
class Answer:
    """One completion as it grows: which request, which model, and what each choice has so far."""

    id: str  # of the call
    model: str
    choices: int
    logprobs: bool
    fingerprint: str | None
    prompt_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, prefix: str, kind: str) -> Document:
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"fp_{self.fingerprint[:16]}" if self.fingerprint else None,
        }

    def call_id(self, choice: int, call: int) -> str:
        return f"call_{self.id[:20]}{choice:02d}{call:02d}"


def usage(counts: dict[str, int]) -> Document:
    return {**counts, "total_tokens": counts["prompt_tokens"] + counts["completion_tokens"]}


class ChatShape:
    """Documents of `/v1/chat/completions`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._begun: set[int] = set()

    def whole(self, deltas: Sequence[ChoiceDelta], counts: dict[str, int]) -> Document:
        choices = [
            {
                "index": delta.index,
                "message": {
                    "role": "assistant",
                    "content": None if delta.calls and not delta.text.strip() else delta.text,
                    "refusal": None,
                    "tool_calls": self._calls(delta) or None,
                },
                "logprobs": self._logprobs(delta.tokens),
                "finish_reason": delta.finish,
            }
            for delta in deltas
        ]
        return self.answer.head("chatcmpl", "chat.completion") | {"choices": choices, "usage": usage(counts)}

    def chunks(self, delta: ChoiceDelta) -> Iterator[Document]:
        """Text, then calls, then the end, each in a chunk of its own."""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            yield self._chunk(delta.index, {"role": "assistant", "content": "", "refusal": None})
        if delta.text or delta.tokens:
            yield self._chunk(delta.index, {"content": delta.text}, self._logprobs(delta.tokens))
        for i, call in enumerate(self._calls(delta)):
            yield self._chunk(delta.index, {"tool_calls": [{"index": i, **call}]})
        if delta.finish:
            yield self._chunk(delta.index, {}, finish=delta.finish)

    def last(self, counts: dict[str, int]) -> Document:
        return self._frame([]) | {"usage": usage(counts)}

    def _chunk(
        self, index: int, delta: Document, logprobs: Document | None = None, finish: str | None = None
    ) -> Document:
        return self._frame([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}])

    def _frame(self, choices: list[Document]) -> Document:
        return self.answer.head("chatcmpl", "chat.completion.chunk") | {"choices": choices}

    def _calls(self, delta: ChoiceDelta) -> list[Document]:
        return [
            {
                "id": self.answer.call_id(delta.index, i),
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": json.dumps(call["arguments"], ensure_ascii=False),
                },
            }
            for i, call in enumerate(delta.calls)
        ]

    def _logprobs(self, tokens: Sequence[Token]) -> Document | None:
        if not self.answer.logprobs:
            return None
        content = [
            {"token": t.text, "logprob": t.logprob, "bytes": list(t.text.encode()), "top_logprobs": []} for t in tokens
        ]
        return {"content": content, "refusal": None}


class TextShape:
    """Documents of `/v1/completions`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._offsets = [0] * answer.choices

    def whole(self, deltas: Sequence[ChoiceDelta], counts: dict[str, int]) -> Document:
        choices = [self._choice(delta) for delta in deltas]
        return self.answer.head("cmpl", "text_completion") | {"choices": choices, "usage": usage(counts)}

    def chunks(self, delta: ChoiceDelta) -> Iterator[Document]:
        yield self.answer.head("cmpl", "text_completion") | {"choices": [self._choice(delta)]}

    def last(self, counts: dict[str, int]) -> Document:
        return self.answer.head("cmpl", "text_completion") | {"choices": [], "usage": usage(counts)}

    def _choice(self, delta: ChoiceDelta) -> Document:
        logprobs = self._logprobs(delta) if self.answer.logprobs else None
        return {"index": delta.index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}

    def _logprobs(self, delta: ChoiceDelta) -> Document:
        offsets = []
        for token in delta.tokens:
            offsets.append(self._offsets[delta.index])
            self._offsets[delta.index] += len(token.text)
        return {
            "tokens": [token.text for token in delta.tokens],
            "token_logprobs": [token.logprob for token in delta.tokens],
            "text_offset": offsets,
            "top_logprobs": None,
        }
