"""The number of tokens that the head drafts for the rows of a ring, by step times and accepted drafts.

The head drafts tokens (node.engine.drafts), a step computes them along with the last one, and accepted drafts
need no step of their own. Further steps may follow before the first is verified: a chain of runs. Each run
continues where the run before ends if all of its drafts are right. At the first wrong draft the rest of the
chain counts for nothing, and the next step cuts all caches to the accepted tokens (`Settle`). The gateway
sees how many tokens each run brought, and none of them.

Rows of one lane have drafts together, each the same number, in one run that is settled before the next.
Nothing is drafted while a prompt is computed or waits, nor while the head finds no text that the answer may
be repeating.

Guesses that a source makes ahead come round with the tokens that a step samples. So a run of them has to
follow that step, and no other is under way with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from sealring.gateway.scheduler.board import Board
from sealring.gateway.scheduler.facts import (
    LOOKUP,
    MAX_SOURCES,
    RingFacts,
    Source,
    StepCosts,
)
from sealring.gateway.scheduler.lane import Lane
from sealring.gateway.scheduler.request import Row
from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.composition import MAX_DRAFTED, MAX_UNSETTLED
from sealring.v1 import control_pb2 as control

LENGTHS = (1, 3, 7, 15)
"""Drafts of a step, besides a whole block: few lengths, because a GPU plans anew for each."""

BATCH_LENGTHS = (1, 2, 3, 7)
"""Drafts of each row in a ring of several rows: more pay on no table that we know."""

_SUREST, _GOOD = 0.99, 0.9
_WORTH = 1.06
"""Least gain of drafts: what reporting their rates costs, and what the seconds of a step vary by."""

_FURTHEST = 2.0  # times the expected seconds: a longer run is an accident
_DOUBT, _SEEN = 2, 7  # measurements that are assumed before there are any, and those that count in all

_FEW, _JUDGED, _SURELY, _REST = 6, 32, 3.0, 64
"""Runs that the guard judges together (least and most), the standard errors by which their mean must be below
0 to rule drafts out, and the steps for which it then does."""

_LONGEST_REST = 1024

_PROBE = 16
"""Most steps from one guess ahead to the next while the source's guesses do not pay: they show whether they
would. There are twice as many after each."""


Rates: TypeAlias = Mapping[Source, float]
"""The probabilities that the next guess is accepted, by its source."""


def acceptance_rates(told: Sequence[control.DraftRate]) -> Rates:
    """The rates that the head told, of no more sources than a ring may have."""
    return {each.source: min(100, each.right) / 100 for each in told[:MAX_SOURCES]}


class DraftPlan(NamedTuple):
    """Drafts of a run, runs under way behind each other, and the source of the drafts: what a lane's next
    steps are to have."""

    drafts: int = 0
    runs: int = 0
    source: Source = LOOKUP


_NO_DRAFTS = DraftPlan()


class Guard:
    """Rules drafts out for a while when they bring tokens slower than steps without drafts.

    Costs and rates choose the drafts. This catches what they cannot tell, as stages that take turns on one
    processor. A few unlucky runs do not count. Each rest is twice as long as the one before, until drafts
    have gained.
    """

    def __init__(self) -> None:
        self._won: deque[float] = deque(maxlen=_JUDGED)
        self._pause = _REST
        self._left = 0

    @property
    def rules_out(self) -> bool:
        return self._left > 0

    def drafted(self, won: float) -> None:
        """Records a run. `won`: the tokens that it brought beyond those of steps without drafts."""
        self._won.append(won)
        if len(self._won) < _FEW:
            return
        mean = fmean(self._won)
        if mean < -_SURELY * pstdev(self._won, mean) / math.sqrt(len(self._won)):
            self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST_REST)
            self._won.clear()
        elif mean > 0 and len(self._won) == _JUDGED:
            self._pause = _REST

    def plain(self) -> None:
        """Records a step without drafts."""
        self._left = max(0, self._left - 1)


class RowPolicy:
    """The draft plan of a row that is alone: the number of drafts that pays, that of runs under way behind
    each other, and the source of the drafts.

    By the table a first run of d drafts takes a step of 1 + d tokens in one stage after the other, and no
    less than a step without drafts, which was announced ahead. With n runs under way, one ends every
    max(its seconds / n, slowest stage) seconds. A source takes its own time before the first run, and the
    head has to guess and compute each further one. Runs take longer than that, since a step that waits for
    tokens is announced and built later. The last chains of as many drafts and runs tell by how much, or those
    of the nearest number of drafts. The plan with most tokens a second is best.
    """

    def __init__(self, ring: RingFacts) -> None:
        self._stages, self._sources, self._most_runs = ring.stages, ring.sources, ring.runs or ring.stages
        lengths = range(1 + LENGTHS[-1])  # of chains that began beside other lanes, too
        self._chunks = [ring.costs.chunk(1 + length) for length in lengths]
        self._at_head = [(ring.head or ring.costs).chunk(1 + length) for length in lengths]
        self._hops = ring.stages * ring.hop
        # by drafts of a run and runs under way: seconds of a run beyond the table's, in the last chains
        self._seen: dict[tuple[int, int], deque[float]] = {}
        self._excesses: dict[tuple[int, int], float] = {}  # their medians, as far as they were asked for
        self._since = 0  # steps without drafts since the last chain
        self._plains: deque[float] = deque(maxlen=_SEEN)
        self._plain = 0.0
        self._guard = Guard()
        # of the last one: its first plan, runs, seconds expected, and seconds seen
        self._chain: tuple[DraftPlan, int, float, float] | None = None

    def begin(self) -> None:
        """Begins another answer."""
        self._chain = None

    @property
    def ready(self) -> bool:
        """Whether it is known how long a step without drafts takes."""
        return self._plain > 0

    def best(
        self, most: int, rates: Rates, own: Source | None = None, guessed: int = MAX_UNSETTLED
    ) -> DraftPlan:
        """The plan that brings most tokens a second, with at most `most` drafts in a run; `DraftPlan()` for
        none. A chain goes on with its `own` source of drafts. `guessed` tokens that were guessed ahead are
        there."""
        best, gain = DraftPlan(), _WORTH
        if not self.ready or self._guard.rules_out:
            return best
        for source, facts in self._sources.items():
            right = rates.get(source, 0.0)
            if not right or own not in (None, source):
                continue
            for length in sorted({*LENGTHS, min(facts.block, LENGTHS[-1]) or 1}):
                if length > min(most, guessed if facts.ahead else most, facts.block or most):
                    break
                for runs in range(1, 2 if facts.ahead else 1 + self._most_runs):
                    plan = DraftPlan(length, runs, source)
                    if (times := self._gain(right, plan)) > gain:
                        best, gain = plan, times
        return best

    def plain(self, seconds: float) -> None:
        """Records the seconds of a step without drafts that followed another."""
        self._plains.append(seconds)
        most = _FURTHEST * median(self._plains)  # runs count with their own seconds, so this is a mean
        self._plain = fmean(min(each, most) for each in self._plains)
        self._guard.plain()
        self._since += 1
        if self._since % _LONGEST_REST == 0:
            self._seen.clear()  # what was slow once is tried again
            self._excesses.clear()

    def took(self, plan: DraftPlan, tokens: int, seconds: float, *, first: bool = True) -> None:
        """Records a run that brought `tokens` tokens, with `plan.runs` under way, or a step without drafts
        that was not announced behind another. Behind a chain both wait for its runs in vain, so both measure
        it."""
        if not self._plain or seconds <= 0:
            return
        alone = self._first(plan)
        if self._chain:
            begun, behind, expected, spent = self._chain
            begun = begun._replace(runs=max(begun.runs, plan.runs))
            expected, spent = expected + (alone if first else self._next(plan)), spent + seconds
            if first:
                self._see(begun, (spent - expected - self._vain(begun)) / (behind + 1))
            else:
                self._chain = begun, behind + 1, expected, spent
        if first:
            self._chain = (plan, 1, alone, seconds) if plan.drafts else None
        if plan.drafts:
            usual = alone + self._excess(plan)
            self._guard.drafted(tokens - min(seconds, _FURTHEST * usual) / self._plain)

    def _see(self, plan: DraftPlan, excess: float) -> None:
        usual = self._excess(plan)
        self._seen.setdefault(_kind(plan), deque([usual] * _DOUBT, maxlen=_SEEN)).append(excess)
        self._excesses.clear()
        self._since = 0

    def _excess(self, plan: DraftPlan) -> float:
        """Seconds of a run beyond the table's: as of the longest kind that is no longer, or the shortest."""
        kind = drafts, runs = _kind(plan)
        if kind not in self._excesses:
            known = [length for length, under_way in self._seen if under_way == runs]
            nearest = max((length for length in known if length <= drafts), default=min(known, default=0))
            self._excesses[kind] = median(self._seen.get((nearest, runs), (0.0,)))
        return self._excesses[kind]

    def _gain(self, right: float, plan: DraftPlan) -> float:
        """Times as fast as without drafts."""
        right = min(right, _SUREST)
        runs = 1 / (1 - right ** (1 + plan.drafts))
        takes = self._first(plan) + self._next(plan) * (runs - 1) + self._vain(plan)
        return self._plain / (takes + runs * self._excess(plan)) / (1 - right)

    def _first(self, plan: DraftPlan) -> float:
        """Seconds of a chain's first run, or of a step without drafts."""
        return self._pass(plan) + self._sources[plan.source].run(plan.drafts)

    def _pass(self, plan: DraftPlan) -> float:
        """Seconds of a lone step through all stages; a step without drafts is announced ahead."""
        if not plan.drafts:
            return self._plain
        return max(self._plain, self._stages * self._chunks[plan.drafts] + self._hops)

    def _next(self, plan: DraftPlan) -> float:
        """Seconds from a run of a chain to the next one."""
        head = self._at_head[plan.drafts] + self._sources[plan.source].run(1 + plan.drafts)
        return max(self._pass(plan) / max(1, plan.runs), head, self._chunks[plan.drafts])

    def _vain(self, plan: DraftPlan) -> float:
        """Seconds that the step behind a chain waits in stages for runs in vain."""
        return max(0.0, self._chunks[plan.drafts] - self._chunks[0]) * max(0, plan.runs - 1)


