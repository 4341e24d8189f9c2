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
"""Drafts of a step: few lengths, because a GPU plans anew for each, and up to 8 and 16 tokens cost less."""

BATCH_LENGTHS = (1, 2, 3, 7)
"""Drafts of each row in a ring of several rows: more pay on no table that we know."""

_SUREST, _GOOD = 0.99, 0.9
_WORTH = 1.06
"""Least gain of drafts: what reporting their rates costs, and what the seconds of a step vary by."""

_FURTHEST = 2.0  # times the expected seconds: a longer run is an accident
_DOUBT, _SEEN = 2, 7  # measurements that are assumed before there are any, and those that count in all
_WAITS = 15  # steps that tell how long they wait while lanes have drafts
_KEPT, _LIKENESS = (
    0.99,
    4.0,
)  # weight of a guess after each later one; right ones that count as the head tells

_FEW, _JUDGED, _SURELY, _REST = 6, 32, 3.0, 64
"""Runs that the guard judges together (least and most), the standard errors by which their mean must be below
0 to rule drafts out, and the steps for which it then does."""

_LONGEST_REST = 1024

_PROBE = 32
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
            for length in LENGTHS:
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


class Shares:
    """How much more or less often guesses were right at each place of a run than the head told of their
    source, in all answers. While few are known, they are right as often as the head tells."""

    def __init__(self) -> None:
        self._known: dict[Source, list[tuple[float, float]]] = {}  # by place: right ones, and those expected

    def add(self, source: Source, drafts: int, tokens: int, told: float) -> None:
        """Records a row's run that brought `tokens` tokens."""
        known = self._known.setdefault(source, [(0.0, 0.0)] * BATCH_LENGTHS[-1])
        for place in range(min(drafts, tokens, len(known))):
            right, expected = (_KEPT * each for each in known[place])
            known[place] = right + (place + 1 < tokens), expected + told

    def tokens(self, source: Source, drafts: int, told: float) -> float:
        """The tokens that a row's run of drafts brings in the mean."""
        known, reached, tokens = self._known.get(source, ()), 1.0, 1.0
        for place in range(drafts):
            right, expected = known[place] if place < len(known) else (0.0, 0.0)
            reached *= min(told * (right + _LIKENESS) / (expected + _LIKENESS), _SUREST)
            tokens += reached
        return tokens


