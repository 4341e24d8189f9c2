"""Marks: the lengths at which a kept prefix can be cut though its caches cannot, because members have kept
their windows and states as they were there."""

from __future__ import annotations

from collections.abc import Iterable

MOST = 16
"""Lengths of one prefix, its end among them. Each costs memory: the windows and states of all layers."""


def thinned(lengths: Iterable[int], most: int = MOST) -> list[int]:
    """At most `most` of these lengths, rising, the longest among them: those without which the gaps grow
    least are left out."""
    left = sorted(lengths)
    while len(left) > most:
        begins = [0, *left]
        del left[min(range(len(left) - 1), key=lambda at: left[at + 1] - begins[at])]
    return left
