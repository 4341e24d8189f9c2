"""The share of a source's guesses that was right of late, and how tokens are written into bytes."""

from __future__ import annotations

import sys
from dataclasses import dataclass

_KEPT = 0.93
"""Weight of a guess after each later one."""

UNTRIED = 2.0
"""A tally's weight before anything was tried."""

WORD = 4
"""Bytes of a token."""


@dataclass(slots=True)
class Tally:
    """How many of the last guesses of one kind were right, or would have been."""

    right: float = 0.5
    tried: float = UNTRIED

    def add(self, right: bool) -> None:
        self.right, self.tried = _KEPT * self.right + right, _KEPT * self.tried + 1

    @property
    def rate(self) -> float:
        return self.right / self.tried


def spelt(token: int) -> bytes:
    return token.to_bytes(WORD, sys.byteorder)