class LanesPolicy:
    """The draft plans of several rows: the number of drafts that pays in each lane. A lane has one run at a
    time, because the others keep the stages busy.

    By the table a round takes what a stage computes of all lanes, and as long as the longest step takes from
    stage to stage. The head guesses besides, for all rows of a lane at once. Rounds without drafts tell how
    many times that they take. While a lane has drafts no step is announced ahead, so that each has to wait;
    the last of these rounds tell how long. Lanes decide in turn, by what the others did last.
    """

    def __init__(self, ring: RingFacts) -> None:
        self._stages, self._hop, self._sources = ring.stages, ring.hop, ring.sources
        self._most_rows = ring.draft_runs
        self._costs, self._head = ring.costs, ring.head or ring.costs
        self._plains = deque([1.0] * _DOUBT, maxlen=_SEEN)
        self._slower = 1.0
        self._waits = deque[float](maxlen=_WAITS)
        self._wait = self._unknown = 2 * ring.hop  # a message to the gateway and one from there
        self._guard = Guard()
        self._since = 0  # steps without drafts since the last with some
        self._gains: dict[tuple[int, tuple[int, ...]], float] = {}
        self.shares = Shares()

    def round(self, steps: Sequence[Step]) -> float:
        """Seconds from a row's tokens to its next ones, with these steps of all lanes."""
        busiest, way = self._table(steps)
        wait = self._wait if any(step.plan.drafts for step in steps) else 0.0
        return max(self._slower * busiest, self._slower * way + wait)

    def _table(self, steps: Sequence[Step]) -> tuple[float, float]:
        """Seconds for which the busiest stage computes, and in which the longest step goes through all."""
        stage = [_seconds(self._costs, step) for step in steps]
        head = [_seconds(self._head, step) + self._guessing(step, ahead=False) for step in steps]
        ahead = [self._guessing(step, ahead=True) for step in steps]
        way = max(
            first + (self._stages - 1) * other + more + self._stages * self._hop
            for first, other, more in zip(head, stage, ahead, strict=True)
        )
        return max(sum(stage) + sum(ahead), sum(head)), way

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
        if self._guard.rules_out:
            return _NO_DRAFTS
        plan, gain = self._best(Step(rows, _NO_DRAFTS, rates), most, others, guessed)
        return plan if gain > _WORTH else _NO_DRAFTS

    def pays(self, rows: int, others: Sequence[int]) -> bool:
        """Whether any drafts of a lane of `rows` rows would pay beside lanes of `others` if nearly all were
        right."""
        key = (rows, tuple(sorted(others)))
        if key not in self._gains:
            good = dict.fromkeys(self._sources, _GOOD)
            own, *rest = (Step(size, _NO_DRAFTS, good) for size in (rows, *others))
            self._gains[key] = self._best(own, BATCH_LENGTHS[-1], rest, MAX_UNSETTLED)[1]
        return self._gains[key] > _WORTH and not self._guard.rules_out

    def _best(self, own: Step, most: int, others: Sequence[Step], guessed: int) -> tuple[DraftPlan, float]:
        """The best plan of a lane, and times as fast as without drafts.

        Other lanes may follow, as one with drafts would wait for the rest. All lanes without drafts are what
        that is compared with.
        """
        best, gain = _NO_DRAFTS, 1.0
        all_rows = own.rows + sum(one.rows for one in others)
        follow = all_rows <= self._most_rows
        now = self._rate([own, *others])
        plain = self._rate([one.with_plan(_NO_DRAFTS) for one in (own, *others)]) if follow else now
        gain = max(gain, now / plain)
        for source, facts in self._sources.items():
            if not own.rates.get(source) or not facts.serves(all_rows):
                continue
            longest = min(most, MAX_DRAFTED // own.rows - 1, guessed if facts.ahead else most)
            for length in BATCH_LENGTHS:
                if length > longest:
                    break
                step = own.with_plan(DraftPlan(length, 1, source))
                times = self._rate([step, *others])
                if follow:
                    times = max(times, self._rate([step, *(one.with_plan(step.plan) for one in others)]))
                if times / plain > gain:
                    best, gain = step.plan, times / plain
        return best, gain

    def _rate(self, steps: Sequence[Step]) -> float:
        """Tokens a second with these steps of all lanes."""
        return sum(one.rows * self._tokens(one) for one in steps) / self.round(steps)

    def _tokens(self, step: Step) -> float:
        plan = step.plan
        return self.shares.tokens(plan.source, plan.drafts, step.rates.get(plan.source, 0.0))

    def took(self, steps: Sequence[Step], tokens: float, seconds: float, *, alike: bool = True) -> None:
        """Records the first of these steps of all lanes, which brought `tokens` tokens of each row. Only the
        guard counts a step that was not `alike` the lane's step before, with drafts or without."""
        busiest, way = self._table(steps)
        if any(step.plan.drafts for step in steps):
            plain = self.round([step.with_plan(_NO_DRAFTS) for step in steps])
            usual = max(plain, self.round(steps))
            self._guard.drafted(tokens - min(seconds, _FURTHEST * usual) / plain)
            if alike:
                self._waits.append(seconds - self._slower * way)
                self._wait, self._since = median(self._waits), 0
        else:
            self._guard.plain()
            self._since += 1
            if alike:
                self._plains.append(seconds / max(busiest, way))
                self._slower = median(self._plains)
            if self._since % _LONGEST_REST:
                return
            self._waits.clear()  # what was slow once is tried again
            self._wait = self._unknown
        self._gains.clear()


class Step(NamedTuple):
    """A step of a lane: its rows, its plan, and the probabilities that guesses are right, by source."""

    rows: int
    plan: DraftPlan
    rates: Rates = MappingProxyType({})

    def with_plan(self, plan: DraftPlan) -> Step:
        """A step of the same lane with another plan, if it can have that."""
        return self if self.rows * (1 + plan.drafts) > MAX_DRAFTED else self._replace(plan=plan)


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
    unguessed: int = 1  # steps since the last guess ahead

    @property
    def step(self) -> Step:
        return Step(len(self.rows), self.plan, self.rates)


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
        self._pause = 1  # steps of a lane from one guess ahead to the next, while none pays
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
        if not self.ahead or self._pause < _PROBE or past.unguessed >= self._pause or past.plan.drafts:
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
            self._pause = 1
            return best.drafts
        if best.drafts or past.unguessed < self._pause:
            past.unguessed += 1
            return 0
        self._pause, past.unguessed = min(2 * self._pause, _PROBE), 1
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
        past = self._past(lane)
        told = past.rates.get(chain.source, 0.0)
        for row in chain.open:
            tokens = brought.get(row.number, 0)
            self._board.bring(row.number, tokens)
            row.request.progress.accepted += tokens - run.first
            if run.first:
                self._for_lanes.shares.add(chain.source, run.drafts, tokens, told)
        plan = DraftPlan(run.drafts, under_way, chain.source)
        if len(chain.rows) > 1 or len(lanes) > 1:
            mean = fmean(brought.get(row.number, 0) for row in chain.open)
            self._round(lane, lanes, plan, now, mean)
        else:
            seconds = 0.0 if past.at is None else now - past.at
            self._for_row.took(plan, least, seconds, first=run.first)
        past.at, past.waits, past.plan = now, True, plan
        past.guessed = run.guesses
        past.rates = rates if least else past.rates

    def _round(
        self, lane: Lane, lanes: Sequence[Lane], plan: DraftPlan, now: float, tokens: float = 1.0
    ) -> None:
        """Records a step of a lane, which brought `tokens` tokens of each row."""
        past = self._past(lane)
        if past.at is None or now <= past.at:
            return
        others = [self._past(other).step for other in lanes if other is not lane]
        steps = [Step(len(past.rows), plan, past.rates), *others]
        alike = bool(plan.drafts) == bool(past.plan.drafts)
        self._for_lanes.took(steps, tokens, now - past.at, alike=alike)

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
