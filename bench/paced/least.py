"""The least that has to be computed again of conversations' prefixes, for the order in which turns ran.

What is needed furthest in the future is given up first (Belady 1966, "A study of replacement algorithms for
virtual-storage computers"), token by token from the end of a conversation. No cache can know the future.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Turn:
    """A turn of a conversation: when its row had memory and when it ended, the tokens that were `reserved`,
    those of its prompt, and how many of these the turn before had as well."""

    begin: float
    end: float
    conversation: int
    reserved: int
    prompt: int
    before: int


def least_again(turns: Iterable[Turn], memory: int) -> int:
    """Tokens of `before` that are computed again with memory for `memory` tokens: of rows, which come first,
    and of conversations, of which each is held for itself."""
    ordered = sorted(turns, key=lambda turn: turn.begin)
    begins: dict[int, list[float]] = {}
    for turn in reversed(ordered):
        begins.setdefault(turn.conversation, []).append(turn.begin)
    running: list[tuple[float, int, Turn]] = []
    kept: dict[int, int] = {}
    again = 0

    def give_up() -> None:
        excess = sum(kept.values()) + sum(turn.reserved for *_, turn in running) - memory
        while excess > 0 and kept:
            last = max(kept, key=lambda one: begins[one][-1] if begins[one] else inf)
            gone = min(excess, kept[last])
            kept[last] -= gone
            excess -= gone
            if not kept[last]:
                del kept[last]

    for number, turn in enumerate(ordered):
        while running and running[0][0] <= turn.begin:
            _, _, ended = heapq.heappop(running)
            kept[ended.conversation] = ended.prompt
            give_up()
        begins[turn.conversation].pop()
        again += max(0, turn.before - kept.pop(turn.conversation, 0))
        heapq.heappush(running, (turn.end, number, turn))
        give_up()
    return again
