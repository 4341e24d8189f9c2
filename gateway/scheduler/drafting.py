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

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
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
_HOPED = 0.5
"""Probability that a guess ahead is right while none was compared."""

_WORTH = 1.06
"""Least gain of drafts: what reporting their rates costs, and what the seconds of a step vary by."""

_DOUBT, _SEEN = 2, 7
"""Rounds of a kind as which the table counts, and those that count in all."""

_KEPT, _KEPT_LOOKED_UP, _LIKENESS = 0.99, 0.85, 1.0
"""Weights of a guess after each later one, and right ones that count as the head tells. Text that repeats
ends at once."""

_SPENT, _STINT, _TRIED = 0.0075, 8, 3
"""Share of the time that trials may lose, steps of each lane for which a choice holds, and those of a trial
whose loss is saved up before."""

_SELDOM = 32
"""Steps of a lane from one that asks for rates to the next while no drafts pay."""


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


class Shares:
    """How much more or less often guesses were right at each place of a run than the head told of their
    source, in all answers. While few are known it is as at the place before, and at the first one as told."""

    def __init__(self) -> None:
        self._known: dict[Source, list[tuple[float, float]]] = {}  # by place: right ones, and those expected

    def add(self, source: Source, drafts: int, tokens: int, told: float) -> None:
        """Records a row's run that brought `tokens` tokens."""
        known = self._known.setdefault(source, [(0.0, 0.0)] * LENGTHS[-1])
        kept = _KEPT_LOOKED_UP if source == LOOKUP else _KEPT
        for place in range(min(drafts, tokens, len(known))):
            right, expected = (kept * each for each in known[place])
            known[place] = right + (place + 1 < tokens), expected + told

    def tokens(self, source: Source, drafts: int, told: float) -> tuple[float, float]:
        """The tokens that a row's run of drafts brings in the mean, and the probability that these and the
        next guess are all right."""
        known, reached, tokens, times = self._known.get(source, ()), 1.0, 0.0, 1.0
        for place in range(1 + drafts):
            tokens += reached
            right, expected = known[place] if place < len(known) else (0.0, 0.0)
            times = (right + _LIKENESS * times) / (expected + _LIKENESS)
            reached *= min(told * times, _SUREST)
        return tokens, reached


