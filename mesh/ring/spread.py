"""The lanes that a number of rows is spread over, by what a step costs.

A stage computes the steps of all lanes one after another, and a lane's next step begins when its last one has
passed all stages. T(r) are the seconds of a step of r rows in the slowest stage, S the number of stages, and
h the seconds of a hop. Every row gets one token in a round, which takes

    max(sum of T over the lanes, S * (T(largest) + h)).

The shortest round is at once the most tokens a second and the least time
between two tokens of a row, because the rows are given: one choice serves both.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

ALIKE = 0.02
"""Part by which rounds may differ and count as alike: steps vary by more. Of rounds that are alike, those of
the fewest lanes are taken that give every stage one: a lane less is a step less to announce and to hand on.
"""

_ROUNDING = 1e-9

Times = tuple[tuple[int, float], ...]
"""Sizes, rising, and seconds of one stage. A larger size may take less: tiles of 32 rows on an M5 do."""

Seconds = Callable[[int], float]
"""Seconds of a decode step by its rows."""

_Lanes = tuple[int, "_Lanes"] | None  # the size of one lane, and the others


def between(times: Times, size: float) -> float:
    """The time of a size by those of others: on the line between two, and beyond the largest on the line
    through it and the largest of half its size, because the cost of rows rises in stairs. One time alone is
    that of every size."""
    if len(times) == 1:
        return times[0][1]
    after = bisect_left(times, size, key=itemgetter(0))
    if after < len(times):
        if times[after][0] == size:
            return times[after][1]
        (low, least), (high, most) = times[max(0, after - 1)], times[max(1, after)]
    else:
        high, most = times[-1]
        half = bisect_right(times, high / 2, key=itemgetter(0))
        low, least = times[max(0, half - 1)]
    return max(times[0][1], least + (most - least) * (size - low) / (high - low))


def round_seconds(sizes: Sequence[int], seconds: Seconds, stages: int, hop: float) -> float:
    """Seconds from a row's token to its next, with lanes of these sizes; 0 without lanes."""
    steps = [seconds(size) for size in sizes]
    return max(sum(steps), stages * (max(steps) + hop)) if steps else 0.0


def rounds_with_another(sizes: Sequence[int], seconds: Seconds, stages: int, hop: float) -> list[float]:
    """Seconds of a round if a row joins each of these lanes, in their order; a size of 0 is a new lane. Whole
    microseconds: alike rounds are equal."""
    steps = [seconds(size) if size else 0.0 for size in sizes]
    together, (second, longest) = sum(steps), sorted([0.0, 0.0, *steps])[-2:]
    found = []
    for size, own in zip(sizes, steps, strict=True):
        then, others = seconds(size + 1), second if own == longest else longest
        found.append(round(max(together - own + then, stages * (max(others, then) + hop)), 6))
    return found


def spreads(most: int, seconds: Seconds, stages: int, hop: float) -> list[tuple[int, ...]]:
    """The sizes of lanes for 0 to `most` rows, largest first.

    Of lanes whose steps take no longer than a bound those are found whose steps take least together (as coins
    for a sum), for one bound after another. The time is quadratic in `most`: 20 ms for 256 rows.
    """
    steps = [0.0, *(seconds(rows) for rows in range(1, most + 1))]
    together = [0.0, *(float("inf") for _ in range(most))]
    cut: list[tuple[int, _Lanes]] = [(0, None) for _ in range(most + 1)]  # number of lanes, and their sizes
    least = [float("inf")] * (most + 1)
    best: list[_Lanes] = [None] * (most + 1)
    for size in sorted(range(1, most + 1), key=steps.__getitem__):
        own = steps[size]
        longest = stages * (own + hop)
        for rows in range(size, most + 1):
            if together[rows - size] + own <= together[rows]:
                count, others = cut[rows - size]
                together[rows] = together[rows - size] + own
                cut[rows] = count + 1, (size, others)
            round_ = max(together[rows], longest)
            count, lanes = cut[rows]
            shorter = round_ < least[rows] * (1 - ALIKE)
            if shorter or (round_ <= least[rows] * (1 + ALIKE) and count >= stages):
                least[rows] = min(least[rows], round_)
                best[rows] = lanes
    return [_evened(_sizes(lanes), seconds, stages, hop) for lanes in best]


def _sizes(lanes: _Lanes) -> Iterable[int]:
    while lanes is not None:
        size, lanes = lanes
        yield size


def _evened(lanes: Iterable[int], seconds: Seconds, stages: int, hop: float) -> tuple[int, ...]:
    """Evens sizes out, so that they differ by one at most, unless that makes the round longer."""
    sizes = tuple(sorted(lanes, reverse=True))
    if not sizes:
        return sizes
    each, over = divmod(sum(sizes), len(sizes))
    even = (each + 1,) * over + (each,) * (len(sizes) - over)
    uneven = round_seconds(sizes, seconds, stages, hop)
    return even if round_seconds(even, seconds, stages, hop) <= uneven * (1 + _ROUNDING) else sizes
