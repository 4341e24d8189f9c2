"""What a prompt's author wrote stays text: no part of it becomes a token with which a template marks roles.

A template may look at contents and change them, so a prompt is rendered as it is, and again with a mark, a
character that occurs nowhere else, after every character with which such a token may begin. The tokens are
the template's if both hold the same control tokens, and if it has not left out one of its own for one of the
author's. Then the first one counts, encoded as transformers encodes it. Else the author wrote some of them,
whole or in parts that would join. Then the second counts, cut into pieces where marks keep one apart.

A prompt may have megabytes, and a token costs hundreds of bytes while it is encoded. So a text that may have
more tokens than the context holds is counted piece by piece first, and only a prompt's own tokens are made at
once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from sealring.mesh.errors import InvalidInput
from sealring.node.engine.text.showing import Write

_MARKS = range(0xE000, 0xF900)
"""Characters for private use."""

PIECE = 1 << 16
"""Characters that are searched at once: no other thread goes on meanwhile."""

ENCODED = 1 << 14
"""Characters that are encoded at once where their tokens are only looked at."""

_EXPANDED = 8
"""Characters that a normalizer may make of a byte: NFKC makes 18 of a character of 3."""

_OVERLAP = 1 << 12
"""Characters in which a name has to fit, however it is spelt before it is normalized."""

_CUT_TOKENS = 16
"""The most tokens by which a cut may change the count."""

_LAST_TURN = 16
"""Tokens with which a template opens an answer, at most."""


class Encode(Protocol):
    def __call__(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class PlainText:
    """Encodes prompts with one tokenizer.

    `controls`: the names of the tokens that an author cannot write, and their ids. `normalize` is what the
    tokenizer does with characters before it looks for names. A prompt has fewer tokens than the `context`.
    """

    def __init__(
        self,
        encode: Encode,
        controls: Mapping[str, int],
        normalize: Callable[[str], str] | None = None,
        context: int = sys.maxsize,
    ) -> None:
        known = {name: token for name, token in controls.items() if len(name) > 1}
        self._encode = encode
        self._ids = frozenset(known.values())
        self._firsts = {name[0] for name in known}
        self._normalize = normalize
        self._context = context
        self._longest = max(map(len, known), default=0)
        longest_first = sorted(known, key=len, reverse=True)
        self._names = re.compile(f"(?=({'|'.join(map(re.escape, longest_first))}))") if known else None
        self._begins = lru_cache(maxsize=1 << 16)(self._uncached_begins)

    def encode(
        self, written: str, render: Callable[[Write], str], *, add_special_tokens: bool, param: str = "prompt"
    ) -> list[int]:
        """The tokens of a prompt. `written` is all that its author wrote; `render` puts the prompt together.

        Raises InvalidInput: CONTEXT_TOO_LONG, or PROMPT_UNUSABLE where control tokens cannot be kept out; and
        what `render` does.
        """
        whole = render(lambda text: text)
        self._count(whole, param)
        ids = self._encode(whole, add_special_tokens=add_special_tokens)
        if len(ids) >= self._context:
            raise too_long(len(ids), self._context, param)
        used = _characters(written)
        beginnings = [*filter(self._begins, used)]
        if not beginnings:
            return ids
        mark = _unused(used | _characters(whole))

        def marking(text: str) -> str:
            for character in beginnings:
                text = text.replace(character, character + mark)
            return text

        marked = render(marking)
        wanted = self._marked_controls(marked, mark, add_special_tokens=add_special_tokens)
        if self._controls(ids) == wanted and (marked.replace(mark, "") == whole or self._is_plain(written)):
            return ids
        first, *rest = self._pieces(marked, mark)
        ids = self._encode(first, add_special_tokens=add_special_tokens)
        for piece in rest:
            ids += self._encode(piece, add_special_tokens=False)
            if len(ids) >= self._context:
                raise too_long(len(ids), self._context, param)
        if self._controls(ids) != wanted:
            raise _unusable()
        return ids

    def _count(self, text: str, param: str) -> None:
        """Refuses a text that certainly has too many tokens, of which it makes those of a piece at a time.

        A text whose bytes cannot be many more tokens is left alone. Raises InvalidInput (CONTEXT_TOO_LONG).
        """
        size = len(text) if text.isascii() else len(text.encode(errors="replace"))
        if size < (2 * self._context if self._normalize is None else self._context // _EXPANDED):
            return
        most, found = self._context + self._context // 4, 0
        for start in range(0, len(text), ENCODED):
            found += len(self._encode(text[start : start + ENCODED], add_special_tokens=False))
            most += _CUT_TOKENS
            if found > most:
                raise too_long(found, self._context, param, more=True)

    def after_controls(self, ids: Sequence[int]) -> Sequence[int]:
        """The tokens after the last control token, a few at most."""
        last = ids[-_LAST_TURN:]
        controls = [place for place, token in enumerate(last, 1) if token in self._ids]
        return last[max(controls, default=0) :]

    def _is_plain(self, written: str) -> bool:
        reach = ENCODED + self._longest + _OVERLAP
        parts = (written[start : start + reach] for start in range(0, len(written), ENCODED))
        return not any(self._controls(self._encode(part, add_special_tokens=False)) for part in parts)

    def _marked_controls(self, marked: str, mark: str, *, add_special_tokens: bool) -> list[int]:
        """The control tokens of a text with marks, none of which holds one: so it is cut behind marks."""
        found, start = list[int](), 0
        while start < len(marked) or not start:
            end = start + ENCODED
            if end < len(marked):
                end = marked.rfind(mark, start, end) + 1 or marked.find(mark, end) + 1 or len(marked)
            first = add_special_tokens and not start
            found += self._controls(self._encode(marked[start:end], add_special_tokens=first))
            start = end
        return found

    def _controls(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self._ids]

    def _uncached_begins(self, character: str) -> bool:
        """Whether a control token may begin with a character, as it is or as it is normalized."""
        normal = self._normalize(character) if self._normalize is not None else character
        return not self._firsts.isdisjoint(character + normal)

    def _pieces(self, marked: str, mark: str) -> list[str]:
        """The text without its marks, cut at one mark in each control token that holds some."""
        spelt = np.frombuffer(marked.encode("utf-32-le", "surrogatepass"), np.uint32)
        places = np.flatnonzero(spelt == ord(mark))
        marks = places - np.arange(len(places))
        text, cuts = marked.replace(mark, ""), [0]
        for start, end in self._named(text):
            place = int(np.searchsorted(marks, start, "right"))
            if place < len(marks) and cuts[-1] < marks[place] < end:
                cuts.append(int(marks[place]))
        return [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]

    def _named(self, text: str) -> Iterator[tuple[int, int]]:
        """The places of control tokens' names, begin and end."""
        assert self._names is not None
        for first in range(0, len(text), PIECE):
            for found in self._names.finditer(text, first, first + PIECE + self._longest):
                if found.start() < first + PIECE:
                    yield found.span(1)


def _characters(text: str) -> set[str]:
    """The characters that occur in the text. It is read in pieces, so that other threads can go on."""
    found: set[str] = set()
    for start in range(0, len(text), PIECE):
        found.update(text[start : start + PIECE])
    return found


def _unused(used: set[str]) -> str:
    mark = next((chr(code) for code in _MARKS if chr(code) not in used), None)
    if mark is None:
        raise _unusable()
    return mark


def too_long(tokens: int, context: int, param: str, *, more: bool = False) -> InvalidInput:
    """The error for a prompt of this number of tokens, or of `more`."""
    return InvalidInput(
        f"the prompt has {'more than ' * more}{tokens} tokens, the context holds {context} with the answer",
        reason="CONTEXT_TOO_LONG",
        hint="shorten the prompt, or deploy the model with a longer context",
        param=param,
        prompt_tokens=tokens,
        context=context,
    )


def _unusable() -> InvalidInput:
    return InvalidInput(
        "the prompt holds names of control tokens that look like the template's own",
        reason="PROMPT_UNUSABLE",
        hint="leave them out",
    )