class Seconds:
    """Seconds of rounds beyond those of the table: medians of the last ones of a kind. A kind is where the
    round was, and how much was drafted in it. One that is not known is like the nearest that has drafts."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Hashable, int], deque[float]] = {}

    def see(self, where: Hashable, drafts: int, seconds: float) -> None:
        """Records a round that took these `seconds` beyond those of the table."""
        known = self._seen.get((where, drafts))
        if known is None:
            usual = self.beyond(where, drafts)
            known = self._seen[where, drafts] = deque([usual] * _DOUBT, maxlen=_SEEN)
        known.append(seconds)

    def beyond(self, where: Hashable, drafts: int) -> float:
        known = self._seen.get((where, drafts))
        if known is None and drafts:
            near = [amount for place, amount in self._seen if place == where and amount]
            nearest = min(near, key=lambda amount: abs(amount - drafts), default=0)
            known = self._seen.get((where, nearest)) if nearest else None
        return median(known) if known else 0.0


class Trials:
    """Chooses the number of drafts that gains most, and now and then another, because only rounds tell how
    long they take and what they bring. What that loses is saved up before: a share of all time."""

    def __init__(self) -> None:
        self.gains: Mapping[int, float] = {0: 1.0}
        """By drafts: times as fast as without."""
        self._saved = 0.0  # seconds that trials may lose
        self._chosen = self._left = 0  # drafts, and the rounds for which they are kept to
        self._trial = False
        self._since: dict[int, int] = {}  # by drafts: rounds since the last with as many

    def best(self, gains: Mapping[int, float]) -> int:
        """The number of drafts of the next round. A choice holds for some rounds, so that they are timed."""
        best = max(gains, key=gains.__getitem__)
        if self._left and self._chosen in gains:
            half = (gains[0] + gains[best]) / 2
            if self._trial or gains[self._chosen] > half:
                return self._chosen
        return best if gains[best] > _WORTH else 0

    def took(self, drafts: int, tokens: float, seconds: float, plain: float, lanes: int = 1) -> None:
        """Records a round; `plain`: seconds of one without drafts."""
        for each in self.gains:
            self._since[each] = 1 + self._since.get(each, 0)
        self._since[drafts] = 0
        most = max(self.gains.values())
        self._saved += _SPENT * seconds
        if self._left:
            self._left -= 1
            if self._trial:
                self._saved -= max(0.0, seconds - tokens * plain / most)
                self._left *= self._saved > 0
            return
        self._chosen, self._left = self.best(self.gains), _STINT * lanes
        costs = {
            each: (1 + _TRIED * (most / gain - 1)) * lanes * plain
            for each, gain in self.gains.items()
            if each != self._chosen and gain * plain > 0
        }
        tried = max(costs, key=lambda each: self._since[each] / costs[each], default=0)
        self._trial = tried in costs and self._saved >= costs[tried]
        if self._trial:
            self._chosen = tried
            self._saved -= lanes * plain


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

    def __init__(self, ring: RingFacts, shares: Shares | None = None) -> None:
        self._stages, self._sources, self._most_runs = ring.stages, ring.sources, ring.runs or ring.stages
        lengths = range(1 + LENGTHS[-1])  # of chains that began beside other lanes, too
        self._chunks = [ring.costs.chunk(1 + length) for length in lengths]
        self._at_head = [(ring.head or ring.costs).chunk(1 + length) for length in lengths]
        self._hops = ring.stages * ring.hop
        self._seconds, self._trials, self._shares = Seconds(), Trials(), shares or Shares()
        self._plains: deque[float] = deque(maxlen=_SEEN)
        self._plain = 0.0
        self._told: Rates = {}
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
        if not self.ready:
            return _NO_DRAFTS
        found = {0: (1.0, _NO_DRAFTS)}
        for source, facts in self._sources.items():
            right = rates.get(source, 0.0)
            if not right or own not in (None, source):
                continue
            for length in LENGTHS:
                if length > min(most, guessed if facts.ahead else most, facts.block or most):
                    break
                for runs in range(1, 2 if facts.ahead else 1 + self._most_runs):
                    plan = DraftPlan(length, runs, source)
                    found[length] = max(found.get(length, (0.0, plan)), (self._gain(right, plan), plan))
        gains = {length: gain for length, (gain, _) in found.items()}
        self._told = rates
        if own is None and guessed == MAX_UNSETTLED:
            self._trials.gains = gains
        return found[self._trials.best(gains)][1]

    def plain(self, seconds: float) -> None:
        """Records the seconds of a step without drafts that followed another."""
        self._plains.append(seconds)
        self._plain = median(self._plains)
        self._trials.took(0, 1, seconds, self._plain)

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
                beyond = (spent - expected - self._vain(begun)) / (behind + 1)
                self._seconds.see((begun.source, begun.runs), begun.drafts, beyond)
            else:
                self._chain = begun, behind + 1, expected, spent
        if first:
            self._chain = (plan, 1, alone, seconds) if plan.drafts else None
        if plan.drafts and first:
            self._shares.add(plan.source, plan.drafts, tokens, self._told.get(plan.source, 0.0))
        self._trials.took(plan.drafts, tokens, seconds, self._plain)

    def _gain(self, right: float, plan: DraftPlan) -> float:
        """Times as fast as without drafts."""
        tokens, on = self._shares.tokens(plan.source, plan.drafts, right)
        runs = 1 / (1 - on)
        takes = self._first(plan) + self._next(plan) * (runs - 1) + self._vain(plan)
        takes += runs * self._seconds.beyond((plan.source, plan.runs), plan.drafts)
        return self._plain * tokens * runs / takes

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


class LanesPolicy:
    """The draft plans of several rows: the number of drafts that pays in each lane. A lane has one run at a
    time, because the others keep the stages busy.

    By the table a round takes what a stage computes of all lanes, and as long as the longest step takes from
    stage to stage. The head guesses besides, for all rows of a lane at once. Rounds without drafts tell how
    many times that they take. While a lane has drafts no step is announced ahead, so that each has to wait;
    the last of these rounds tell how long. Lanes decide in turn, by what the others did last.
    """

    def __init__(self, ring: RingFacts, shares: Shares | None = None) -> None:
        self._stages, self._hop, self._sources = ring.stages, ring.hop, ring.sources
        self._most_rows = ring.draft_runs
        self._costs, self._head = ring.costs, ring.head or ring.costs
        self._seconds, self._trials, self._shares = Seconds(), Trials(), shares or Shares()
        self._gains: dict[tuple[int, tuple[int, ...]], float] = {}

    def round(self, steps: Sequence[Step]) -> float:
        """Seconds from a row's tokens to its next ones, with these steps of all lanes: with drafts no fewer
        than without."""
        kinds = [steps, [step.with_plan(_NO_DRAFTS) for step in steps]]
        return max(self._table(each) + self._seconds.beyond(*_kind(each)) for each in kinds)

    def _table(self, steps: Sequence[Step]) -> float:
        """Seconds for which the busiest stage computes, or in which the longest step goes through all, with
        drafts to the gateway and back too."""
        stage = [_seconds(self._costs, step) for step in steps]
        head = [_seconds(self._head, step) + self._guessing(step, ahead=False) for step in steps]
        ahead = [self._guessing(step, ahead=True) for step in steps]
        way = max(
            first + (self._stages - 1) * other + more + self._stages * self._hop
            for first, other, more in zip(head, stage, ahead, strict=True)
        )
        way += 2 * self._hop * any(step.plan.drafts for step in steps)
        return max(sum(stage) + sum(ahead), sum(head), way)

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
        found = self._plans(Step(rows, _NO_DRAFTS, rates), most, others, guessed)
        gains = {length: gain for length, (gain, _) in found.items()}
        if guessed == MAX_UNSETTLED:
            self._trials.gains = gains | {0: 1.0}
        return found[self._trials.best(gains)][1]

    def pays(self, rows: int, others: Sequence[int]) -> bool:
        """Whether any drafts of a lane of `rows` rows would pay beside lanes of `others` if nearly all were
        right."""
        key = (rows, tuple(sorted(others)))
        if key not in self._gains:
            good = dict.fromkeys(self._sources, _GOOD)
            own, *rest = (Step(size, _NO_DRAFTS, good) for size in (rows, *others))
            found = self._plans(own, BATCH_LENGTHS[-1], rest, MAX_UNSETTLED)
            self._gains[key] = max(gain for gain, _ in found.values())
        return self._gains[key] > _WORTH

    def _plans(
        self, own: Step, most: int, others: Sequence[Step], guessed: int
    ) -> dict[int, tuple[float, DraftPlan]]:
        """The plans of a lane by drafts, each with how many times as fast as without drafts it is.

        Other lanes follow, if all may have drafts: one that does not would wait for the rest.
        """
        all_rows = own.rows + sum(one.rows for one in others)
        follow = all_rows <= self._most_rows

        def rate(steps: Sequence[Step]) -> float:
            return sum(one.rows * self._tokens(one) for one in steps) / self.round(steps)

        def best(plan: DraftPlan) -> float:
            return rate([own.with_plan(plan), *(one.with_plan(plan) if follow else one for one in others)])

        plain = rate([one.with_plan(_NO_DRAFTS) if follow else one for one in (own, *others)])
        found = {0: (best(_NO_DRAFTS) / plain, _NO_DRAFTS)}
        for source, facts in self._sources.items():
            if not own.rates.get(source) or not facts.serves(all_rows):
                continue
            longest = min(most, MAX_DRAFTED // own.rows - 1, guessed if facts.ahead else most)
            for length in BATCH_LENGTHS:
                if length > longest:
                    break
                plan = DraftPlan(length, 1, source)
                found[length] = max(found.get(length, (0.0, plan)), (best(plan) / plain, plan))
        return found

    def _tokens(self, step: Step) -> float:
        plan = step.plan
        return self._shares.tokens(plan.source, plan.drafts, step.rates.get(plan.source, 0.0))[0]

    def took(self, steps: Sequence[Step], tokens: float, seconds: float, *, steady: bool = True) -> None:
        """Records the first of these steps of all lanes, which brought `tokens` tokens of each row. How long
        it took counts once the lane's steps are `steady`: two before had as many drafts."""
        if steady:
            self._seconds.see(*_kind(steps), seconds - self._table(steps))
            self._gains.clear()
        plain = self.round([step.with_plan(_NO_DRAFTS) for step in steps])
        self._trials.took(steps[0].plan.drafts, tokens, seconds, plain, len(steps))


