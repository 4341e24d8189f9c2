"""How far the members of a ring are that forms: one share over all of them, which never falls."""

from __future__ import annotations

from collections.abc import Container, Mapping

from sealring.mesh.system.pace import FETCHING, LOADING, STARTING, Reached

_ORDER = (STARTING, FETCHING, LOADING)
"""What a member does, in this order; anything else comes after it."""


class Forming:
    """Takes in what members report. A member fetches first what it lacks of its weights, then loads them.

    The share counts the bytes to fetch and those to load. It is 0 until it is known for all members how much
    they fetch, as else it would fall.
    """

    def __init__(self, weights: Mapping[str, int], share: float = 0.0) -> None:
        """`weights` are the bytes of each member's stage, and `share` is that of an earlier epoch which did
        not come to serve."""
        self._weights = weights
        self._fetched: dict[str, Reached] = {}
        self._share = share
        self.reached: dict[str, Reached] = {}

    def take(self, member: str, reached: Reached) -> None:
        """A member is so far."""
        self.reached[member] = reached
        if reached.what == FETCHING and reached.total:
            self._fetched[member] = reached

    def slowest(self, prepared: Container[str]) -> tuple[str, Reached]:
        """The member for which the others have the longest to wait, and how far it is."""
        waited = [member for member in self._weights if member not in prepared] or [*self._weights]
        return min(((member, self.reached.get(member, Reached(STARTING))) for member in waited), key=_place)

    def share(self, prepared: Container[str]) -> float:
        """The part of all members' work that is done, 0 to 1: the most that there was."""
        done = total = 0.0
        for member, weights in self._weights.items():
            reached = self.reached.get(member, Reached(STARTING))
            ready = member in prepared or reached.what not in _ORDER
            if not ready and (reached.what == STARTING or (reached.what == FETCHING and not reached.total)):
                return self._share
            fetched = self._fetched.get(member, Reached(FETCHING))
            here = fetched.done if reached.what == FETCHING and not ready else fetched.total
            loaded = 1.0 if ready else reached.share if reached.what == LOADING else 0.0
            done, total = done + here + loaded * weights, total + fetched.total + weights
        self._share = max(self._share, min(1.0, done / total)) if total else self._share
        return self._share


def _place(one: tuple[str, Reached]) -> tuple[int, bool, int, float]:
    """Small for a member that is far from its end."""
    reached = one[1]
    place = _ORDER.index(reached.what) if reached.what in _ORDER else len(_ORDER)
    return place, bool(reached.total), -reached.seconds_left, reached.share
