"""Layers to ranks: largest remainder by memory or speed, repaired to the nearest assignment that fits.

Pure integer arithmetic. The largest remainder (Hamilton's method) says what a fair share is; layers of
unequal size, the embedding and the head then move boundaries, as little as possible, until every rank fits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

_FINE = 1 << 20
"""Steps in which speeds are counted, as shares of the fastest."""


def largest_remainder(seats: int, weights: Sequence[int]) -> list[int]:
    """Share `seats` in proportion to `weights`, at least one each; equal weights when all are zero.

    Ties go to the lower rank. Needs 1 <= len(weights) <= seats.
    """
    weights = [max(0, weight) for weight in weights]
    if not any(weights):
        weights = [1] * len(weights)
    total = sum(weights)
    shares = [seats * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (-(seats * weights[rank] % total), rank))
    for rank in by_remainder[: seats - sum(shares)]:
        shares[rank] += 1
    while 0 in shares:
        shares[shares.index(max(shares))] -= 1
        shares[shares.index(0)] += 1
    return shares


def apportion(
    layers: Sequence[int],
    extras: Sequence[int],
    capacities: Sequence[int],
    speeds: Sequence[float] = (),
    head: int = 1,
) -> list[int] | None:
    """How many consecutive layers each rank takes, or None when nothing fits in this order.

    `layers` are bytes per layer, `extras` and `capacities` bytes per rank. Every rank gets at least one
    layer, the first rank at least `head`, and none more bytes than its capacity. The largest remainder, by
    memory or where they are given by `speeds`, is kept where it fits; else the result is the fitting one
    whose boundaries lie nearest to it.
    """
    room = [capacity - extra for capacity, extra in zip(capacities, extras, strict=True)]
    if len(room) > len(layers):
        return None
    prefix = [0, *accumulate(layers)]
    if not _reaches(prefix, room, head):
        return None
    fair = [round(_FINE * speed / max(speeds)) for speed in speeds]
    return nearest(prefix, room, list(accumulate(largest_remainder(len(layers), fair or room))), head)


def _reaches(prefix: list[int], room: list[int], head: int) -> bool:
    """Whether ranks that take all they can, one after the other, get to the last layer, and the first of
    them to `head` layers."""
    end = 0
    for rank, space in enumerate(room):
        end = max(end, bisect_right(prefix, prefix[end] + space) - 1)
        if rank == 0 and end < head:
            return False
    return end == len(prefix) - 1


def nearest(prefix: list[int], room: list[int], wanted: list[int], head: int = 1) -> list[int] | None:
    """The fitting boundaries with the least total distance from `wanted`; the lower ones on a tie. The first
    lies behind `head` layers or more."""
    count, ranks = len(prefix) - 1, len(room)
    # best[end]: least distance with the ranks so far covering layers [0, end), and where the last one starts
    best: dict[int, int] = {0: 0}
    came_from: list[dict[int, int]] = []
    for rank in range(ranks):
        reached: dict[int, int] = {}
        origin: dict[int, int] = {}
        starts: deque[int] = deque()  # of those that the rank may have: each nearer than all before it
        for end in range(1, count - (ranks - rank - 1) + 1):
            if end - 1 in best:
                while starts and best[starts[-1]] > best[end - 1]:
                    starts.pop()
                starts.append(end - 1)
            while starts and prefix[end] - prefix[starts[0]] > room[rank]:
                starts.popleft()
            if starts and (rank or end >= head):
                reached[end] = best[starts[0]] + abs(end - wanted[rank])
                origin[end] = starts[0]
        best = reached
        came_from.append(origin)
    if count not in best:
        return None
    ends = [count]
    for origin in reversed(came_from):
        ends.append(origin[ends[-1]])
    return [end - start for start, end in pairwise(reversed(ends))]
