"""Prefill in every round: as many tokens as make a round longer by no more than its share.

What is measured is what counts: rounds with so many tokens, against rounds with none. Stages that wait for
others a part of the time do some prefill for nothing, and a step has a fixed cost, so what little costs says
nothing of what more would: it is tried, until it is too much, and again now and then.
"""

from __future__ import annotations

_ENOUGH = 4
"""Rounds of every lane before a number of tokens is judged; fewer do where it is far too many."""

_TOLERATED = 1.1  # times what is allowed
_FAR = 1.25
_ROOM = 0.5  # of what is allowed; with less there is room for many more
_LITTLE_LESS = 0.9
_RETRY = 30
"""Judgements after which it is tried again whether a little more is too much."""


class EvenShare:
    """Tokens of a round, whatever number of steps they make."""

    def __init__(self) -> None:
        self.tokens = 0
        self.settled = False
        self.fresh = False
        """Whether nothing is known yet of how it goes."""
        self._longer: list[float] = []
        self._too_many = 0
        self._judged = 0
        self._over = 0.0  # how many times too long rounds were when last judged, if they were

    def begin(self, tokens: int) -> None:
        self.tokens, self._too_many, self._judged, self.settled = max(1, tokens), 0, 0, False
        self._over, self.fresh = 0.0, True
        self._longer.clear()

    def stop(self) -> None:
        self.tokens = 0

    def measure(self, longer: float, tokens: int) -> None:
        """A round with so many tokens was so many seconds longer than one without."""
        if tokens == self.tokens:
            self._longer.append(longer)

    def judge(self, allowed: float, lanes: int, most: int) -> bool:
        """Adapts to so many seconds a round; False when that is not possible, or not with what was begun."""
        count = len(self._longer)
        if count < (lanes if self.fresh else _ENOUGH * lanes / 2):
            return True
        # a median would overlook the worse half
        times = sorted(self._longer)[count * 7 // 10] / max(allowed, 1e-9)
        if count < _ENOUGH * lanes and times < _FAR:
            return True
        self._longer.clear()
        self._judged += 1
        if times > _TOLERATED:
            if self.fresh or self.tokens == 1 or times > _LITTLE_LESS * self._over > 0:
                return False
            self._over = times
            self._too_many, self._judged = self.tokens, 0
            self.tokens = max(1, min(self.tokens - 1, int(self.tokens / times)))
            return True
        self._over, self.fresh = 0.0, False
        if times < 1:
            self._more(times, most)
        else:
            self.settled = True
        return True

    def _more(self, times: float, most: int) -> None:
        if self._judged >= _RETRY:
            self._too_many = self._judged = 0
        grown = self.tokens + 1 + self.tokens // (2 if times < _ROOM else 6)
        if self._too_many:
            grown = min(grown, (self.tokens + self._too_many) // 2)
        grown = min(grown, most)
        self.settled = grown <= self.tokens
        self.tokens = max(self.tokens, grown)
