"""What prompts take by figures on a ring that does nothing else: each alone, and those that come together."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench.paced.figures import StageTime

_MOST_CHUNKS = 64
_LEAST = 1e-9


class Alone(NamedTuple):
    """Seconds of a prompt: those in which the slowest stage computes it, and all until it is through."""

    busy: float
    whole: float


def alone(stages: Sequence[StageTime], hops: float, new: int, cached: int) -> Alone:
    """`new` tokens behind `cached` ones with the best number of equal chunks; `hops` are the seconds of all
    hops of a step."""

    def through(chunks: int) -> Alone:
        size = -(-new // chunks)
        behind = [cached + number * size for number in range(chunks)]
        longest = [max(one.step(1, size, context) for one in stages) for context in behind]
        return Alone(sum(longest), sum(longest) + (len(stages) - 1) * longest[-1] + hops)

    return min(map(through, range(1, min(new, _MOST_CHUNKS) + 1)), key=lambda each: each.whole)


def together(prompts: Iterable[tuple[float, Alone]]) -> list[float]:
    """Times of its `whole` that each prompt takes, with the moments at which they come.

    The slowest stage always computes the prompt with the least left (SRPT, which has the shortest mean wait:
    Schrage 1968), and nothing decodes. So no schedule has much shorter waits.
    """
    coming = sorted(enumerate(prompts), key=lambda each: each[1][0], reverse=True)
    waiting: list[tuple[float, int, float, Alone]] = []
    taken = [0.0] * len(coming)
    now = 0.0
    while waiting or coming:
        if not waiting:
            now = max(now, coming[-1][1][0])
        while coming and coming[-1][1][0] <= now:
            place, (at, prompt) = coming.pop()
            heapq.heappush(waiting, (prompt.busy, place, at, prompt))
        left, place, at, prompt = heapq.heappop(waiting)
        most = coming[-1][1][0] - now if coming else math.inf
        now += min(left, most)
        if left - most > _LEAST:
            heapq.heappush(waiting, (left - most, place, at, prompt))
        else:
            taken[place] = (now - at + prompt.whole - prompt.busy) / prompt.whole
    return taken
