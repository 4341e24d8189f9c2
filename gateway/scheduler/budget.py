"""The number of prompt tokens to prefill beside rows that decode, by the cost table (scheduler.facts).

A client sees a lane's round: the time from one of its decode steps to the next. Prefill steps in between make
it longer. Two goals conflict: a token takes at most `MOST` times its undisturbed time, and prompts take at
most `PROMPT` times as long as if nothing else ran.

A plan is a number of steps in every round and the length of their chunks. At the beginning of a round all
plans are compared, and the plan with the smallest worst miss is taken. A prompt waits for one round at most.
If many prompts wait for every row that runs, an early first token for them is worth more than an even stream
for the others. Short prompts beside few rows do not go by plans but have pauses, which are seldom: rounds
with up to a second of chunks, of the shortest prompt first. While nothing decodes, chunks have about the
length with which prompts are through soonest.

Measured rounds correct the table: rounds without prefill correct the cost of decode steps, rounds with it the
cost of prefill steps (which rises with the position in a prompt).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from sealring.gateway.scheduler.facts import StepCosts
from sealring.mesh.ring.spread import round_seconds

MOST = 1.4
"""Times its undisturbed length that a round may take. The goal is 1.5; a tenth is left for the variation of
rounds."""

PROMPT = 3.0
"""Times that prompts may take as long as alone."""

LONGEST = 1.0
"""Seconds of the longest chunk in a stage, if one token takes what it takes in the longest timed: a prompt
that comes waits for a chunk, and macOS ends what keeps a GPU for several seconds."""

NEAR = 1.05
"""Times that prompts alone may take as long as with the best length of chunks, for a shorter one: whatever
comes meanwhile waits for a chunk."""

STAIRS, SMOOTH = 64, 1.5
"""Tokens up to which a chunk has a length that was timed: kernels make stairs, and 12 tokens may take as long
as 32. Any length will do where a chunk of four takes SMOOTH times as long as one token: there each token
takes as long as the one before."""

CROWD = 6.0
"""Weight of each further prompt that waits, per row that runs."""

PAUSES, SELDOM = 6, 30
"""Pauses that are left at most, and rounds after which there is one more. The same work disturbs one token of
a row in a pause and a dozen by plans, so pauses this seldom do not show in the 95th percentile."""

FEW = 8
"""Rows up to which there are pauses. With more of them prompts come all the time, and pauses would make a
token late for too many rows."""

MANY = 16
"""Prefill steps in a round, and before the head, at most."""

_LENGTHS = (1, *(half << power for power in range(12) for half in (2, 3)))
_WEIGHT, _FURTHEST = 0.1, 10.0  # weight of one round in a mean; factor by which it may differ from the table
_WHOLE = 1e-6  # of a round, the rounding error of its lanes' parts


class Cut(NamedTuple):
    """A way to cut the waiting prompts: tokens of a chunk, chunks of all prompts, seconds of each in a
    stage."""

    size: int
    steps: int
    seconds: float


class PrefillBudget:
    """`longest` is the most tokens that a chunk may have."""

    def __init__(self, costs: StepCosts, longest: int, stages: int) -> None:
        self._costs = costs
        self._stages = stages
        timed, seconds = costs.tokens[-1]
        most = min(longest, max(timed, timed * LONGEST / seconds))
        known = {size for size, _ in costs.tokens}
        smooth = costs.chunk(4) >= SMOOTH * costs.chunk(1)
        between = (size for size in _LENGTHS if smooth or size > min(timed, STAIRS))
        self.sizes = [size for size in sorted({1, *known, *between, longest}) if size <= most]
        self.decode_factor = self.chunk_factor = 1.0  # times what the table says that they take
        self._ends = 0.0
        self._size = self._left = 0  # tokens of a step, and steps to come before the round ends
        self._pauses, self._seen = float(PAUSES), 0.0  # that are left, as of this number of rounds
        self.pausing = False

    def measure(self, seconds: float, steps: int, prefill: float, lanes: Sequence[int]) -> None:
        """Records a measured round: `seconds` in all, with `steps` prefill steps that the table puts at
        `prefill` seconds together. `lanes` are the rows of each lane that ran."""
        own = self.round_seconds(lanes)
        if steps:
            more = self.round_with(own, len(lanes), steps, prefill / steps) - own
            # idle stages may hide a part of a chunk; plans do not rely on it
            self.chunk_factor = max(1.0, _nearer(self.chunk_factor, (seconds - own) / more))
        else:
            self.decode_factor = max(0.1, _nearer(self.decode_factor, self.decode_factor * seconds / own))

    def alone(self, prompts: int, tokens: int) -> int:
        """Tokens of a chunk while nothing decodes, for `prompts` prompts of `tokens` tokens each.

        One prompt is through soonest; several have their first tokens soonest in the mean.
        """
        part = 0.5 if prompts > 1 else 1.0
        cuts = self.cuts(prompts, tokens)
        enough = NEAR * min(self.alone_seconds(cut, part) for cut in cuts)
        return next(cut.size for cut in cuts if self.alone_seconds(cut, part) <= enough)

    def brief(self, seconds: float) -> int:
        """Tokens of the longest chunk that takes no more than `seconds` in a stage, or twice a token's."""
        enough = max(seconds, 2 * self._costs.chunk(1))
        return max(size for size in self.sizes if size == 1 or self._costs.chunk(size) <= enough)

    def before(self, rows: int, prompts: int, tokens: int, waiting: int, left: Sequence[int]) -> int:
        """Tokens of a chunk while nothing decodes and the first tokens of `rows` rows are on their way; the
        others as in `take`. It is no shorter than in a pause if one has room for a whole prompt."""
        self.pausing = False
        if not rows:
            return self.alone(prompts, tokens)
        size = self.best([rows], prompts, tokens, waiting)[0]
        if rows <= FEW and left:
            shortest = self._soonest(left[0])
            if shortest.steps * shortest.seconds <= LONGEST:
                size = max(size, shortest.size)
        return size

    def take(
        self,
        rounds: float,
        lanes: Sequence[int],
        prompts: int,
        tokens: int,
        waiting: int,
        left: Sequence[int] = (),
    ) -> int:
        """Tokens of the prefill step to announce now; 0 for no step. If it is part of a pause (`pausing`), it
        is for the prompt with the fewest tokens left.

        `rounds` is the number of rounds so far. `lanes` are the rows of each lane that runs. `prompts`
        prompts have memory, of `tokens` tokens each in the mean, and `waiting` requests are behind them.
        `left` are the tokens that each prompt lacks that may have a pause, rising.
        """
        if rounds >= self._ends - _WHOLE:
            self._ends = 1 + (self._ends if rounds - self._ends < 1 else rounds)
            pause = self._pause(rounds, left) if left and sum(lanes) <= FEW else None
            self.pausing = pause is not None
            self._size, self._left = pause or self.best(lanes, prompts, tokens, waiting)
        if not self._left:
            return 0
        self._left -= 1
        return self._size

    def _pause(self, rounds: float, left: Sequence[int]) -> tuple[int, int] | None:
        """Tokens of a chunk, and steps in a round that is a pause, of as many prompts as LONGEST has room
        for. None if not enough pauses are left for the shortest."""
        self._pauses = min(PAUSES, self._pauses + (rounds - self._seen) / SELDOM)
        self._seen = rounds
        shortest = self._soonest(left[0])
        most = min(MANY, max(1, int(LONGEST / shortest.seconds)))
        if ceil(shortest.steps / most) > self._pauses:
            return None
        self._pauses -= 1
        steps = accumulate(ceil(tokens / shortest.size) for tokens in left)
        return shortest.size, max((total for total in steps if total <= most), default=most)

    def _soonest(self, tokens: int) -> Cut:
        """How a prompt of `tokens` tokens is through soonest."""
        size = self.alone(1, tokens)
        return Cut(size, ceil(tokens / size), self.chunk_factor * self._costs.chunk(min(size, tokens)))

    def best(self, lanes: Sequence[int], prompts: int, tokens: int, waiting: int) -> tuple[int, int]:
        """Tokens of a chunk, and steps in a round."""
        cuts = self.cuts(prompts, tokens)
        own = self.round_seconds(lanes)
        crowd = max(1.0, CROWD * (prompts + waiting - 1) / sum(lanes))
        alone = min(self.alone_seconds(cut) for cut in cuts) / crowd

        def miss(plan: tuple[Cut, int]) -> float:
            cut, steps = plan
            longer = self.round_with(own, len(lanes), steps, cut.seconds)
            return max(longer / own / MOST, ceil(cut.steps / steps) * longer / alone / PROMPT)

        steps = [1 << power for power in range(MANY.bit_length())]
        cut, best = min(((cut, each) for cut in reversed(cuts) for each in steps), key=miss)
        return cut.size, best

    def round_with(self, own: float, lanes: int, steps: int, each: float) -> float:
        """Seconds of a round of `own` seconds with `steps` prefill steps of `each` seconds.

        A prefill step that takes longer than a decode step delays the step behind it in every stage again.
        """
        turn = own / max(lanes, self._stages)
        return max(own + steps * each, (self._stages - 1) * each + turn)

    def cuts(self, prompts: int, tokens: int) -> list[Cut]:
        """The ways to cut `prompts` prompts of `tokens` tokens each."""
        shorter = sum(size < tokens for size in self.sizes)
        chunk, times = self._costs.chunk, self.chunk_factor
        return [
            Cut(size, prompts * ceil(tokens / size), times * chunk(min(size, tokens)))
            for size in self.sizes[: shorter + 1]
        ]

    def alone_seconds(self, cut: Cut, part: float = 1.0) -> float:
        """Seconds until prompts that have the ring to themselves are prefilled, or the given part of them."""
        return (part * cut.steps + self._stages - part) * cut.seconds

    def round_seconds(self, lanes: Sequence[int]) -> float:
        """Seconds of a round without prefill."""
        return self.decode_factor * round_seconds(lanes, self._costs.decode, self._stages, 0.0)


def _nearer(times: float, seen: float) -> float:
    return times + _WEIGHT * (min(seen, _FURTHEST) - times)
