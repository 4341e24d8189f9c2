"""How much prefill running rows are made to bear, by what it has been seen to cost them.

What a client sees is a lane's round: the time from one of its steps to its next. Prefill steps in between
make that round longer, so rounds with and without them tell what they cost, whatever the stages, the links
and the model are.

Prefill may make rounds longer by a share of what one takes by itself. Where a few tokens cost less, every
round has as many as keep to it, and no token is later than by that (gateway.scheduler.even). Where they do
not (a step of a few tokens may cost as much as a decode step), or where little steps would be mostly fixed
cost, that much is saved up over `SPREAD` rounds and spent in one: less than one token in twenty is late.

A step that takes longer than a lane's own holds up what follows it in every stage that it passes, while
several short ones follow each other through the pipeline. So steps that go together are as short as their
fixed cost allows (gateway.scheduler.chunkcost): `alone` says how short.
"""

from __future__ import annotations

from collections import deque
from math import ceil, sqrt
from statistics import median

from gateway.scheduler.chunkcost import ChunkCost
from gateway.scheduler.even import EvenShare

SHARE = 0.37
"""Part of a round's own time by which prefill makes it longer, other than for a crowd of short prompts."""

SPREAD = 28
"""Rounds over which the share is saved up where it is too small for one."""

FIRST_ROUNDS = 4
"""Rounds announced before any chunk goes beside running rows; the second of them has then been measured."""

CLEAN_EVERY = 16
"""Rounds with prefill after which one is left without, so that it is known how long one takes by itself."""

CHANGED_CLEAN_EVERY = 4
"""The same where other numbers of rows run than when that was last seen."""

PROBE_EVERY = 96
"""Rounds with little prefill after which one has twice as much, to see what it costs."""

TRIED_EVERY = 3.0
"""Rounds between little prefills before it was seen that rounds bear them."""

EVEN = 0.25
"""A little in every round is preferred to much in a few if it is believed to be this much as fast."""

_RETRY_ROUNDS = 500
_SAMPLES = 24
_WHOLE = 1e-6  # of a round, summed up from its lanes' parts
_SURELY = 0.8  # of what is allowed, for what is only believed
_OTHER = 0.25  # of the rows that ran
_HIDDEN = 0.5  # of a lane's part of a round


