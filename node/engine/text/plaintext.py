"""What a prompt's author wrote stays text: no part of it becomes a token with which a template marks roles.

A template may look at contents and change them, so a prompt is rendered as it is, and again with a mark, a
character that occurs nowhere else, after every character with which such a token may begin. If both hold the
same control tokens, and the template has not left out one of its own for one of the author's, they are the
template's, and the first one counts: it is encoded as transformers encodes it. Else the author wrote some of
them, whole or in parts that would join; then the second counts, cut into pieces where marks keep one apart.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from sealring.mesh.errors import InvalidInput

_MARKS = range(0xE000, 0xF900)
"""Characters for private use."""

_PIECE = 1 << 16

_LAST_TURN = 16
"""Tokens with which a template opens an answer, at most."""

Write = Callable[[str], str]
"""Changes what the author wrote, wherever it stands in the prompt."""


class Encode(Protocol):
    def __call__(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class PlainText:
    """Encodes prompts with one tokenizer.

    `controls`: the names of the tokens that an author cannot write, and their ids. `normalize` is what the
    tokenizer does with characters before it looks for names. Of prompts of `context` tokens or more, which
    nobody computes, it counts.
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
        longest_first = sorted(known, key=len, reverse=True)
        self._names = re.compile(f"(?=({'|'.join(map(re.escape, longest_first))}))") if known else None
        self._begins = lru_cache(maxsize=1 << 16)(self._uncached_begins)

    def encode(self, written: str, render: Callable[[Write], str], *, add_special_tokens: bool) -> list[int]:
        """The tokens of a prompt. `written` is all that its author wrote; `render` puts the prompt together.

        Raises InvalidInput (PROMPT_UNUSABLE) where control tokens cannot be kept out, or what `render` does.
        """
        whole = render(lambda text: text)
        ids = self._encode(whole, add_special_tokens=add_special_tokens)
        if len(ids) >= self._context:
            return ids  # to be refused: with marks it is several times as many, at 500 bytes each
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
        wanted = self._controls(self._encode(marked, add_special_tokens=add_special_tokens))
        if self._controls(ids) == wanted and (marked.replace(mark, "") == whole or self._is_plain(written)):
            return ids
        first, *rest = self._pieces(marked, mark)
        ids = self._encode(first, add_special_tokens=add_special_tokens)
        for piece in rest:
            ids += self._encode(piece, add_special_tokens=False)
        if self._controls(ids) != wanted:
            raise _unusable()
        return ids

    def after_controls(self, ids: Sequence[int]) -> Sequence[int]:
        """The tokens after the last control token, a few at most."""
        last = ids[-_LAST_TURN:]
        controls = [place for place, token in enumerate(last, 1) if token in self._ids]
        return last[max(controls, default=0) :]

    def _is_plain(self, written: str) -> bool:
        return not self._controls(self._encode(written, add_special_tokens=False))

    def _controls(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self._ids]

    def _uncached_begins(self, character: str) -> bool:
        """Whether a control token may begin with a character, as it is or as it is normalized."""
        normal = self._normalize(character) if self._normalize is not None else character
        return not self._firsts.isdisjoint(character + normal)

    def _pieces(self, marked: str, mark: str) -> list[str]:
        """The text without its marks, cut at one mark in each control token that holds some."""
        parts = marked.split(mark)
        text, marks, end = "".join(parts), [], 0
        for part in parts[:-1]:
            end += len(part)
            marks.append(end)
        assert self._names is not None
        cuts, place = [0], 0
        for found in self._names.finditer(text):
            start, end = found.span(1)
            while place < len(marks) and marks[place] <= start:
                place += 1
            if place < len(marks) and marks[place] < end and marks[place] > cuts[-1]:
                cuts.append(marks[place])
        return [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _characters(text: str) -> set[str]:
    """Those that occur. In pieces: a set of millions is made without letting another thread go on."""
    found: set[str] = set()
    for start in range(0, len(text), _PIECE):
        found.update(text[start : start + _PIECE])
    return found


def _unused(used: set[str]) -> str:
    mark = next((chr(code) for code in _MARKS if chr(code) not in used), None)
    if mark is None:
        raise _unusable()
    return mark


def _unusable() -> InvalidInput:
    return InvalidInput(
        "the prompt holds names of control tokens that cannot be told from the template's",
        reason="PROMPT_UNUSABLE",
        hint="leave them out",
    )
