"""Marks: the lengths at which a kept prefix can be cut though its caches cannot, because members have kept
their windows and states as they were there."""

from __future__ import annotations

from collections.abc import Iterable

MOST = 16
"""Lengths of one prefix, its end among them. Each costs memory: the windows and states of all layers."""

NEWEST = 4
"""The longest are always among them, up to half: a conversation parts near its end most often, where a
message is edited or a template leaves out what was thought."""


def thinned(lengths: Iterable[int], most: int = MOST) -> list[int]:
    """At most `most` of these lengths, rising: the longest, and of the others those without which gaps would
    grow most."""
    left = sorted(lengths)
    newest = max(1, min(NEWEST, most // 2))
    while len(left) > most:
        begins = [0, *left]
        del left[min(range(len(left) - newest), key=lambda at: left[at + 1] - begins[at])]
    return left