class PrefillBudget:
    """Seconds in, tokens out. `largest` is the most that a prefill step may have, all its rows together."""

    def __init__(self, largest: int, stages: int) -> None:
        self.cost = ChunkCost()
        self._even = EvenShare()
        self._largest = largest
        self._stages = stages
        self._own: deque[float] = deque(maxlen=_SAMPLES)
        self._since_clean = 0.0
        self._opened = -1.0
        self._window_ends = float(FIRST_ROUNDS)
        self._share = SHARE
        self._steps = 0
        self._size = 0
        self._retry_even = 0.0
        self._probe_at = 0.0
        self._rows = 1

    def measure(self, seconds: float, steps: int, tokens: int, rows: int = 1) -> None:
        """A lane's round took so long, with so many prefill steps of so many tokens together in it.

        So many rows run in all lanes.
        """
        seconds = max(0.0, seconds)
        if not steps:
            if abs(rows - self._rows) > _OTHER * self._rows:
                self._own.clear()
                self._rows = rows
            self._own.append(seconds)
            self._since_clean = 0.0
        elif self._own:
            longer = seconds - self._round()
            self._even.measure(longer, tokens)
            if tokens != self._even.tokens or longer > SHARE * self._round():
                self.cost.add(tokens / steps, self._step_seconds(longer, steps))

    def alone(self, tokens: int, rows: int) -> int:
        """The tokens of a prefill step where so many, of so many prompts, have to go and nothing else does.

        k steps of c seconds are through N stages after (k + N - 1) c, and the prompts that end with them
        after about (k / 2 + N - 1/2) c in the mean; both are least for steps whose fixed costs together are
        as much as the rest of those that fill the pipeline. Short prompts are not cut while others wait.
        """
        turns = self._stages - 1 if rows == 1 else 2 * self._stages - 1
        if not turns:
            return self._largest
        ratio = self.cost.ratio
        least = ratio if rows == 1 else max(ratio, tokens / rows)  # whole prompts, where there are several
        return max(1, min(self._largest, ceil(max(least, sqrt(tokens * ratio / turns)))))

    def tokens(self, rounds: float, lanes: int, share: float, todo: tuple[int, int], rows: int = 1) -> int:
        """The most tokens that a prefill step may have now; 0: none yet.

        `rounds` have been announced so far in the epoch; so many lanes run, with so many rows. `share` is how
        much longer rounds may get; `todo` is as of `alone`.
        """
        if abs(rows - self._rows) > _OTHER * self._rows and self._since_clean >= CHANGED_CLEAN_EVERY:
            self._since_clean = CLEAN_EVERY
        if rounds >= self._window_ends - _WHOLE or share > 2 * self._share:
            self._open(rounds, lanes, share, todo)
        elif rounds > self._opened:
            return 0
        return self._size if self._steps else 0

    def spend(self) -> None:
        """A prefill step is announced."""
        self._steps = max(0, self._steps - 1)

    def _open(self, rounds: float, lanes: int, share: float, todo: tuple[int, int]) -> None:
        """Begins a window: a part of a round, or as many rounds as the share is saved up over.

        All that it has is spent at its beginning.
        """
        self._opened, self._share = rounds, share
        if not self._own:  # answers of a token or two: nothing to measure, nobody to disturb
            self._set(1.0, self.alone(*todo), 1)
        elif self._since_clean >= CLEAN_EVERY:
            self._set(1.0, 0, 0)
            self._since_clean = 0.0
        elif share > SHARE:
            self._ahead(lanes, share * self._round(), self.alone(*todo))
        elif not self._little(lanes, SHARE * self._round()):
            self._save(SHARE * self._round() * SPREAD)

    def _set(self, window: float, size: int, steps: int) -> None:
        self._window_ends = self._opened + window
        self._since_clean += window
        self._size, self._steps = size, steps

    def _ahead(self, lanes: int, seconds: float, most: int) -> None:
        """As much as a larger share allows by what steps are believed to cost."""
        self._even.stop()
        if not self.cost.known:
            self._set(1.0, most, 1)
            return
        divided = [(parts, *self._burst(seconds / parts, most)) for parts in _parts(lanes)]
        parts, size, steps = max(divided, key=lambda each: each[0] * each[1] * each[2])
        self._set(1 / parts if size else 1.0, size or 1, steps)

    def _little(self, lanes: int, seconds: float) -> bool:
        """A little in every round, if that is possible and not much slower than to save up."""
        even = self._even
        if not even.tokens:
            if self._opened < self._retry_even or not self._begin_even(seconds):
                return False
        elif not even.judge(seconds, lanes, self._largest * lanes):
            if not (even.fresh and self._begin_even(seconds)):
                return self._give_up()
        elif even.settled and self._slow(even.tokens, seconds):
            return self._give_up()
        tokens = even.tokens
        # a step that takes longer than a lane's holds up what follows it in every stage
        wanted = min(ceil(self._stages * SHARE), tokens // max(1, ceil(self.cost.ratio)))
        wanted = max(1, wanted, -(-tokens // self._largest))
        parts = max(part for part in _parts(lanes) if part <= wanted)
        size = min(self._largest, tokens // parts)
        even.tokens = parts * size
        if even.settled and self._opened >= self._probe_at:
            self._probe_at = self._opened + PROBE_EVERY
            self._set(1.0, min(self._largest, 2 * tokens), 1)
        elif even.fresh:
            self._set(TRIED_EVERY, size, parts)
        else:
            self._set(1 / parts, size, 1)
        return True

    def _begin_even(self, seconds: float) -> bool:
        """Begins with a third of what is believed to be possible, and less than was tried."""
        believed = self.cost.within(_SURELY * seconds, self._largest) if self.cost.known else 1
        if self._slow(believed, seconds) or 0 < self._even.tokens <= believed:
            return False
        self._even.begin(believed // 3)
        return True

    def _give_up(self) -> bool:
        self._even.stop()
        self._retry_even = self._opened + _RETRY_ROUNDS
        return False

    def _slow(self, tokens: int, seconds: float) -> bool:
        size, steps = self._saved(seconds * SPREAD)
        return not tokens or tokens < EVEN * size * steps / SPREAD

    def _save(self, seconds: float) -> None:
        size, steps = self._saved(seconds)
        self._set(float(SPREAD), size, steps)

    def _saved(self, seconds: float) -> tuple[int, int]:
        """Tokens of a step, and steps, that are worth so many seconds."""
        if not self.cost.known:
            return 1, 1
        _, each = self.cost.line()
        size, steps = self._burst(seconds, self.alone(min(int(seconds / max(each, 1e-9)), 1 << 20), 1))
        # where no step costs so little, one with as many tokens as double its cost
        return (size, steps) if size else (max(1, min(self._largest, int(self.cost.ratio))), 1)

    def _burst(self, seconds: float, most: int) -> tuple[int, int]:
        """Tokens of a step, and steps, that make a round longer by so much when they go at once."""
        part = self._round() / self._stages
        one = seconds if seconds <= part else (seconds + (self._stages - 1) * part) / self._stages
        size = self.cost.within(one, most)
        if size < most:
            return size, 1
        each = max(self.cost.seconds(size), 1e-9)
        return size, max(1, int((seconds - (self._stages - 1) * max(0.0, each - part)) / each))

    def _step_seconds(self, longer: float, steps: int) -> float:
        """What one of so many steps took in a stage that together made a round so much longer."""
        part = self._round() / self._stages
        if longer <= steps * part:  # a part of it may be hidden where stages wait for others
            return max(longer / steps, _HIDDEN * part)
        return (longer + (self._stages - 1) * part) / (steps + self._stages - 1)

    def _round(self) -> float:
        return median(self._own)


def _parts(lanes: int) -> list[int]:
    """Into how many equal parts a round of so many lanes may be divided."""
    powers = [1 << power for power in range(max(1, lanes).bit_length())]
    return [parts for parts in sorted({*powers, max(1, lanes)}) if lanes % parts == 0]
