"""From chat messages to token ids and back, through the model's own chat template.

Two promises. Text that comes from users, data and tools never becomes a control token (`<|im_end|>` in a message is
text). Ids that were sampled stay as they are: later turns only append new ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from app.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

JSON = dict[str, Any]
Messages = Sequence[dict[str, str]]

# Where control text stood in a message, while the template runs: a noncharacter, a number, a noncharacter.
MARK, MARK_END = "\ufdd0", "\ufdd1"
MARKED = re.compile(f"{MARK}(\\d+){MARK_END}")

# An assistant turn after which later messages are rendered.
DUMMY_REPLY = "marlaas-dummy-reply"
DUMMY_CHAT = [{"role": "user", "content": "marlaas-dummy-question"}, {"role": "assistant", "content": DUMMY_REPLY}]

PROBE_TOOL: JSON = {
    "type": "function",
    "function": {
        "name": "marlaas_probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {}},
    },
}
PROBE_CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is 12*7?\n\nShow <b>no</b> steps."},
    {"role": "assistant", "content": "84"},
    {"role": "user", "content": "  And 12*8? "},
]

# For chat templates without tools; the wording is that of Hermes' function calling.
TOOLS_TEXT = """# Tools

You may call a function to help with the user's question. You are given function signatures within <tools></tools>:
<tools>
{tools}
</tools>

