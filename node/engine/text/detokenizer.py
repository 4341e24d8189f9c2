"""Incremental decoding of tokens to text, and stop strings.

`tokenizers.DecodeStream` is not used. Where the bytes of tokens are no valid text, which a model may well
sample, it raises (byte fallback) or loses the rest. For byte-level vocabularies it takes twice the time.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence
from typing import Protocol

_REPLACEMENT = "�"


class Detokenizer(Protocol):
    """The text of one answer. Never hands out a part of a character."""

    def add(self, token: int) -> str:
        """The text that becomes certain with this token."""

    def flush(self) -> str:
        """The rest, at the answer's end or before a special token. An unfinished character is dropped."""


class ApartDetokenizer:
    """Keeps what stood on two sides of special tokens, which have no text, on lines of their own.

    Else a model that names its channels between special tokens would have the names run into the texts.
    """

    def __init__(self, detokenizer: Detokenizer, special: Container[int]) -> None:
        self._detokenizer = detokenizer
        self._special = special
        self._last = ""  # character that was handed out
        self._apart = False

    def add(self, token: int) -> str:
        if token not in self._special:
            return self._separated(self._detokenizer.add(token))
        text = self._separated(self._detokenizer.flush() + self._detokenizer.add(token))
        self._apart = True
        return text

    def flush(self) -> str:
        return self._separated(self._detokenizer.flush())

    def _separated(self, text: str) -> str:
        if not text:
            return text
        if self._apart and self._last not in ("", "\n") and text[0] != "\n":
            text = "\n" + text
        self._apart = False
        self._last = text[-1]
        return text


class BytesDetokenizer:
    """Decodes vocabularies of byte strings that do not depend on their neighbours (byte-level,
    SentencePiece)."""

    def __init__(self, token_bytes: Callable[[int], bytes], *, strip_space: bool) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = strip_space

    def add(self, token: int) -> str:
        text = self._decoder.decode(self._token_bytes(token))
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        self._decoder.reset()
        return ""


class WindowDetokenizer:
    """Decodes any other vocabulary: the last few tokens twice, with and without the new one.

    The tokens before the new one give decoders that look at neighbours (spaces between words) what they need;
    text-generation-inference and vLLM do the same. The window is bounded: a sampled answer may end in half a
    character, or bring no text, for as long as it likes.
    """

    _CONTEXT = 6
    _HELD = 8
    """Tokens whose text is held back, at most; a character has four bytes, each of which may be a token."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._before = 0  # the first token of the window
        self._told = 0  # tokens whose text was handed out

    def add(self, token: int) -> str:
        self._tokens.append(token)
        known = self._decode(self._tokens[self._before : self._told])
        text = self._decode(self._tokens[self._before :])
        if text == known and not text.endswith(_REPLACEMENT):  # a special token, say: it holds no text back
            self._told = len(self._tokens)
            self._before = max(self._before, self._told - self._CONTEXT - self._HELD)
            return ""
        unfinished = len(text) <= len(known) or text.endswith(_REPLACEMENT)
        if unfinished and len(self._tokens) - self._told < self._HELD:
            return ""
        self._told = len(self._tokens)
        self._before = max(self._before, self._told - self._CONTEXT)
        return text[len(known) :]

    def flush(self) -> str:
        known = self._decode(self._tokens[self._before : self._told])
        text = self._decode(self._tokens[self._before :])[len(known) :]
        if text:
            self._before = self._told = len(self._tokens)
        return text.rstrip(_REPLACEMENT)


class StopStrings:
    """Ends an answer at the first of its stop strings to be complete, wherever the tokens' borders are.

    Text is withheld while it might be the beginning of a stop string. Of stop strings that are complete at
    the same character the longest counts; the stop string itself is not handed out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in dict.fromkeys(stops) if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._firsts = {stop[0] for stop in self._stops}
        self._held = ""
        self.seen = 0
        """Characters that were looked at."""

        self.matched = ""
        """The stop string that ended the answer."""

    @property
    def stopped(self) -> bool:
        return bool(self.matched)

    def add(self, text: str) -> str:
        """The text that may be handed out now; after it `stopped` tells whether the answer has ended."""
        self.seen += len(text)
        if not self._stops or not text:
            return text
        held = self._held + text
        found = [(held.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in held]
        if found:
            end, negative_length = min(found)
            start = end + negative_length
            self.matched, self._held = held[start:end], ""
            return held[:start]
        start = self._candidate(held)
        self._held = held[start:]
        return held[:start]

    def flush(self) -> str:
        """The withheld text, at an end of the answer that is no stop string."""
        held, self._held = self._held, ""
        return held

    def _candidate(self, text: str) -> int:
        """The start of the longest suffix that begins a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                suffix = text[start:]
                if any(stop.startswith(suffix) for stop in self._stops):
                    return start
        return len(text)
