"""Finds the member of a ring that has become slow: throttled, swapping, or in a low power mode.

Every member executes the same steps, so what a step takes one member against the others depends neither on
the load nor on how long the prompts are. It changes when one of the machines does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Set
from statistics import median

READINGS = 12
"""Heartbeats with steps that make a measurement: about a minute of work."""

SLOW = 2.0
"""From this many times what its steps took before, against the others', a member counts as slow: policy, well
above what other programs and kinds of answers make of it for a while."""

SHUN_SECONDS = 3600.0
"""How long a member that was slow takes nobody's place: what is hot or swaps now may do so again soon."""


class Pace:
    """Of one ring, for as long as its members have the same layers."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._usual: dict[str, float] = {}
        self._shares: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=READINGS))

    def beaten(self, member: str, step_us: int, members: int) -> None:
        """A member says what steps take it, microseconds; 0 while it has too few of them."""
        changed = bool(step_us) and self._newest.get(member) != step_us
        self._newest[member] = step_us
        others = [took for other, took in self._newest.items() if other != member and took]
        if not changed or not others or len(others) < members - 1:
            return
        shares = self._shares[member]
        shares.append(step_us / median(others))
        if member not in self._usual and len(shares) == READINGS:
            self._usual[member] = median(shares)
            shares.clear()

    def slow(self, member: str) -> float:
        """How many times longer its steps take than they did, against the others'; 0 unless that is much."""
        shares = self._shares.get(member, ())
        if len(shares) < READINGS:  # the first so many have become what is usual
            return 0.0
        factor = median(shares) / self._usual[member]
        return factor if factor >= SLOW else 0.0


class Shunned:
    """The members that have been slow lately, and who may stand in a ring in their place."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def note(self, slow: Collection[str], now: float) -> None:
        """These members are slow now."""
        self._until = {one: until for one, until in self._until.items() if now < until}
        self._until.update(dict.fromkeys(slow, now + SHUN_SECONDS))

    def over(self, stages: Collection[str], slow: Set[str], free: Set[str]) -> frozenset[str]:
        """Of the `free` nodes those over which a ring may be planned anew without its `slow` members.

        Nobody while they do not make a ring of as many stages: a slow ring is better than a smaller one.
        """
        staying = frozenset(stages) - slow
        over = frozenset(free) - slow - (self._until.keys() - staying)
        return over if slow and staying <= over and len(over) >= len(stages) else frozenset()
