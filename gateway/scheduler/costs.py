"""The cost table: seconds of steps, which stages time when they load.

A ring is as fast as its slowest stage, so the table has the longest time of any. Costs between timed sizes
lie on a line; beyond the largest size they lie on the line through the last two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Times = tuple[tuple[int, float], ...]
"""Sizes, rising, and seconds of one stage, not falling."""

_SHORTEST, _LONGEST = 1e-6, 3600.0
"""Bounds of a step's seconds."""

MAX_TIMES = 32
"""Times of one member that count, more than any sends: every round looks through all of them."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a decode step by its `rows`, and of a prefill step with one chunk by its `tokens`."""

    rows: Times = ((1, 0.01), (16, 0.02))
    tokens: Times = ((1, 0.01), (512, 0.3))

    @classmethod
    def of(cls, timed: Iterable[Sequence[tuple[int, int, float]]]) -> StepCosts:
        """The table of stages that report (rows, tokens of each, seconds); the default where they time too
        little.

        One row of one token is both a decode step and a chunk. Impossible sizes and times are ignored.
        """
        slowest: dict[tuple[int, int], float] = {}
        for stage in timed:
            for rows, tokens, seconds in stage[:MAX_TIMES]:
                if rows >= 1 and tokens >= 1 and _SHORTEST <= seconds <= _LONGEST:
                    slowest[rows, tokens] = max(seconds, slowest.get((rows, tokens), 0.0))
        by_rows = sorted((rows, seconds) for (rows, tokens), seconds in slowest.items() if tokens == 1)
        by_tokens = sorted((tokens, seconds) for (rows, tokens), seconds in slowest.items() if rows == 1)
        if not by_rows or len(by_tokens) < 2:
            return cls()
        return cls(_rising(by_rows), _rising(by_tokens))

    def decode(self, rows: float) -> float:
        """Seconds of a decode step of `rows` rows in the slowest stage."""
        return _at(self.rows, rows)

    def chunk(self, tokens: float) -> float:
        """Seconds of a prefill step with one chunk of `tokens` tokens in the slowest stage."""
        return _at(self.tokens, tokens)


def _rising(times: list[tuple[int, float]]) -> Times:
    """Lowers a time to that of any larger size: it was measured at a slow moment."""
    least = list(accumulate((took for _, took in reversed(times)), min))
    return tuple(zip((size for size, _ in times), reversed(least), strict=True))


def _at(times: Times, size: float) -> float:
    if len(times) == 1:
        return times[0][1]
    after = next((index for index, (each, _) in enumerate(times) if each >= size), len(times) - 1)
    (low, least), (high, most) = times[max(0, after - 1)], times[max(1, after)]
    return max(times[0][1], least + (most - least) * (size - low) / (high - low))
