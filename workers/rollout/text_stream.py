"""Sampled tokens as text to show while it grows: whole characters, and nothing of a stop string or a tool call."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.tools.tool_calls import CLOSE, OPEN, MalformedToolCall, ToolCall, parse_tool_call

CALL = re.compile(f"{OPEN}.*?{CLOSE}", re.DOTALL)

INCOMPLETE = "\ufffd"  # what decoders write for bytes that are no whole character
HELD_TOKENS = 8  # a character ends within fewer; after as many, bytes that make none are shown as what they are


class Detokenizer:
    """Token ids in, the text that each one completes out.

    A window of ids is decoded again with each new one, as what a token means can depend on the ones before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text that were returned
        self._pending = 0  # tokens since the last whole character

    def push(self, token: int) -> str:
        self._window.append(token)
        self._pending += 1
        text = self._decode(self._window)
        if not text.endswith(INCOMPLETE):
            new = text[self._shown :]
            self._window = self._window[-self._pending :]
            self._shown = len(self._decode(self._window))
            self._pending = 0
            return new
        if self._pending <= HELD_TOKENS:
            return ""
        new = text[self._shown : -1]
        self._shown += len(new)
        return new

    def flush(self) -> str:
        """What was held for a character that never came."""
        return self._decode(self._window)[self._shown :]


@dataclass(frozen=True, slots=True)
class Piece:
    """One sampled token, and the text that it added."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Delta:
    """What can be shown now and was not before."""

    text: str
    pieces: list[Piece]


class TextStream:
    """The text of one choice. `push` tokens until `stopped`, `take` what can be shown, then `end`."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        tools: bool = False,
        one_call: bool = False,
    ) -> None:
        """`tools`: tool calls are held back and parsed at the end; `one_call`: the first one ends the text."""
        self._detokenizer = Detokenizer(decode)
        self._stop = tuple(stop)
        self._tools, self._one_call = tools, one_call
        self._held = (*stop, OPEN) if tools else self._stop
        self._longest = max(map(len, (*self._held, CLOSE)))
        self._text = ""
        self._pieces: list[Piece] = []  # joined they begin with the text: the last ones may lie in a stop string
        self._shown = self._shown_pieces = self._piece_end = 0
        self.tokens = 0  # pushed, those that end the text included
        self.stopped = False  # by a stop string, or by the one call

    def push(self, token: int, logprob: float) -> None:
        """A sampled token that is not a stop token."""
        self.tokens += 1
        self._append(self._detokenizer.push(token), logprob)

    def _append(self, new: str, logprob: float) -> None:
        seen = max(0, len(self._text) - self._longest + 1)  # a match ends in the new text
        self._text += new
        self._pieces.append(Piece(new, logprob))
        cuts = [at for stop in self._stop if (at := self._text.find(stop, seen)) >= 0]
        if self._one_call and OPEN in self._text and (at := self._text.find(CLOSE, seen)) >= 0:
            cuts.append(at + len(CLOSE))
        if cuts:
            self._text = self._text[: min(cuts)]
            self.stopped = True

    def take(self) -> Delta:
        """Text up to where a stop string or a tool call may begin, with the tokens that lie wholly in it."""
        return self._take(self._safe())

    def _safe(self) -> int:
        if self._tools and (at := self._text.find(OPEN)) >= 0:
            return at
        if self.stopped:
            return len(self._text)
        tails = (k for k in range(min(self._longest, len(self._text)), 0, -1) if self._may_begin(self._text[-k:]))
        return len(self._text) - next(tails, 0)

    def _may_begin(self, tail: str) -> bool:
        return any(text.startswith(tail) for text in self._held)

    def _take(self, end: int) -> Delta:
        start, self._shown = self._shown, max(self._shown, end)
        first = self._shown_pieces
        while self._shown_pieces < len(self._pieces):
            after = self._piece_end + len(self._pieces[self._shown_pieces].text)
            if after > self._shown:
                break
            self._piece_end = after
            self._shown_pieces += 1
        return Delta(self._text[start : self._shown], self._pieces[first : self._shown_pieces])

    def end(self) -> tuple[Delta, list[ToolCall]]:
        """The rest: all text that is no tool call, the remaining tokens, and the calls.

        Calls that are not well-formed, or have text after them, are text.
        """
        if not self.stopped and (rest := self._detokenizer.flush()):
            self._text += rest
            cuts = [at for stop in self._stop if (at := self._text.find(stop)) >= 0]
            if cuts:
                self._text, self.stopped = self._text[: min(cuts)], True
        calls = self._calls() if self._tools else []
        end = self._text.find(OPEN) if calls else len(self._text)
        delta = self._take(end)
        pieces, start = delta.pieces, self._piece_end
        for piece in self._pieces[self._shown_pieces :]:
            if start < end:
                pieces.append(piece)
            start += len(piece.text)
        return Delta(delta.text, pieces), calls

    def _calls(self) -> list[ToolCall]:
        _, opened, rest = self._text.partition(OPEN)
        if not opened or CALL.sub("", opened + rest).strip():
            return []
        try:
            calls = [parse_tool_call(found) for found in CALL.findall(opened + rest)]
        except MalformedToolCall:
            return []
        return [call for call in calls if call is not None]
