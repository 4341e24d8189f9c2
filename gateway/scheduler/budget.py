"""How many prompt tokens go beside rows that decode, by what steps cost (scheduler.costs).

What a client sees is a lane's round: the time from one of its decode steps to the next. Prefill steps in
between make it longer. Two things are wanted, which no plan can always keep to: a token takes at most `MOST`
times what it takes undisturbed, and prompts at most `PROMPT` times what they take if nothing else runs.

A plan is a number of steps in every round and the length of their chunks. Whenever a round begins all plans
are compared, and the one whose worst miss is the smallest is taken: there is nothing to search for while it
runs, and a prompt waits for one round at most. Where many prompts wait for every row that runs, an early
first token for them is worth more than an even stream for the others.

What rounds really take corrects the table: rounds without prefill what decode steps cost, those with it what
prefill steps cost (the later in a prompt, the more).
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from sealring.gateway.scheduler.costs import StepCosts

MOST = 1.4
"""Times its undisturbed length that a round may take. Of the one and a half that are wanted a tenth is left
to what rounds differ by anyway."""

PROMPT = 3.0
"""Times as long as alone that prompts may take."""

CROWD = 6.0
"""Prompts that wait, besides one, for each row that runs count for so many times as much as one."""

MANY = 16
"""Prefill steps in a round, at most."""

_FINE = (1, *(half << power for power in range(12) for half in (2, 3)))
_WEIGHT, _FURTHEST = 0.1, 10.0  # of one round in a mean, and times that it may differ from the table
_WHOLE = 1e-6  # of a round, summed up from its lanes' parts


class Cut(NamedTuple):
    """A way to cut what waits: tokens of a chunk, chunks of all prompts, seconds of each in a stage."""

    size: int
    steps: int
    seconds: float


class PrefillBudget:
    """`largest` is the most tokens that a chunk may have.

    `fine`: rows and tokens are computed in turn, so any number of tokens may be the best. Elsewhere chunks
    have a length that was timed, whose kernels are loaded.
    """

    def __init__(self, costs: StepCosts, largest: int, stages: int, fine: bool = False) -> None:
        self._costs = costs
        self._stages = stages
        sizes = _FINE if fine else [size for size, _ in costs.tokens]
        self._sizes = [size for size in sizes if size < largest] + [largest]
        self._decodes = self._chunks = 1.0  # times what the table says that they take
        self._ends = 0.0
        self._size = self._left = 0  # tokens of a step, and steps to come before the round ends

    def measure(self, seconds: float, steps: int, prefill: float, rows: int, lanes: int) -> None:
        """A lane's round took so long, with so many prefill steps in it that the table takes for `prefill`
        seconds in all; so many rows run in so many lanes."""
        own = self._round(rows, lanes)
        if steps:
            more = self._with(own, lanes, steps, prefill / steps) - own
            # what idle stages hide of a chunk is not counted on
            self._chunks = max(1.0, _nearer(self._chunks, (seconds - own) / more))
        else:
            self._decodes = max(0.1, _nearer(self._decodes, self._decodes * seconds / own))

    def alone(self, prompts: int, tokens: int) -> int:
        """Tokens of a chunk where so many prompts of so many tokens each have to go and nothing else does.

        One prompt is through soonest; several have their first tokens soonest in the mean.
        """
        part = 0.5 if prompts > 1 else 1.0
        cuts = reversed(self._cuts(prompts, tokens))
        return min(cuts, key=lambda cut: self._alone(cut, part)).size

    def take(self, rounds: float, rows: int, lanes: int, prompts: int, tokens: int, waiting: int) -> int:
        """Tokens of the prefill step that is announced now; 0: none is.

        `rounds` were so far. So many rows run in so many lanes, beside so many prompts of so many tokens
        each, in the mean, and so many requests wait behind these.
        """
        if rounds >= self._ends - _WHOLE:
            self._ends = 1 + (self._ends if rounds - self._ends < 1 else rounds)
            self._size, self._left = self._best(rows, lanes, prompts, tokens, waiting)
        if not self._left:
            return 0
        self._left -= 1
        return self._size

    def _best(self, rows: int, lanes: int, prompts: int, tokens: int, waiting: int) -> tuple[int, int]:
        """Tokens of a chunk, and steps in a round."""
        cuts = self._cuts(prompts, tokens)
        own = self._round(rows, lanes)
        crowd = max(1.0, CROWD * (prompts + waiting - 1) / rows)
        alone = min(self._alone(cut) for cut in cuts) / crowd

        def miss(plan: tuple[Cut, int]) -> float:
            cut, steps = plan
            longer = self._with(own, lanes, steps, cut.seconds)
            return max(longer / own / MOST, ceil(cut.steps / steps) * longer / alone / PROMPT)

        steps = [1 << power for power in range(MANY.bit_length())]
        cut, best = min(((cut, each) for cut in cuts for each in steps), key=miss)
        return cut.size, best

    def _with(self, own: float, lanes: int, steps: int, each: float) -> float:
        """What a round of `own` seconds takes with so many prefill steps of so many seconds.

        A step that takes longer than a decode step holds up what is behind it in every stage anew.
        """
        turn = own / max(lanes, self._stages)
        return max(own + steps * each, (self._stages - 1) * each + turn)

    def _cuts(self, prompts: int, tokens: int) -> list[Cut]:
        """The ways to cut so many prompts of so many tokens each."""
        shorter = sum(size < tokens for size in self._sizes)
        chunk, times = self._costs.chunk, self._chunks
        return [
            Cut(size, prompts * ceil(tokens / size), times * chunk(min(size, tokens)))
            for size in self._sizes[: shorter + 1]
        ]

    def _alone(self, cut: Cut, part: float = 1.0) -> float:
        """Seconds until prompts are through that have the ring to themselves, or such a part of them."""
        return (part * cut.steps + self._stages - part) * cut.seconds

    def _round(self, rows: int, lanes: int) -> float:
        """Seconds of a round without prefill."""
        return self._decodes * max(lanes, self._stages) * self._costs.decode(rows / lanes)


def _nearer(times: float, seen: float) -> float:
    return times + _WEIGHT * (min(seen, _FURTHEST) - times)
