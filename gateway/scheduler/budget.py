"""How many prompt tokens are prefilled beside rows that decode, by measuring how much that delays them.

What a client sees is a lane's round: the time from one of its decode steps to the next. Prefill steps in
between make the round longer, so the difference between rounds with and without them is what prefill costs,
whatever the stages, the links and the model are.

The target is the 95th percentile of the time between tokens: with prefill it is at most one and a half times
what it is without. Every round gets as many prompt tokens as keep to that (gateway.scheduler.even). There are
two exceptions: where even one prompt token is too much, because a step of few tokens may cost as much as a
decode step, and where such small steps would be mostly fixed cost. Then the allowance is saved up and spent
in one round of every `SPREAD`, so that less than one token in twenty is late.

A prefill step that takes longer than a decode step holds up everything behind it in every stage, while
several short ones follow each other through the pipeline. So steps that go together are as short as their
fixed cost allows (gateway.scheduler.chunkcost); `alone` says how short.
"""

from __future__ import annotations

from collections import deque
from math import ceil, sqrt
from statistics import median

from sealring.gateway.scheduler.chunkcost import ChunkCost
from sealring.gateway.scheduler.even import EvenShare, most_take

SHARE = 0.4
"""Part of a round's own time by which prefill makes it longer, other than for a crowd of short prompts."""

SAVED, SPREAD = 12.0, 32
"""Rounds' time that is spent in one where the share is too small for a step, and rounds until the next."""

CAUTIOUS = 1 / 8
"""Part of what is saved up that is spent at first after a little in every round, where rows are computed in
turn: a token at a prompt's end costs several times as much there as one at its beginning."""

FIRST_ROUNDS = 4
"""Rounds announced before any chunk goes beside running rows; the second of them has then been measured."""

CLEAN_EVERY = 40
"""Rounds with prefill after which one goes without, to measure how long a round takes by itself."""

CHANGED_CLEAN_EVERY = 4
"""The same when the number of running rows has changed since the last such round."""

TRIED_EVERY = 3.0
"""Rounds between small prefill steps while it is being found out how many tokens fit into a round."""

PROBE_EVERY, GROW_EVERY = 40, 8
"""One round in so many gets more prefill, to see whether that fits: usually, and for as long as it fits."""

EVEN = 0.1
"""A little prefill in every round is preferred to much in a few if its speed is at least this part of it."""

_SPREAD = 0.3  # of a round; what differs more was disturbed
_RETRY_ROUNDS, _MOST_ROUNDS = 64, 512  # until it is tried again whether a little goes, doubling
_SAMPLES, _LATEST = 64, 8
_AMISS = 1.5  # times what it was believed to take
_WHOLE = 1e-6  # of a round, summed up from its lanes' parts
_OTHER = 0.25  # of the rows that ran, or of what rounds took