For a function call, answer with its name and arguments as a JSON object within <tool_call></tool_call>:
<tool_call>{{"name": <function-name>, "arguments": <arguments>}}</tool_call>"""


class Chat:
    """A tokenizer with its chat template. Thread-safe: nothing changes after construction."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop_ids: Sequence[int] = ()) -> None:
        """`stop_ids`: the model's own, from its generation config; those of the template are added.

        Raises InvalidRequest when the tokenizer has no chat template or cannot keep control tokens apart from text.
        """
        if not tokenizer.chat_template:
            raise InvalidRequest("the base model's tokenizer has no chat template", param="base_model")
        self._tokenizer = tokenizer
        self._text = _text_tokenizer(tokenizer)
        self._controls = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._special = _any_of([*special, MARK])
        self._any_control = _any_of([*self._controls, MARK])
        self._written = _any_of(list(self._controls))
        self.knows_tools = True  # until the probe has shown whether the template writes tool definitions
        self.knows_tools = PROBE_TOOL["function"]["name"] in self._template(PROBE_CHAT, [PROBE_TOOL])
        self._check()
        closing = self._encode(self._after_reply([]))[:1]
        template_stops = [id for id in closing if id in self._controls.values()]
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_ids: tuple[int, ...] = tuple(sorted({*stop_ids, *template_stops, *eos}))

    @classmethod
    def load(cls, folder: Path) -> Chat:
        """Reads tokenizer and `generation_config.json` of a model folder."""
        from transformers import PreTrainedTokenizerFast  # AutoTokenizer would import all of torch

        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        return cls(tokenizer, generation_stop_ids(folder))

    def render_prompt(self, messages: Messages, tools: Sequence[JSON] | None = None) -> list[int]:
        """Ids of a conversation up to where the policy speaks. Raises InvalidRequest when the template refuses it."""
        if tools and not self.knows_tools:
            messages, tools = _with_tools_text(messages, tools), None
        table: list[str] = []
        rendered = self._template(
            [self._escape_message(message, table) for message in messages],
            self._escape(list(tools), self._any_control, table) if tools else None,
            add_generation_prompt=True,
        )
        return self._encode(rendered, table)

    def extend(self, sampled: Sequence[int], messages: Messages) -> list[int]:
        """Ids to append after a sampled turn so that `messages` (tool, user) follow and the policy speaks again.

        They begin with the end of the policy's turn, as far as `sampled` lacks it (a turn cut off has no end). Masked
        out of the loss by the caller.
        """
        table: list[str] = []
        ids = self._encode(self._after_reply([self._escape_message(message, table) for message in messages]), table)
        return ids[1:] if sampled and ids[0] == sampled[-1] and ids[0] in self.stop_ids else ids

    def encode(self, text: str) -> list[int]:
        """Ids of bare text, with what the tokenizer itself puts around it; no control text becomes a control token."""
        return self._text.encode(text, add_special_tokens=True).ids

    def text(self, ids: Sequence[int]) -> str:
        """What the ids stand for, control tokens as text."""
        return self._text.decode(list(ids), skip_special_tokens=False)

    def decode(self, sampled: Sequence[int]) -> str:
        """Text of a sampled turn without its stop token. Other control tokens are kept, as text."""
        ids = list(sampled)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        # PostgreSQL's text cannot hold a NUL.
        return self.text(ids).replace("\x00", "\ufffd")

    def _after_reply(self, messages: list[dict[str, str]]) -> str:
        """What the template writes after an assistant's reply when `messages` follow it."""
        rendered = self._template([*DUMMY_CHAT, *messages], add_generation_prompt=bool(messages))
        return rendered.partition(DUMMY_REPLY)[2]

    def _template(self, messages: Messages, tools: Any = None, add_generation_prompt: bool = False) -> str:
        if not self.knows_tools:
            messages = [_as_user(message) for message in messages]
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise InvalidRequest(f"the base model's chat template refuses the messages: {error}") from error
        assert isinstance(rendered, str)
        return rendered

    def _escape_message(self, message: dict[str, str], table: list[str]) -> dict[str, str]:
        # What the policy may write itself (`<tool_call>`, `<think>`) keeps its own ids in prompts and shown replies.
        outside = message["role"] in ("user", "tool")
        return self._escape(dict(message), self._any_control if outside else self._special, table)

    def _escape(self, value: Any, pattern: re.Pattern[str], table: list[str]) -> Any:
        """`value` with each control text in it replaced by a mark; `table` learns what stood there."""

        def mark(found: re.Match[str]) -> str:
            table.append(found[0])
            return f"{MARK}{len(table) - 1}{MARK_END}"

        if isinstance(value, str):
            return pattern.sub(mark, value)
        if isinstance(value, dict):
            return {self._escape(k, pattern, table): self._escape(v, pattern, table) for k, v in value.items()}
        if isinstance(value, list):
            return [self._escape(v, pattern, table) for v in value]
        return value

    def _encode(self, rendered: str, table: Sequence[str] = ()) -> list[int]:
        """Control tokens that the template wrote become their ids; all between them, marks resolved, is text."""
        ids: list[int] = []
        for part in self._written.split(rendered):
            if part in self._controls:
                ids.append(self._controls[part])
            elif part:
                text = MARKED.sub(lambda found: table[int(found[1])], part)
                ids += self._text.encode(text, add_special_tokens=False).ids
        return ids

    def _check(self) -> None:
        """Plain text must get the tokenizer's own ids, and no control text may become a control id."""
        expected = self._tokenizer.apply_chat_template(PROBE_CHAT, add_generation_prompt=True, return_dict=False)
        if self.render_prompt(PROBE_CHAT) != list(expected):
            raise InvalidRequest("the base model's tokenizer depends on more than the text between control tokens")
        for id, token in self._tokenizer.added_tokens_decoder.items():
            control = token.content
            if token.lstrip or token.rstrip or token.single_word:
                raise InvalidRequest(f"the base model's token {control!r} takes in the text around it")
            if id in self._text.encode(control, add_special_tokens=False).ids:
                raise InvalidRequest(f"the base model's tokenizer cannot read {control!r} as text")


def generation_stop_ids(folder: Path) -> tuple[int, ...]:
    """`eos_token_id` of a model folder's `generation_config.json`, if there is one."""
    path = folder / "generation_config.json"
    if not path.exists():
        return ()
    eos = json.loads(path.read_text()).get("eos_token_id")
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def _text_tokenizer(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """A copy of the tokenizer to which every added token is plain text."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    definition["added_tokens"] = [token | {"special": True} for token in definition["added_tokens"]]
    definition["truncation"] = definition["padding"] = None
    text = Tokenizer.from_str(json.dumps(definition))
    text.encode_special_tokens = True  # `split_special_tokens`, set once: toggling it is not thread-safe
    return text


def _any_of(texts: list[str]) -> re.Pattern[str]:
    """A pattern of any of the texts, the longest first; it captures, so that `split` keeps them."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True)))})")


def _as_user(message: dict[str, str]) -> dict[str, str]:
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def _with_tools_text(messages: Messages, tools: Sequence[JSON]) -> list[dict[str, str]]:
    text = TOOLS_TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
