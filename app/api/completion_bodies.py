"""What a client may ask of `/v1/chat/completions` and `/v1/completions`. What is not supported is refused by name."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from app.api.blueprint import Body
from app.errors import InvalidRequest
from app.specs import plain_json
from app.specs.completion import MAX_CHOICES
from app.specs.job import LEAST_TEMPERATURE

MAX_MESSAGES = 1024
MAX_TOOLS = 64
MAX_TOKEN = 2**31 - 1
SEEDS = 2**63
TEMPERATURES = f"0: always the likeliest token; else at least {LEAST_TEMPERATURE:g}, which less is taken for; default 1"

Parts = {"type": "array", "items": {"type": "object", "required": ["type", "text"]}}
TEXT_SCHEMA = WithJsonSchema({"anyOf": [{"type": "string"}, Parts, {"type": "null"}]})


def joined(content: Any) -> Any:
    """Parts of text as one text."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not (isinstance(part, dict) and part.get("type") in ("text", "refusal")):
            raise ValueError('is a text or a list of parts {"type": "text", "text": …}; others are not supported')
        if not isinstance(part.get(part["type"]), str):
            raise ValueError(f'a part of type "{part["type"]}" has a text in its field of that name')
    return "".join(part[part["type"]] for part in content)


Text = Annotated[str | None, BeforeValidator(joined), TEXT_SCHEMA]


class FunctionCall(Body):
    name: str
    arguments: str = Field(description="a JSON object, as text")


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = None
    name: str | None = Field(None, description="accepted, not shown to the model")
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # As answers have them, so that one can be sent back as it came.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def has_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message has content, or is the assistant's with tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are the assistant's")
        return self

    def rendered(self) -> dict[str, str]:
        """Role and text as the chat template takes them; calls as the policy itself writes them."""
        calls = [_written(call.function) for call in self.tool_calls or ()]
        text = "\n".join([*([self.content] if self.content else []), *calls])
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


def _written(call: FunctionCall) -> str:
    try:
        arguments = plain_json.parse(call.arguments)
    except ValueError:
        arguments = call.arguments  # what a model wrote need not be JSON
    body = json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>{body}</tool_call>"


class Function(Body):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="true is not supported")


class Tool(Body):
    type: Literal["function"]
    function: Function


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = Field(None, description="accepted, has no effect")


def one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stop = Annotated[
    Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=4)] | None,
    BeforeValidator(one_or_many),
    Field(description="texts that end an answer, up to 4, and are not part of it"),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]
Neutral = Annotated[Any, Field(description="accepted only where it asks for nothing")]
Ignored = Annotated[Any, Field(description="accepted, has no effect")]


class CompletionBody(Body):
    """What both endpoints have."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
    }

    model: str = Field(min_length=1, max_length=512, description="a base model, or an adapter `ft:…` of this tenant")
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN, description="by default what the context has room for")
    temperature: float | None = Field(None, ge=0, le=2, description=TEMPERATURES)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-SEEDS, lt=SEEDS, description="fixes what is sampled")
    stop: Stop = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Ignored = None
    frequency_penalty: Neutral = None
    presence_penalty: Neutral = None
    logit_bias: Neutral = None

    @model_validator(mode="before")
    @classmethod
    def asks_for_what_there_is(cls, body: Any) -> Any:
        """Raises InvalidRequest that names a field which would change the answer in a way that is not supported."""
        for field, neutral in cls.NEUTRAL.items() if isinstance(body, dict) else ():
            value = body.get(field)
            if value is not None and value not in neutral:
                only = " or ".join(json.dumps(choice) for choice in neutral)
                raise InvalidRequest(
                    f"{field}: not supported here{f'; leave it out or send {only}' if neutral else '; leave it out'}.",
                    param=field,
                    code="unsupported_parameter",
                )
        return body

    @model_validator(mode="after")
    def options_are_of_a_stream(self) -> CompletionBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only with stream: true", param="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> dict[str, Any]:
        """The fields of `app.specs.completion.CompletionCall` that both endpoints fill alike."""
        return {
            "temperature": _temperature(self.temperature),
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "seed": secrets.randbits(62) if self.seed is None else self.seed % SEEDS,
            "stop": self.stop or [],
            "n": self.n or 1,
            "stream": bool(self.stream),
        }


def _temperature(asked: float | None) -> float:
    if asked is None:
        return 1.0
    return max(asked, LEAST_TEMPERATURE) if asked else 0.0


class ChatBody(CompletionBody):
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = CompletionBody.NEUTRAL | {
        "top_logprobs": (0,),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "tool_choice": ("auto", "none"),
        "audio": (),
        "prediction": (),
        "functions": (),
        "function_call": (),
        "web_search_options": (),
        "moderation": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
    }

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN, description="the newer name of max_tokens")
    logprobs: bool | None = Field(None, description="of the chosen tokens")
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Neutral = None
    parallel_tool_calls: bool | None = Field(None, description="false: an answer ends with its first call")
    top_logprobs: Neutral = None
    response_format: Neutral = None
    modalities: Neutral = None
    audio: Neutral = None
    prediction: Neutral = None
    functions: Neutral = None
    function_call: Neutral = None
    web_search_options: Neutral = None
    moderation: Neutral = None
    reasoning_effort: Neutral = None
    verbosity: Neutral = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None

    @model_validator(mode="after")
    def strict_is_not_asked_for(self) -> ChatBody:
        for i, tool in enumerate(self.tools or ()):
            if tool.function.strict:
                field = f"tools.{i}.function.strict"
                raise InvalidRequest(f"{field}: not supported here", param=field, code="unsupported_parameter")
        return self

    def asked(self) -> dict[str, Any]:
        tools = None if self.tool_choice == "none" else self.tools
        return {
            **self.sampling(),
            "messages": [message.rendered() for message in self.messages],
            "tools": [tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
            "max_tokens": self.max_completion_tokens or self.max_tokens,
            "logprobs": bool(self.logprobs),
            "one_call": self.parallel_tool_calls is False,
        }


Ids = list[Annotated[int, Field(ge=0, le=MAX_TOKEN)]]
PROMPT_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}},
            {"type": "array", "items": {"type": "integer"}},
            {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        ]
    }
)


def prompt_list(prompt: Any) -> Any:
    """A text, a list of them, token ids, or a list of lists of them: as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return [prompt]
    return prompt


class TextBody(CompletionBody):
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = CompletionBody.NEUTRAL | {
        "logprobs": (0,),
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
    }

    prompt: Annotated[list[str | Ids], BeforeValidator(prompt_list), PROMPT_SCHEMA] = Field(
        min_length=1, max_length=MAX_CHOICES, description=f"one or more; with n at most {MAX_CHOICES} answers in all"
    )
    logprobs: Annotated[Any, Field(description="0: of the chosen tokens; more is not supported")] = None
    best_of: Neutral = None
    echo: Neutral = None
    suffix: Neutral = None

    @model_validator(mode="after")
    def not_too_many(self) -> TextBody:
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            raise InvalidRequest(
                f"n: {len(self.prompt)} prompts with {self.n} answers each are over {MAX_CHOICES} in all", param="n"
            )
        return self

    def asked(self) -> dict[str, Any]:
        return {
            **self.sampling(),
            "prompts": self.prompt,
            "max_tokens": self.max_tokens,
            "logprobs": self.logprobs is not None,
        }