class PrefillBudget:
    """Seconds in, tokens out. `largest` is the most that a prefill step may have, all its rows together.

    `rows_in_turn` is as of RingFacts: a token costs about as much as a row there, few of them little.
    Elsewhere a step of few tokens costs nearly as much as one of many.
    """

    def __init__(self, largest: int, stages: int, rows_in_turn: bool = False) -> None:
        self.cost = ChunkCost()
        self._most_parts = max(1, stages // 2)
        self._rows_in_turn = rows_in_turn
        self._even = EvenShare(self._most_parts * largest, rows_in_turn)
        self._largest = largest
        self._stages = stages
        self._own: deque[float] = deque(maxlen=_SAMPLES)
        self._round = self._spread = 0.0
        self._since_clean = 0.0
        self._opened = self._begins = -1.0
        self._window_ends = float(FIRST_ROUNDS)
        self._share = SHARE
        self._steps = 0
        self._size = 0
        self._retry_even = self._probe_at = 0.0
        self._wait = _RETRY_ROUNDS
        self._doubted = False
        self._saving, self._amiss = 1.0, 0.0
        self._rows = 1

    def measure(self, seconds: float, steps: int, tokens: int, rows: int = 1) -> None:
        """Takes in one round of a lane: how long it took, and how many prefill steps and tokens were in it.

        `rows` run in all lanes.
        """
        seconds = max(0.0, seconds)
        if not steps:
            if abs(rows - self._rows) > _OTHER * self._rows:
                self._own.clear()
                self._rows = rows
                self._even.begin_anew()
                self._retry_even, self._wait = 0.0, _RETRY_ROUNDS
            self._own.append(seconds)
            self._know()
            self._since_clean = 0.0
        elif self._own:
            longer = seconds - self._round
            if self._even.trying or tokens not in (self._even.tokens, self._even.more):
                self._tell(longer, steps, tokens)
            self._even.measure(tokens, longer, self._allowed, self._spread)

    @property
    def _allowed(self) -> float:
        """Seconds by which rounds may be longer. Where fewer tokens make them shorter slow moments do not
        count, for prefill is as slow in them."""
        return SHARE * (self._round if self._rows_in_turn else self._round + self._spread)

    def _know(self) -> None:
        """Updates what rounds take without prefill, and by how much most of them differ from that."""
        latest = list(self._own)[-_LATEST:]
        if abs(median(latest) - median(self._own)) > _OTHER * median(self._own):
            self._own = deque(latest, maxlen=_SAMPLES)  # the machine is not as it was
        self._round = median(self._own)
        self._spread = min(most_take(self._own) - self._round, _SPREAD * self._round)

    def _tell(self, longer: float, steps: int, tokens: int) -> None:
        """What one of so many steps took in a stage that together made a round so much longer.

        Of little steps a part may be hidden where stages wait for others, so they tell nothing otherwise.
        """
        others = self._stages - 1
        part = self._round / self._stages
        if longer > steps * part:
            took = (longer + others * part) / (steps + others)
            if self.cost.known:
                self._amiss = max(self._amiss, took / self.cost.seconds(tokens / steps))
            self.cost.add(tokens / steps, took)
        elif longer > self._allowed or not others:
            self.cost.add(tokens / steps, max(0.0, longer) / steps)

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

    def tokens(self, rounds: float, share: float, todo: tuple[int, int], rows: int = 1) -> int:
        """The most tokens that a prefill step may have now; 0: none yet.

        `rounds` have been announced so far in the epoch; so many rows run. `share` is how much longer rounds
        may get; `todo` is as of `alone`.
        """
        if abs(rows - self._rows) > _OTHER * self._rows and self._since_clean >= CHANGED_CLEAN_EVERY:
            self._since_clean = CLEAN_EVERY
        if rounds >= self._window_ends - _WHOLE or share > 2 * self._share:
            self._open(rounds, share, todo)
        elif rounds > self._opened:
            return 0
        return self._size if self._steps else 0

    def spend(self) -> None:
        """A prefill step is announced."""
        self._steps = max(0, self._steps - 1)

    def _open(self, rounds: float, share: float, todo: tuple[int, int]) -> None:
        """Begins a window: a part of a round, or the rounds over which the allowance is saved up.

        The whole allowance is spent at its beginning.
        """
        self._begins = self._window_ends if 0 <= rounds - self._window_ends < 1 else rounds
        self._opened, self._share = rounds, share
        if not self._own:  # answers of a token or two: nothing to measure, nobody to disturb
            self._set(1.0, self.alone(*todo), 1)
        elif self._since_clean >= CLEAN_EVERY:
            self._set(1.0, 0, 0)
            self._since_clean = 0.0
        elif not (share > SHARE and self._ahead(share, self.alone(*todo))) and not self._little():
            self._set(float(SPREAD), *self._spent())

    def _set(self, window: float, size: int, steps: int) -> None:
        self._window_ends = self._begins + window
        self._since_clean += window
        self._size, self._steps = size, steps

    def _ahead(self, share: float, most: int) -> bool:
        """As much in a round as a larger share allows by what steps are believed to cost, if that is much."""
        if not self.cost.known:
            self._set(1.0, most, 1)
            return True
        size, steps = self._burst(share * self._round, most)
        if self._slow(size * steps):
            return False
        self._set(1.0, size, steps)
        return True

    def _slow(self, tokens: int) -> bool:
        """Whether so many in every round are much fewer than what is saved up."""
        size, steps = self._saved()
        return not tokens or tokens < EVEN * size * steps / SPREAD

    def _little(self) -> bool:
        """Tokens for every round, if a little in each is possible and not much slower than saving up."""
        even = self._even
        if not even.tokens or (not even.trying and self._slow(even.tokens)):
            if self._opened < self._retry_even:
                return False
            if self._doubted:
                self._doubted = False
                self._set(2.0, 0, 0)
                return True
            self._try_even()
        tokens = even.tokens
        if not even.trying and self._opened >= self._probe_at:
            self._probe_at = self._opened + (GROW_EVERY if even.growing else PROBE_EVERY)
            self._wait = _RETRY_ROUNDS
            tokens = even.more
        useful = int(tokens / max(1.0, self.cost.ratio))
        parts = max(1, min(self._most_parts, useful), ceil(tokens / self._largest))
        size = min(self._largest, tokens // parts)
        if even.trying:
            self._set(TRIED_EVERY, size, parts)
        else:
            self._set(1 / parts, size, 1)
            self._saving = self._amiss = 0.0
        return True

    def _try_even(self) -> None:
        """Begins to try how much there may be in every round.

        Before it is tried another time, it is seen what rounds take by themselves now: they may be longer
        for a reason of their own.
        """
        self._even.begin(self.cost.within(self._allowed, self._largest) // 4 if self.cost.known else 1)
        self._doubted = True
        self._retry_even = self._opened + self._wait
        self._wait = min(2 * self._wait, _MOST_ROUNDS)

    def _spent(self) -> tuple[int, int]:
        """Tokens of a step, and steps, for what is saved up.

        Where rows are computed in turn, what is known of steps may be of when prompts had fewer tokens behind
        them, so after a little in every round it begins with a part, and goes on with twice as much unless
        that took longer than it should.
        """
        if not self._rows_in_turn:
            return self._saved()
        times = 2.0 if self._amiss < _AMISS else 1 / self._amiss
        self._saving, self._amiss = max(CAUTIOUS, min(1.0, times * self._saving)), 0.0
        return self._saved(self._saving)

    def _saved(self, part: float = 1.0) -> tuple[int, int]:
        """Tokens of a step, and steps, that are worth what is saved up, or a part of it."""
        seconds = part * SAVED * self._round / self._dearer
        if not self.cost.known:
            return 1, 1
        _, each = self.cost.line()
        size, steps = self._burst(seconds, self.alone(min(int(seconds / max(each, 1e-9)), 1 << 20), 1))
        # where no step costs so little, one with as many tokens as double its cost
        return (size, steps) if size else (max(1, min(self._largest, int(self.cost.ratio))), 1)

    @property
    def _dearer(self) -> float:
        """How much dearer a little in every round is than estimated, where few tokens are measured."""
        longer = self._even.longer if self._rows_in_turn else 0.0
        return max(1.0, longer / self.cost.seconds(self._even.tokens)) if longer and self.cost.known else 1.0

    def _burst(self, seconds: float, most: int) -> tuple[int, int]:
        """Tokens of a step, and steps, that make a round longer by so much when they go at once."""
        part = self._round / self._stages
        one = seconds if seconds <= part else (seconds + (self._stages - 1) * part) / self._stages
        size = self.cost.within(one, most)
        if not size:
            return 0, 1
        each = max(self.cost.seconds(size), 1e-9)
        return size, max(1, int((seconds - (self._stages - 1) * max(0.0, each - part)) / each))
