"""Prefill in every round: as many tokens as keep rounds within their allowed length.

The cost is measured, by rounds with a number of tokens against rounds without any. It cannot be extrapolated:
stages that idle for a part of the time do some prefill for nothing, and a step has a fixed cost. So larger
numbers are tried in a round now and then: at first twice as many, until that is too much, later a few more
than usual. Where a step of many tokens may cost as much as one of few, twice as many is tried again for as
long as it works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import median

DEAR = 1.25
"""How many times too long a single token may make rounds where rows are computed in turn: half of their own
time instead of a share of 0.4. For less, prefill would be saved up, and some tokens come very late."""

_FEW = 2
"""Rounds that are measured while a new number of tokens is tried."""

_FAR = 2.0
"""A single round that is this many times too long is enough to give up."""

_SOME = 24
"""Rounds needed to know what they usually take; fewer could be one disturbed moment of all lanes."""

_ENOUGH = 64
"""Rounds needed to know the 95th percentile."""

_MOST = 0.95
_TOLERATED = 1.05  # times what is allowed, for most
_ALIKE = 8  # a round tells of other tokens that differ by less than an eighth


class EvenShare:
    """Tokens of a round, whatever number of steps they make; 0 where it is not tried, or does not go."""

    def __init__(self, most: int, rows_in_turn: bool = False) -> None:
        """`most` is what a round can have.

        `rows_in_turn` is as of RingFacts: a single token may be `DEAR` there. Elsewhere twice as many tokens
        may well cost the same, so that is what is tried, one time after the other as long as it goes.
        """
        self.tokens = 0
        self.trying = False
        """Whether it goes into some rounds only, to see how much there may be."""
        self._most = most
        self._dear = DEAR if rows_in_turn else 1.0
        self._doubles = not rows_in_turn
        self._doubling = False
        self.growing = False
        """Whether twice as many went the last time, so that it is worth while to try that soon again."""
        self._usual: deque[float] = deque(maxlen=_ENOUGH)
        self._more: deque[float] = deque(maxlen=_ENOUGH)
        self._fitted = (0, 0.0)  # tokens, and by how much they made rounds longer

    def begin(self, tokens: int) -> None:
        self.trying, self._fitted = True, (0, 0.0)
        self._doubling = self.growing = False
        self.tokens = 0
        self._set(max(1, tokens))

    def begin_anew(self) -> None:
        """Rounds are other than they were."""
        if self.tokens:
            self.begin(self.tokens // 2)

    @property
    def more(self) -> int:
        """What is tried now and then."""
        if self._doubling:
            return min(2 * self.tokens, max(self._most, self.tokens + 1))
        return self.tokens + max(1, self.tokens // _ALIKE)

    @property
    def longer(self) -> float:
        """By how many seconds rounds are longer; 0 while it is tried, and where too few have been seen."""
        return median(self._usual) if len(self._usual) >= _SOME and not self.trying else 0.0

    def measure(self, tokens: int, longer: float, allowed: float, spread: float) -> None:
        """A round with so many tokens was longer than one without usually is, by so many seconds.

        It may be by `allowed`, and most of those without are by no more than `spread`.
        """
        if _alike(tokens, self.tokens):
            self._usual.append(longer)
        elif not self.trying and _alike(tokens, self.more):
            self._more.append(longer)
        else:
            return
        if self.trying:
            self._try(allowed)
        else:
            self._follow(allowed, spread)

    def _try(self, allowed: float) -> None:
        fitted, before = self._fitted
        longer = median(self._usual)
        if len(self._usual) < self._needed(longer / max(allowed, 1e-9)):
            return
        if self.tokens == 1:
            allowed *= self._dear
        if longer > allowed:
            part = max(0.0, allowed - before) / max(longer - before, longer - allowed)
            self.trying, self._doubling = False, self._doubles
            self._set(fitted + int(part * (self.tokens - fitted)))
            return
        next_tokens = 2 * self.tokens
        if fitted and longer > before:
            each = (longer - before) / (self.tokens - fitted)
            next_tokens = min(next_tokens, int(self.tokens + (allowed - longer) / each))
        next_tokens = min(next_tokens, self._most)
        if next_tokens < self.more:
            self.trying, self._doubling = False, self._doubles
        else:
            self._fitted = self.tokens, longer
            self._set(next_tokens)

    def _needed(self, times: float) -> int:
        """Rounds that tell while it is tried, where they are so many times longer than they may get."""
        if self.tokens > 1 or times <= 1:
            return _FEW
        return 1 if times > _FAR else 4 * _FEW

    def _follow(self, allowed: float, spread: float) -> None:
        if len(self._usual) < _SOME:
            return
        longer = usual = median(list(self._usual)[-_SOME:])
        enough = len(self._usual) == _ENOUGH
        if enough:
            longer = max(usual, (most_take(self._usual) - spread) / _TOLERATED)
        if longer > allowed and self.tokens > 1:
            self._doubling = self.growing = False
            self._set(max(1, min(self.tokens - 1, int(self.tokens * allowed / longer))))
        elif enough and median(self._usual) > self._dear * allowed:
            self._set(0)
        elif len(self._more) >= 3 * _FEW:
            if longer + median(self._more) - usual <= allowed:
                self.growing = self._doubling
                self._set(min(self._most, self.more))
            elif self._doubling:
                self._doubling = self.growing = False
                self._more.clear()

    def _set(self, tokens: int) -> None:
        if tokens != self.tokens:
            self.tokens = tokens
            self._usual.clear()
            self._more.clear()


def most_take(seconds: Collection[float]) -> float:
    """The 95th percentile."""
    return sorted(seconds)[int(_MOST * (len(seconds) - 1))]


def _alike(tokens: int, others: int) -> bool:
    return abs(tokens - others) * _ALIKE < others
