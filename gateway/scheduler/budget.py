"""How many prompt tokens go beside rows that decode, and how often, by what steps cost (scheduler.costs).

What a client sees is a lane's round: the time from one of its decode steps to the next. Prefill steps in
between make it longer. Three things are wanted at once:

* nineteen of twenty tokens come within `MOST` times what they take undisturbed;
* ninety-nine of a hundred come within `NEARLY_ALL` times that;
* prompts take at most `PROMPT` times as long as if nothing else ran.

Plans are of two kinds: an even share in every round, or a burst in one of `RARELY`, which fewer than one
token in twenty feels. All are compared whenever a window of rounds begins, so there is nothing to search for
while it runs, and a prompt waits for `RARELY` rounds at most. Of those that keep to what is wanted of tokens
the one with the fastest prompts is taken, unless these would take twice as long as they may; then the one is
taken whose worst miss is the smallest. Where many short prompts wait for every row that runs, an early first
token for them is worth more than an even stream for the others.

What rounds really take corrects the table: rounds without prefill what decode steps cost, those with it what
prefill steps cost (the later in a prompt, the more).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import NamedTuple

from sealring.gateway.scheduler.costs import StepCosts

MOST, NEARLY_ALL = 1.4, 3.0
"""Times its undisturbed length: a round that nineteen of twenty, and ninety-nine of a hundred, may take. Of
the one and a half that are wanted a tenth is left to what rounds differ by anyway."""

PROMPT = 3.0
"""Times as long as alone that prompts may take."""

CROWD = 8.0
"""Short prompts that wait, besides one, for each row that runs count for so many times as much as one."""

RARELY = 21
"""Rounds of which a burst is in one, so that fewer than one token in twenty is late."""

CLEAN_EVERY = 32
"""Rounds of which one goes without prefill, to see what it takes by itself."""

_STEPS = (1, 2, 4, 8, 16)
_SIZES = (1, 2, 3, 4, 5, 6, *(half << power for power in range(2, 13) for half in (2, 3)))
_CLEAN_SEEN, _SEEN = 15, 60  # rounds without prefill, and with it, that tell
_DOUBT = 6  # of them are taken to be as the table says before they were seen
_WHOLE = 1e-6  # of a round, summed up from its lanes' parts


@dataclass(frozen=True, slots=True)
class Load:
    """What runs and waits: `rows` in so many `lanes`; `prompts` of so many `tokens` each, in the mean, which
    count for `crowd` short ones."""

    rows: int
    lanes: int
    prompts: int
    tokens: int
    crowd: float = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """So many steps of at most so many tokens at the beginning of a window of so many rounds."""

    size: int
    steps: int
    rounds: float


class Cut(NamedTuple):
    """A way to cut what waits: tokens of a chunk, chunks of all prompts, seconds of each in a stage."""

    size: int
    steps: int
    seconds: float


class Drift:
    """How many times what the table says steps really take, and `least`: the median of so many seen last."""

    def __init__(self, seen: int, least: float) -> None:
        self._seen = deque([1.0] * _DOUBT, maxlen=seen)
        self._least = least
        self.times = 1.0

    def add(self, seconds: float, believed: float) -> None:
        self._seen.append(min(seconds / believed, 10.0))
        self.times = max(self._least, median(self._seen))


class PrefillBudget:
    """`largest` is the most tokens that a chunk may have.

    `fine`: rows and tokens are computed in turn, so any number of tokens may be the best. Elsewhere chunks
    have a length that was timed, whose kernels are loaded.
    """

    def __init__(self, costs: StepCosts, largest: int, stages: int, fine: bool = False) -> None:
        self._costs = costs
        self._stages = stages
        sizes = _SIZES if fine else [size for size, _ in costs.tokens]
        self._sizes = [size for size in sizes if size < largest] + [largest]
        self._decodes = Drift(_CLEAN_SEEN, 0.1)
        self._chunks = Drift(_SEEN, 1.0)  # what idle stages hide of a chunk is not counted on
        self._plan = self._found = Plan(0, 0, 0.0)
        self._asked: tuple[Load, float, float] | None = None  # what that was found for
        self._left = 0
        self._ends = self._clean = 0.0

    def measure(self, seconds: float, steps: int, prefill: float, rows: int, lanes: int) -> None:
        """A lane's round took so long, with so many prefill steps in it that the table takes for `prefill`
        seconds in all; so many rows run in so many lanes."""
        if steps:
            own = self._round(rows, lanes)
            self._chunks.add(seconds - own, self._with(own, lanes, steps, prefill / steps) - own)
        else:
            self._decodes.add(seconds, self._round(rows, lanes) / self._decodes.times)
            self._clean = 0.0

    def alone(self, prompts: int, tokens: int) -> int:
        """Tokens of a chunk where so many prompts of so many tokens each have to go and nothing else does.

        One prompt is through soonest; several have their first tokens soonest in the mean.
        """
        part = 0.5 if prompts > 1 else 1.0
        cuts = reversed(self._chunked(prompts, tokens))
        return min(cuts, key=lambda cut: self._alone(cut, part)).size

    def take(self, rounds: float, load: Load) -> int:
        """Tokens of the prefill step that is announced now; 0: none is. `rounds` were so far."""
        if rounds >= self._ends - _WHOLE:
            self._begin(rounds, load)
        if not self._left:
            return 0
        self._left -= 1
        return self._plan.size

    def _begin(self, rounds: float, load: Load) -> None:
        if self._clean >= CLEAN_EVERY:
            self._plan, self._clean = Plan(0, 0, 1.0), 0.0
        else:
            asked = load, round(self._decodes.times, 1), round(self._chunks.times, 1)
            if asked != self._asked:
                self._asked, self._found = asked, self._best(load)
            self._plan = self._found
            self._clean += self._plan.rounds
        self._left = self._plan.steps
        begins = self._ends if rounds - self._ends < 1 else rounds
        self._ends = begins + self._plan.rounds

    def _best(self, load: Load) -> Plan:
        cuts = self._chunked(load.prompts, load.tokens)
        own = self._round(load.rows, load.lanes)
        alone = min(self._alone(cut) for cut in cuts)
        crowd = max(1.0, CROWD * (load.crowd - 1) / load.rows)

        def missed(longer: float, wanted: float, takes: float) -> float:
            late, slow = longer / own / wanted, crowd * takes / alone / PROMPT
            return slow / 2 if late <= 1 and slow <= 2 else max(late, slow)

        def plans() -> Iterator[tuple[float, Plan]]:
            for cut in cuts:
                # as many for every lane, else some would have more than others
                for steps, parts in (
                    (1, 1),
                    *((each, load.lanes) for each in _STEPS if load.lanes * each > 1),
                ):
                    longer = self._with(own, load.lanes, steps * parts, cut.seconds)
                    takes = ceil(cut.steps / (steps * parts)) * longer
                    yield missed(longer, MOST, takes), Plan(cut.size, steps, 1 / parts)
            for steps in _STEPS:
                longer = self._with(own, load.lanes, steps, cut.seconds)
                takes = ceil(cut.steps / steps) * (longer + (RARELY - 1) * own)
                yield missed(longer, NEARLY_ALL, takes), Plan(cut.size, steps, RARELY)

        return min(plans(), key=lambda found: found[0])[1]

    def _with(self, own: float, lanes: int, steps: int, each: float) -> float:
        """What a round of `own` seconds takes with so many prefill steps of so many seconds.

        A step that takes longer than a decode step holds up what is behind it in every stage anew.
        """
        turn = own / max(lanes, self._stages)
        return max(own + steps * each, (self._stages - 1) * each + turn)

    def _chunked(self, prompts: int, tokens: int) -> list[Cut]:
        """The ways to cut so many prompts of so many tokens each."""
        shorter = sum(size < tokens for size in self._sizes)
        chunk, times = self._costs.chunk, self._chunks.times
        return [
            Cut(size, prompts * ceil(tokens / size), times * chunk(min(size, tokens)))
            for size in self._sizes[: shorter + 1]
        ]

    def _alone(self, cut: Cut, part: float = 1.0) -> float:
        """Seconds until prompts are through that have the ring to themselves, or such a part of them."""
        return (part * cut.steps + self._stages - part) * cut.seconds

    def _round(self, rows: int, lanes: int) -> float:
        """Seconds of a round without prefill."""
        return self._decodes.times * max(lanes, self._stages) * self._costs.decode(rows / lanes)
