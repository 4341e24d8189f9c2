"""How much prefill running rows are made to bear, by what it has been seen to cost them.

What a client sees is a lane's round: the time from one of its steps to its next. A prefill step in between
makes that round longer, by the time that its chunks take in the slowest stage: so rounds with and without one
tell what chunks of a size cost, whatever the stages, the links and the model are.

Prefill may make rounds longer by `SHARE` in the mean. Where the smallest chunk keeps to that, every round has
chunks of that much, and no token is later than by that share. Where it does not (a chunk may cost about as
much as a whole step, however short it is), that much is saved up over `SPREAD` rounds and spent in one: less
than one token in twenty is late, and prompts are prefilled as fast as in small portions, or faster. While
many requests wait for every row that runs, the share grows, and at last prefill goes ahead: an even stream is
worth less to a few than an early first token to many, and a ring that fills up slowly does little.
"""

from __future__ import annotations

from collections import deque
from math import inf
from statistics import median

SHARE = 0.35
"""Part of a round's own time by which prefill may make it longer."""

CROWD = 0.5
"""Waiting prompts for every row that runs with which prefill goes ahead, a whole chunk in every round."""

SMALLEST = 4
"""Tokens of the shortest chunk beside running rows."""

SPREAD = 24
"""Rounds over which the share is saved up where it is too small for one."""

_FIRST_ROUNDS = 4
"""Rounds announced before any chunk goes beside running rows; the second of them has then been measured."""

CLEAN_EVERY = 16
"""Rounds with prefill after which one is left without, so that it is known how long one takes by itself."""

_SAMPLES = 9
_WHOLE = 1 - 1e-6  # a round, summed up from its lanes' parts
_FORGET = 0.985


class PrefillBudget:
    """Seconds in, tokens out. `largest` is the most that a prefill step may have, all its rows together."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._smallest = min(SMALLEST, largest)
        self._sizes = [self._smallest]
        while self._sizes[-1] < largest:
            self._sizes.append(2 * self._sizes[-1])
        self._own: deque[float] = deque(maxlen=2 * _SAMPLES)
        self._costs: dict[int, deque[float]] = {}
        self._measured_at: dict[int, int] = {}
        self._windows = 0
        self._since_clean = 0
        self._window_ends = float(_FIRST_ROUNDS)
        self._saved = False
        self._left = 0.0
        self._opened = -1.0
        self._size = 0

    def measure(self, seconds: float, steps: int, tokens: int) -> None:
        """A lane's round took so long, with so many prefill steps of so many tokens together in it."""
        if not steps:
            self._own.append(seconds)
            self._since_clean = 0
        elif self._own:
            size = self._bucket(-(-tokens // steps))
            self._costs.setdefault(size, deque(maxlen=_SAMPLES)).append((seconds - self._round()) / steps)
            self._measured_at[size] = self._windows
            self._measured_at.setdefault(2 * size, self._windows)

    def tokens(self, rounds: float, crowd: float) -> int:
        """The most tokens that a prefill step may have now; 0: none yet.

        `rounds` have been announced so far in the epoch; `crowd` is how many prompts wait for every row that
        runs, besides the first, where one of several chunks counts for as little as a chunk does for it.
        """
        if crowd >= CROWD:
            return self._go_ahead(rounds) if rounds >= self._opened + _WHOLE else 0
        if rounds >= self._window_ends:
            if not self._own:  # answers of a token or two: nothing to measure, nobody to disturb
                return self._go_ahead(rounds)
            self._open(rounds, SHARE * max(1.0, (4 * crowd) ** 2))
        elif rounds > self._opened or self._cost(self._size) >= self._left:
            return 0
        return min(self._size, self._largest)

    def _go_ahead(self, rounds: float) -> int:
        """Everything in one step, and the next in the next round."""
        self._opened, self._window_ends, self._left = rounds, rounds + 1, 0.0
        return self._largest

    def spend(self, tokens: int) -> None:
        """A prefill step with so many tokens is announced."""
        size = self._bucket(tokens)
        more = size in self._costs and (self._saved or size >= self._largest)
        self._left -= self._cost(size) if more else self._left

    def _open(self, rounds: float, share: float) -> None:
        """Begins a window: of one round, or of as many as the share is saved up over.

        All that it has is spent at its beginning, in steps of one size: several where no longer chunk is
        allowed, or to fill the pipeline with what was saved up.
        """
        self._opened, self._size = rounds, 0
        self._windows += 1
        self._since_clean += 1
        if self._since_clean > CLEAN_EVERY:
            self._since_clean = 0
            self._window_ends = rounds + 1
            return
        once = share * self._round()
        self._saved = self._cost(self._smallest) > once
        self._left = once * (SPREAD if self._saved else 1)
        self._size = max(
            size for size in self._sizes if size == self._smallest or self._cost(size) <= self._left
        )
        tried = self._size in self._costs
        if self._saved and not tried:  # only as long as it takes to pay for it
            self._window_ends = rounds + min(SPREAD, self._cost(self._size) / max(once, 1e-9))
        else:
            self._window_ends = rounds + (SPREAD if self._saved else 1)

    def _round(self) -> float:
        return median(self._own)

    def _cost(self, size: int) -> float:
        """Seconds by which a prefill step of this size is believed to make a round longer.

        A size that was never measured is believed to cost twice what half of it does, which is the most that
        it can. What is not measured any more is believed less and less, and so tried again.
        """
        samples = self._costs.get(size)
        if samples:
            cost = max(0.0, sorted(samples)[len(samples) * 3 // 4])
        elif size <= self._smallest:
            return 0.0
        elif size // 2 in self._costs:
            cost = 2 * self._cost(size // 2)
        else:
            return inf
        return cost * max(0.5, _FORGET ** (self._windows - self._measured_at[size]))

    def _bucket(self, tokens: int) -> int:
        """The size as which a step of so many tokens is counted."""
        return next(size for size in self._sizes if size >= min(tokens, self._sizes[-1]))