class Step(NamedTuple):
    """A step of a lane: its rows, its plan, and the probabilities that guesses are right, by source."""

    rows: int
    plan: DraftPlan
    rates: Rates = MappingProxyType({})

    def with_plan(self, plan: DraftPlan) -> Step:
        """A step of the same lane with another plan, if it can have that."""
        return self if self.rows * (1 + plan.drafts) > MAX_DRAFTED else self._replace(plan=plan)


def _kind(steps: Sequence[Step]) -> tuple[tuple[int, ...], int]:
    """The rows of lanes, and the tokens that these steps draft in all."""
    return tuple(sorted(step.rows for step in steps)), sum(step.rows * step.plan.drafts for step in steps)


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
    alike: int = 0  # steps before the last with as many drafts
    guessed: int = 0  # tokens that were guessed ahead and came with those of the last step
    unasked: int = _SELDOM  # steps since the last that asked for rates

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
        self._shares = Shares()
        self._for_row = RowPolicy(ring, self._shares)
        self._for_lanes = LanesPolicy(ring, self._shares)
        self._last = _HOPED  # probability that a guess ahead is right, as last told
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
            and (rows == 1 or not self._rests(lane, lanes, rows))
        )

    def _rests(self, lane: Lane, lanes: Sequence[Lane], rows: int) -> bool:
        """Whether the next step of a lane among others asks for nothing, since drafts do not pay. With each
        that asks, a source that guesses ahead computes the rows' tokens at the busy tail."""
        past = self._past(lane)
        if past.unasked >= _SELDOM or past.plan.drafts:
            return False
        most = min(row.drafts for row in lane.rows.values())
        if self._best(lane, lanes, rows, most).drafts:
            return False
        others = [len(one.rows) for one in lanes if one is not lane]
        return bool(self.ahead) or not self._for_lanes.pays(len(lane.rows), others)

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
        there, past = list(lane.rows.values()), self._past(lane)
        asks = self.asks(lane, lanes, rows)
        past.unasked = 0 if asks else past.unasked + 1
        able = asks and self._ahead_of(rows)
        if not able or (plan.drafts and plan.source != self.ahead) or any(row.closed for row in there):
            return 0
        most = min(min(row.drafts, self._board.left(row) - plan.drafts - 3) for row in there)
        best = self._best(lane, lanes, rows, most)
        return best.drafts if best.source == self.ahead else 0

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
        past.rates = self._told(rates or (past.rates if self.ahead else rates))  # none if it rests
        past.at, past.waits, past.plan = now, False, DraftPlan()
        past.guessed = guesses if self.ahead else MAX_UNSETTLED

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
            if run.first and (len(chain.rows) > 1 or len(lanes) > 1):
                self._shares.add(chain.source, run.drafts, tokens, told)
        plan = DraftPlan(run.drafts, under_way, chain.source)
        if len(chain.rows) > 1 or len(lanes) > 1:
            mean = fmean(brought.get(row.number, 0) for row in chain.open)
            self._round(lane, lanes, plan, now, mean)
        else:
            seconds = 0.0 if past.at is None else now - past.at
            self._for_row.took(plan, least, seconds, first=run.first)
        past.at, past.waits, past.plan = now, True, plan
        past.guessed = run.guesses if self.ahead else MAX_UNSETTLED
        past.rates = self._told(rates) if least else past.rates

    def _told(self, rates: Rates) -> Rates:
        """What the head told. It tells nothing of guesses ahead while none was compared of late."""
        if self.ahead:
            self._last = rates.get(self.ahead) or self._last
            return {**rates, self.ahead: self._last}
        return rates

    def _round(
        self, lane: Lane, lanes: Sequence[Lane], plan: DraftPlan, now: float, tokens: float = 1.0
    ) -> None:
        """Records a step of a lane, which brought `tokens` tokens of each row."""
        past = self._past(lane)
        if past.at is None or now <= past.at:
            return
        others = [self._past(other).step for other in lanes if other is not lane]
        steps = [Step(len(past.rows), plan, past.rates), *others]
        past.alike = past.alike + 1 if plan.drafts == past.plan.drafts else 0
        self._for_lanes.took(steps, tokens, now - past.at, steady=past.alike > 1)

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
            found = self._pasts[lane.number] = _Past(rows, guessed=0 if self.ahead else MAX_UNSETTLED)
            if len(rows) == 1:
                self._for_row.begin()
        return found
