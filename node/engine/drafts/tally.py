"""The share of a source's guesses that was right of late, and how tokens are written into bytes."""

from __future__ import annotations

import sys
from dataclasses import dataclass

_KEPT = 0.93
"""Weight of a guess after each later one."""

_KEPT_OF_ROW, _KEPT_OF_ALL = 0.98, 0.99
"""Weights of a model's guesses. Lower weights would begin and end drafts by chance where they hardly pay."""

_LIKENESS = 32.0
"""Guesses as which the rate of all rows counts when a row begins. Fewer cost each answer its first runs
(docs/decisions/0060)."""

UNTRIED = 2.0
"""A tally's weight before anything was tried."""

WORD = 4
"""Bytes of a token."""


@dataclass(slots=True)
class Tally:
    """How many of the last guesses of one kind were right, or would have been."""

    right: float = 0.5
    tried: float = UNTRIED
    kept: float = _KEPT

    def add(self, right: bool) -> None:
        self.right, self.tried = self.kept * self.right + right, self.kept * self.tried + 1

    @property
    def rate(self) -> float:
        return self.right / self.tried

    @classmethod
    def of_all_rows(cls) -> Tally:
        """For the guesses of a model in all its rows: some hundred count."""
        return cls(kept=_KEPT_OF_ALL)

    def next_row(self) -> Tally:
        """For a row that begins. It is like the rows before it until some guesses of its own are known."""
        begun = _LIKENESS if self.tried > UNTRIED else UNTRIED
        return Tally(begun * self.rate, begun, _KEPT_OF_ROW)


def spelt(token: int) -> bytes:
    return token.to_bytes(WORD, sys.byteorder)
