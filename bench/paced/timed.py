"""The times of a real stage's steps, as a table to pace another by: the instrument's check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Points = tuple[tuple[int, float], ...]
"""Sizes, rising, with mean seconds."""


@dataclass
class StepTimes:
    """Sums of measured steps, by rows and tokens of each."""

    sums: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)

    def add(self, rows: int, tokens: int, seconds: float) -> None:
        count, before = self.sums.get((rows, tokens), (0, 0.0))
        self.sums[rows, tokens] = count + 1, before + seconds

    def plain(self) -> list[tuple[int, int, float]]:
        """Rows, tokens of each and mean seconds."""
        return [(*size, total / count) for size, (count, total) in sorted(self.sums.items())]


@dataclass(frozen=True)
class StepTable:
    """Seconds of decode steps by rows, and of chunks by tokens; lines between what was measured."""

    decode: Points
    chunks: Points

    @classmethod
    def of(cls, plain: Iterable[tuple[int, int, float]]) -> StepTable:
        """Raises ValueError without a decode step."""
        rows = sorted((rows, seconds) for rows, tokens, seconds in plain if tokens == 1)
        chunks = sorted((tokens, seconds) for rows, tokens, seconds in plain if rows == 1)
        if not rows:
            raise ValueError("no decode step was measured")
        return cls(tuple(rows), tuple(chunks))

    def step(self, rows: int, tokens: int, context: int) -> float:
        """Seconds of a step, whatever its context."""
        return _at(self.decode, rows) if tokens == 1 else _at(self.chunks or self.decode, tokens)


def _at(points: Points, size: int) -> float:
    """On the line between the two next points; beyond the last, in proportion to it."""
    low, least = points[0]
    if size <= low:
        return least
    for high, most in points[1:]:
        if size <= high:
            return least + (most - least) * (size - low) / (high - low)
        low, least = high, most
    return least * size / low