def _kind(plan: DraftPlan) -> tuple[int, int]:
    return plan.drafts, max(1, plan.runs)


class LanesPolicy:
    """The draft plans of several rows: the number of drafts that pays in each lane. A lane has one run at a
    time, because the others keep the stages busy.

    By the table a round takes what a stage computes of all lanes, and as long as the longest step takes from
    stage to stage. The head guesses besides, for all rows of a lane at once. Lanes decide in turn, by what
    the others did last. Rounds with drafts are measured against rounds without, in times of what the table
    says.
    """

    def __init__(self, ring: RingFacts) -> None:
        self._stages, self._hop, self._sources = ring.stages, ring.hop, ring.sources
        self._most_rows = ring.draft_runs
        self._costs, self._head = ring.costs, ring.head or ring.costs
        self._plains = deque([1.0] * _DOUBT, maxlen=_SEEN)
        self._drafted = deque([1.0] * _DOUBT, maxlen=_SEEN)
        self._slower, self._since, self._again = 1.0, 0, _REST
        self._gains: dict[tuple[int, tuple[int, ...]], float] = {}

    def round(self, steps: Sequence[Step]) -> float:
        """Seconds from a row's tokens to its next ones, with these steps of all lanes."""
        stage = [_seconds(self._costs, step) for step in steps]
        head = [_seconds(self._head, step) + self._guessing(step, ahead=False) for step in steps]
        ahead = [self._guessing(step, ahead=True) for step in steps]
        longest = max(
            first + (self._stages - 1) * other + more + self._stages * self._hop
            for first, other, more in zip(head, stage, ahead, strict=True)
        )
        return max(sum(stage) + sum(ahead), sum(head), longest)

    def _guessing(self, step: Step, *, ahead: bool) -> float:
        """Seconds in which a step's guesses are made: at the tail where they are made ahead, else at the
        head."""
        facts = self._sources[step.plan.source]
        return step.plan.drafts * facts.guessing(step.rows) if facts.ahead == ahead else 0.0

    def best(
        self, rows: int, most: int, rates: Rates, others: Sequence[Step], guessed: int = MAX_UNSETTLED
    ) -> DraftPlan:
        """The plan of a lane of `rows` rows that brings most tokens a second in all lanes together. Of each
        row `guessed` tokens that were guessed ahead are there."""
        plan, gain = self._best(rows, most, rates, others, guessed)
        return plan if gain > _WORTH * self._slower else DraftPlan()

    def pays(self, rows: int, others: Sequence[int]) -> bool:
        """Whether any drafts of a lane of `rows` rows would pay beside lanes of `others` if nearly all were
        right."""
        key = (rows, tuple(sorted(others)))
        if key not in self._gains:
            good = dict.fromkeys(self._sources, _GOOD)
            plain = [Step(size, DraftPlan(), 0.0, good) for size in others]
            self._gains[key] = self._best(rows, BATCH_LENGTHS[-1], good, plain, MAX_UNSETTLED)[1]
        return self._gains[key] > _WORTH * self._slower

    def _best(
        self, rows: int, most: int, rates: Rates, others: Sequence[Step], guessed: int
    ) -> tuple[DraftPlan, float]:
        """The best plan by the table, and times as fast as without drafts.

        Where guesses are made ahead the others may follow, as one lane with drafts would wait for the rest.
        All lanes without drafts are what that is compared with.
        """
        none = DraftPlan()
        now = [Step(rows, none, 0.0), *others]
        all_rows = sum(one.rows for one in now)
        best, gain = none, 1.0
        for source, facts in self._sources.items():
            right = rates.get(source, 0.0) if facts.serves(all_rows) else 0.0
            follow = facts.ahead and all_rows <= self._most_rows
            longest = min(most, MAX_DRAFTED // rows - 1, guessed if facts.ahead else most)
            plain = self._rate([one.with_plan(none) for one in now]) if follow else self._rate(now)
            least = max(gain, self._rate(now) / plain)
            for length in BATCH_LENGTHS if right else ():
                if length > longest:
                    break
                step = Step(rows, DraftPlan(length, 1, source), min(right, _SUREST))
                times = self._rate([step, *others])
                if follow:
                    times = max(times, self._rate([step, *(one.with_plan(step.plan) for one in others)]))
                if times / plain > least:
                    best, gain = step.plan, times / plain
                    least = gain
        return best, gain

    def _rate(self, steps: Sequence[Step]) -> float:
        """Tokens a second with these steps of all lanes."""
        return sum(one.tokens for one in steps) / self.round(steps)

    def took(self, steps: Sequence[Step], seconds: float) -> None:
        """Records a round with these steps."""
        times = seconds / self.round(steps)
        if any(step.plan.drafts for step in steps):
            self._drafted.append(times)
            self._since = 0
        else:
            self._plains.append(times)
            self._since += 1
            if self._since == self._again:
                self._drafted.extend([1.0] * _SEEN)
                self._since, self._again = 0, min(2 * self._again, _LONGEST_REST)
        self._slower = median(self._drafted) / median(self._plains)


class Step(NamedTuple):
    """A step of a lane: its rows, its plan, the probability that a draft is right, and the probabilities of
    further ones."""

    rows: int
    plan: DraftPlan
    right: float
    rates: Rates = MappingProxyType({})

    def with_plan(self, plan: DraftPlan) -> Step:
        """A step of the same lane with another plan, if it can have that."""
        if self.rows * (1 + plan.drafts) > MAX_DRAFTED:
            return self
        right = self.rates.get(plan.source, 0.0) if plan.drafts else 0.0
        return Step(self.rows, plan, min(right, _SUREST), self.rates)

    @property
    def tokens(self) -> float:
        """Tokens that it brings in the mean."""
        return self.rows * (1 - self.right ** (1 + self.plan.drafts)) / (1 - self.right)


def _seconds(costs: StepCosts, step: Step) -> float:
    tokens = 1 + step.plan.drafts
    return costs.chunk(tokens) if step.rows == 1 and tokens > 1 else costs.decode(step.rows * tokens)


@dataclass(slots=True, eq=False)
class _Run:
    chain: _Chain
    drafts: int
    first: bool
    guesses: int = 0


@dataclass(slots=True, eq=False)
class _Chain:
    """Runs of a lane's rows that no settle has followed yet. `live` runs may still bring tokens. All drafts
    are of one source."""

    lane: Lane
    rows: tuple[Row, ...]
    source: Source = LOOKUP
    live: list[_Run] = field(default_factory=list)

    @property
    def open(self) -> list[Row]:
        """Rows that go on."""
        return [row for row in self.rows if not row.closed]

    def most(self, board: Board) -> int:
        """Drafts of another run, by the limits of the rows and of a chain; the last token is left to steps
        without drafts."""
        under_way = sum(1 + run.drafts for run in self.live)
        left = min(board.left(row) for row in self.rows) - under_way
        unsettled = board.lanes.unsettled(self.rows[0].number)
        return min(*(row.drafts for row in self.rows), left - 2, MAX_UNSETTLED - unsettled - 1)


@dataclass(slots=True, eq=False)
class _Past:
    """What is known of a lane with these rows: when its last step was done, what that was, and the rates at
    which further guesses are right. Behind a chain it `waits`: steps are announced one by one, because the
    next may have drafts."""

    rows: tuple[int, ...]
    rates: Rates = field(default_factory=dict)
    at: float | None = None
    waits: bool = False
    plan: DraftPlan = _NO_DRAFTS
    guessed: int = 0  # tokens that were guessed ahead and came with those of the last step
    pause: int = 1  # steps from one guess ahead to the next, while none pays
    unguessed: int = 1  # steps since the last

    @property
    def step(self) -> Step:
        right = self.rates.get(self.plan.source, 0.0) if self.plan.drafts else 0.0
        return Step(len(self.rows), self.plan, min(right, _SUREST), self.rates)


class Drafting:
    """The steps of one epoch that have drafts, and the settles that follow them."""

    def __init__(self, ring: RingFacts, board: Board) -> None:
        self._board = board
        self._possible = ring.speculates
        self._together, self._most_runs = ring.drafts_together, ring.draft_runs
        self._sources = ring.sources
        ahead = (source for source, facts in ring.sources.items() if facts.ahead)
        self.ahead = next(ahead, control.DRAFT_SOURCE_UNSPECIFIED)
        """The source that guesses ahead, if any."""
        self.taps = self._possible and any(facts.taps for facts in ring.sources.values())
        """Whether steps of rows that draft bring hidden states."""
        self._block = max(facts.block for facts in ring.sources.values())
        self._for_row = RowPolicy(ring)
        self._for_lanes = LanesPolicy(ring)
        self._pasts: dict[int, _Past] = {}
        self._chains: dict[int, _Chain] = {}
        self._runs: deque[_Run] = deque()

    def wanted(self, lane: Lane, lanes: Sequence[Lane], rows: int) -> DraftPlan | None:
        """The plan of the lane's next step; None if it has to wait for steps under way. `lanes` run, and
        `rows` are in the ring or wait for it."""
        may, chain = self.asks(lane, lanes, rows) and not lane.ready, self._chains.get(lane.number)
        if chain is not None and chain.live and chain.open:
            if len(chain.rows) > 1 or rows > 1:
                return None
            plan, past = DraftPlan(), self._past(lane)
            if may:
                plan = self._for_row.best(chain.most(self._board), past.rates, chain.source, past.guessed)
            return plan if len(chain.live) < plan.runs else None
        if not may or any(row.closed for row in lane.rows.values()):
            return DraftPlan()
        past = self._past(lane)
        most = _Chain(lane, tuple(lane.rows.values())).most(self._board)
        others = sum(len(chain.rows) for chain in self._chains.values())
        if rows > 1 and others + len(lane.rows) > self._most_runs:
            plan = DraftPlan()
        else:
            plan = self._best(lane, lanes, rows, most, past.guessed)
        # The first run of a chain waits until no other step can bring a token of the rows. For that run the
        # head calls `Lookup.drafts` in its compute loop, for tokens that come `heard` and `right` in
        # its receiving thread: by this rule never at once, so node.engine.drafts.lookup has no lock.
        # While another lane has drafts no step is announced ahead either: the head computes steps in order,
        # and would wait for this lane's tokens while others are there.
        return (
            None if lane.outstanding and (plan.drafts or past.waits or (rows > 1 and self._chains)) else plan
        )

    def asks(self, lane: Lane, lanes: Sequence[Lane], rows: int) -> bool:
        """Whether the head reports the probability of a right draft: only rows that may get drafts need it.
        None may while another waits or its prompt is computed."""
        there = list(lane.rows.values())
        return (
            self._possible
            and rows == sum(len(other.rows) for other in lanes)
            and (len(there) == 1 or self._together)
            and all(row.drafts for row in there)
            and (
                rows == 1
                or (
                    self._for_lanes.pays(len(there), [len(one.rows) for one in lanes if one is not lane])
                    and not self._rests(lane, lanes, rows)
                )
            )
        )

    def _rests(self, lane: Lane, lanes: Sequence[Lane], rows: int) -> bool:
        """Whether the next step of a lane among others asks for nothing, since guesses ahead have not paid
        for some time. With each step that asks, the source computes the rows' tokens at the busy tail."""
        past = self._past(lane)
        if not self.ahead or past.pause < _PROBE or past.unguessed >= past.pause or past.plan.drafts:
            return False
        return not self._best(lane, lanes, rows, BATCH_LENGTHS[-1]).drafts

    def _best(
        self, lane: Lane, lanes: Sequence[Lane], rows: int, most: int, guessed: int = MAX_UNSETTLED
    ) -> DraftPlan:
        """The plan of a lane without a chain."""
        past = self._past(lane)
        if rows == 1:
            return self._for_row.best(most, past.rates, guessed=guessed)
        others = [self._past(other).step for other in lanes if other is not lane]
        return self._for_lanes.best(len(lane.rows), most, past.rates, others, guessed)

    def guesses(self, lane: Lane, lanes: Sequence[Lane], rows: int, plan: DraftPlan) -> int:
        """The number of tokens that are to be guessed ahead, behind the tokens of each row of the lane's next
        step, which has this plan; the other arguments are as in `wanted`. The tail cannot tell behind which
        token to guess if the head's looked-up drafts may be wrong."""
        there = list(lane.rows.values())
        if rows > 1 and self._rests(lane, lanes, rows):
            self._past(lane).unguessed += 1
            return 0
        able = self._ahead_of(rows) and self.asks(lane, lanes, rows)
        if not able or (plan.drafts and plan.source != self.ahead) or any(row.closed for row in there):
            return 0
        most = min(min(row.drafts, self._board.left(row) - plan.drafts - 3) for row in there)
        if most <= 0:
            return 0
        past = self._past(lane)
        best = self._best(lane, lanes, rows, most)
        if best.drafts and best.source == self.ahead:
            past.pause = 1
            return best.drafts
        if best.drafts or past.unguessed < past.pause:
            past.unguessed += 1
            return 0
        past.pause, past.unguessed = min(2 * past.pause, _PROBE), 1
        return max(1, min(most, self._block))

    def _ahead_of(self, rows: int) -> bool:
        """Whether guesses can be made ahead, with as many rows on the ring."""
        if not self.ahead:
            return False
        return self._for_row.ready if rows == 1 else self._sources[self.ahead].serves(rows)

    def announced(self, lane: Lane, plan: DraftPlan, guesses: int = 0) -> None:
        first = lane.number not in self._chains
        if first:
            self._chains[lane.number] = _Chain(lane, tuple(lane.rows.values()), plan.source)
        chain = self._chains[lane.number]
        run = _Run(chain, plan.drafts, first, guesses)
        self._runs.append(run)
        chain.live.append(run)
        for row in chain.rows:
            row.request.progress.drafted += plan.drafts + (not first)

    def plain(
        self, lane: Lane, lanes: Sequence[Lane], now: float, *, follows: bool, rates: Rates, guesses: int = 0
    ) -> None:
        """A step without drafts is done. `follows`: only one other step of the ring's one lane was under way
        with it, or of this lane. `guesses` that were made ahead came with it."""
        if not self._possible or not lane.rows:
            return
        past = self._past(lane)
        if past.at is not None:
            if len(lane.rows) > 1 or len(lanes) > 1:
                self._round(lane, lanes, DraftPlan(), now)
            elif follows and not guesses:
                self._for_row.plain(now - past.at)
            else:
                self._for_row.took(DraftPlan(), 1, now - past.at)
        past.rates = rates or (past.rates if self.ahead else rates)  # a lane that rests asks for none
        past.at, past.waits, past.plan = now, False, DraftPlan()
        past.guessed = guesses

    def done(
        self,
        brought: Mapping[int, int],
        lanes: Sequence[Lane],
        now: float,
        *,
        rates: Rates,
        refuted: bool = False,
    ) -> None:
        """The first run under way `brought` these numbers of tokens by row, and the draft behind them is
        `refuted`. Raises InvalidInput (BAD_STEP) if no honest head can bring as many."""
        run = self._runs.popleft()
        chain, lane = run.chain, run.chain.lane
        live, under_way = run in chain.live, len(chain.live)
        for row in chain.open:
            tokens = brought.get(row.number, 0)
            if not (run.first if live else 0) <= tokens <= (1 + run.drafts if live else 0):
                raise InvalidInput(
                    f"a step with {run.drafts} drafts brought {tokens} tokens", reason="BAD_STEP"
                )
        if not live or not chain.open:
            return  # those that leave have no caches to settle
        chain.live.remove(run)
        least = min(brought.get(row.number, 0) for row in chain.open)
        if refuted or least <= run.drafts:
            chain.live.clear()
        for row in chain.open:
            tokens = brought.get(row.number, 0)
            self._board.bring(row.number, tokens)
            row.request.progress.accepted += tokens - run.first
        past = self._past(lane)
        plan = DraftPlan(run.drafts, under_way, chain.source)
        if len(chain.rows) > 1 or len(lanes) > 1:
            self._round(lane, lanes, plan, now)
        else:
            seconds = 0.0 if past.at is None else now - past.at
            self._for_row.took(plan, least, seconds, first=run.first)
        past.at, past.waits, past.plan = now, True, plan
        past.guessed = run.guesses
        past.rates = rates if least else past.rates

    def _round(self, lane: Lane, lanes: Sequence[Lane], plan: DraftPlan, now: float) -> None:
        """Records a step of a lane. The first with drafts, and the first without, tells nothing."""
        past = self._past(lane)
        if past.at is None or now <= past.at or bool(plan.drafts) != bool(past.plan.drafts):
            return
        right = past.rates.get(plan.source, 0.0) if plan.drafts else 0.0
        own = Step(len(past.rows), plan, min(right, _SUREST))
        others = [self._past(other).step for other in lanes if other is not lane]
        self._for_lanes.took([own, *others], now - past.at)

    def settle(self, keeps: Callable[[Row], bool] = lambda row: False) -> None:
        """Plans the settles of the next step. A row that leaves is not settled, unless its windows and states
        are to be kept as they were at its end: `keeps`."""
        for number, chain in list(self._chains.items()):
            if chain.live and chain.open:
                continue
            del self._chains[number]
            for row in chain.open or [row for row in chain.rows if keeps(row)]:
                self._board.settle(row.number)

    def _past(self, lane: Lane) -> _Past:
        """What is known of a lane as it is now."""
        rows, found = tuple(lane.rows), self._pasts.get(lane.number)
        if found is None or found.rows != rows:
            found = self._pasts[lane.number] = _Past(rows)
            if len(rows) == 1:
                self._for_row.begin()
        return found
