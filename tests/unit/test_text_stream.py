"""Text of a growing answer: whole characters, stop strings, tool calls, and the tokens that belong to it."""

import random

import pytest
from chatml import MARKUP, WITH_TOOLS, make_tokenizer

from workers.rollout.chat import Chat
from workers.rollout.text_stream import Detokenizer, TextStream
from workers.tools.tool_calls import ToolCall

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tokenizer(WITH_TOOLS, MARKUP))


def tokens(chat: Chat, text: str) -> list[int]:
    return chat.encode(text)


def shown(chat: Chat, text: str, **options: object) -> tuple[list[str], TextStream, list[ToolCall]]:
    """What is shown after each token, and at the end."""
    stream = TextStream(chat.text, **options)  # type: ignore[arg-type]
    texts = []
    for token in tokens(chat, text):
        if stream.stopped:
            break
        stream.push(token, -1.0)
        texts.append(stream.take().text)
    rest, calls = stream.end()
    return [*texts, rest.text], stream, calls


def test_no_character_is_ever_broken(chat: Chat) -> None:
    text = "naïve 日本語 😀👩‍👩‍👧 done"
    texts, _, _ = shown(chat, text)
    assert "".join(texts) == text
    assert not any("\ufffd" in part for part in texts)


def test_text_in_parts_is_the_text_at_once_whatever_the_tokens(chat: Chat) -> None:
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(3, 300) for _ in range(60)]
        detokenizer = Detokenizer(chat.text)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == chat.text(ids)


def test_bytes_that_make_no_character_are_not_held_for_ever(chat: Chat) -> None:
    lone = tokens(chat, "é")[-1]
    detokenizer = Detokenizer(chat.text)
    texts = [detokenizer.push(lone) for _ in range(20)]
    assert len("".join(texts)) >= 10


@pytest.mark.parametrize("stop", ["answer", "er?", "swer", "?", "the answer? "])
def test_text_ends_before_a_stop_string_and_shows_nothing_of_it(chat: Chat, stop: str) -> None:
    text = "What is the answer? the answer? no"
    texts, stream, _ = shown(chat, text, stop=(stop,))
    assert "".join(texts) == text[: text.index(stop)]
    assert stream.stopped


def test_the_first_of_several_stop_strings_counts(chat: Chat) -> None:
    texts, _, _ = shown(chat, "one two three", stop=("three", "two"))
    assert "".join(texts) == "one "


def test_text_that_only_looks_like_a_stop_string_is_shown(chat: Chat) -> None:
    texts, stream, _ = shown(chat, "aab aac", stop=("aad",))
    assert "".join(texts) == "aab aac"
    assert not stream.stopped


def test_tokens_join_to_the_text_and_carry_their_logprobs(chat: Chat) -> None:
    stream = TextStream(chat.text, stop=("END",))
    pieces = []
    for i, token in enumerate(tokens(chat, "héllo END more")):
        if stream.stopped:
            break
        stream.push(token, -float(i))
        pieces += stream.take().pieces
    pieces += stream.end()[0].pieces
    assert "".join(piece.text for piece in pieces) == "héllo "
    assert [piece.logprob for piece in pieces] == [-float(i) for i in range(len(pieces))]


def test_tool_calls_are_parsed_and_not_shown(chat: Chat) -> None:
    texts, _, calls = shown(chat, f"Let me see. {CALL}\n{CALL}", tools=True)
    assert "".join(texts) == "Let me see. "
    assert calls == [ToolCall("add", {"a": 1})] * 2


def test_one_call_ends_the_text(chat: Chat) -> None:
    _, stream, calls = shown(chat, f"{CALL} and so on {CALL}", tools=True, one_call=True)
    assert stream.stopped
    assert len(calls) == 1


@pytest.mark.parametrize(
    "text", ["a <tool_call>{}</tool_call>", f"{CALL} after", "<tool_call>never closed", "</tool_call>"]
)
def test_what_is_no_tool_call_is_text(chat: Chat, text: str) -> None:
    texts, _, calls = shown(chat, text, tools=True)
    assert "".join(texts) == text
    assert calls == []


def test_without_tools_a_call_is_text(chat: Chat) -> None:
    texts, _, calls = shown(chat, CALL)
    assert ("".join(texts), calls) == (CALL, [])
