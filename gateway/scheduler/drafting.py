"""The number of tokens that the head drafts for the one row of a ring, by step times and accepted drafts.

The head drafts tokens (node.engine.drafts), a step computes them along with the last one, and accepted drafts
need no step of their own. Further steps may follow before the first is verified: a chain of runs. Each run
continues where the run before ends if all of its drafts are right. At the first wrong draft the rest of the
chain counts for nothing, and the next step cuts all caches to the accepted tokens (`Settle`). The gateway
sees how many tokens each run brought, and none of them.

Nothing is drafted with more rows, nor while the head finds no text that the answer may be repeating.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

from sealring.gateway.scheduler.facts import RingFacts, StepCosts
from sealring.gateway.scheduler.lane import Lane
from sealring.gateway.scheduler.request import Row
from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.composition import MAX_UNSETTLED
from sealring.v1 import control_pb2 as control

DEPTHS = (1, 3, 7, 15)
"""Drafts of a step: few lengths, because a GPU plans anew for each."""

LOSS, AT_ONCE = 0.01, 4.0
"""The cost that wrong drafts may have: a part of the steps that an answer takes without them, and a number of
steps at once."""

_SUREST = 0.99
_FURTHEST = 2.0  # times the expected seconds: a longer run is an accident, unless the next one is as long
_DOUBT, _SEEN = 2, 7  # chains that are assumed to take the table's seconds, and chains that count in all


class Likely(NamedTuple):
    """The probabilities that the head's next guess is right, by its source; 0 where there is none."""

    looked_up: float = 0.0
    modelled: float = 0.0


class Way(NamedTuple):
    """Drafts of a run, runs under way behind each other, and whether the draft model makes the drafts."""

    drafts: int = 0
    runs: int = 0
    modelled: bool = False


class Depth:
    """The number of drafts that pays, of runs under way behind each other, and the source of the drafts.

    A first run of d drafts takes a step without drafts and, by the table, d more tokens in all stages. With n
    runs under way another is done after the n-th part of that, and no sooner than the slowest stage is. A
    draft model takes its own time before the first run, and the head has to guess and compute each further
    one. The measured chains of n correct it, by their median. The way with most tokens a second is best.

    A credit, in steps without drafts, falls by the time that runs take longer than such steps for as many
    tokens, and rises by the time that they take less. Each step without drafts behind another pays back LOSS.
    No drafts are made that could lose more than AT_ONCE if they are wrong and stages share a processor.
    """

    def __init__(
        self,
        costs: StepCosts,
        stages: int,
        *,
        runs: int = 0,
        draft: float = 0.0,
        head: StepCosts | None = None,
    ) -> None:
        """`runs`: how many may be under way at once, by default one for each stage. `draft`: seconds in which
        the draft model guesses a token; 0: there is none. `head`: the head's own cost table."""
        self._stages, self._draft, self._most_runs = stages, draft, runs or stages
        self._costs, self._head = costs, head or costs
        self._more = {depth: stages * (costs.chunk(1 + depth) - costs.chunk(1)) for depth in (0, *DEPTHS)}
        kinds = [(runs + 1, modelled) for runs in range(stages) for modelled in (False, True)]
        self._took = {kind: deque([1.0] * _DOUBT, maxlen=_SEEN) for kind in kinds}
        self._times = dict.fromkeys(kinds, 1.0)  # what the table says chains take, by runs under way
        self._unseen = False
        self._slow = False
        self._plains: deque[float] = deque(maxlen=_SEEN)
        self._plain = 0.0
        self._credit = 0.0
        # of the last one: seconds expected, seconds seen, and its way with the most runs that were under way
        self._chain: tuple[float, float, Way] | None = None

    def begin(self) -> None:
        """Begins another answer. If the last one had no chain, the measured chains are doubted."""
        self._credit, self._chain = 0.0, None
        if self._unseen:
            for kind in self._took:
                self._see(*kind, 1.0)
        self._unseen = True

    def best(self, most: int, likely: Likely, modelled: bool | None = None) -> Way:
        """The way that brings most tokens a second, with at most `most` drafts in a run; `Way()` for none.
        A chain goes on with its own source of drafts, which `modelled` names."""
        best, gain = Way(), 1.0
        lost = self._credit + AT_ONCE
        for source, right in enumerate(likely):
            if not (self._plain and right) or modelled not in (None, bool(source)):
                continue
            for depth in DEPTHS:
                for runs in range(1, 1 + self._most_runs):
                    way = Way(depth, runs, bool(source))
                    if depth <= most and self._loss(way) <= lost and self._gain(right, way) > gain:
                        best, gain = way, self._gain(right, way)
        return best

    def plain(self, seconds: float) -> None:
        """Records the seconds of a step without drafts that followed another."""
        self._plains.append(seconds)
        most = _FURTHEST * median(self._plains)  # runs count with their own seconds, so this is a mean
        self._plain = fmean(min(each, most) for each in self._plains)
        self._credit = max(self._credit, min(0.0, self._credit + LOSS))

    def took(self, way: Way, tokens: int, seconds: float, *, first: bool = True) -> None:
        """Records a run that brought `tokens` tokens, with `way.runs` under way, or a step without drafts
        that was not announced behind another. Behind a chain both wait for its runs in vain, so both measure
        it."""
        if not self._plain or seconds <= 0:
            return
        alone = self._first(way)
        expected, spent, ahead = self._chain or (0.0, 0.0, way)
        runs = max(way.runs, ahead.runs, 1)
        expected, spent = expected + (alone if first else self._next(way)), spent + seconds
        if first and self._chain:
            self._see(ahead.runs, ahead.modelled, spent / expected)
            self._unseen = False
        slow = seconds > _FURTHEST * expected * self._times[runs, way.modelled]
        self._credit += tokens - (alone if slow and not self._slow else seconds) / self._plain
        self._slow = slow if way.drafts else self._slow
        longest = way._replace(runs=runs)
        if first:
            self._chain = (alone + self._vain(longest), seconds, longest) if way.drafts else None
        else:
            self._chain = expected, spent, longest

    def _see(self, runs: int, modelled: bool, times: float) -> None:
        self._took[runs, modelled].append(times)
        self._times[runs, modelled] = median(self._took[runs, modelled])

    def _gain(self, right: float, way: Way) -> float:
        """Times as fast as without drafts."""
        right = min(right, _SUREST)
        whole = right ** (1 + way.drafts)
        takes = self._first(way) + self._next(way) * whole / (1 - whole) + self._vain(way)
        return self._plain / takes / (1 - right) / self._times[way.runs, way.modelled]

    def _loss(self, way: Way) -> float:
        """Steps that are lost at most if no draft is right."""
        return max(1.0, self._times[1, way.modelled]) * way.runs * self._first(way) / self._plain - 1

    def _first(self, way: Way) -> float:
        """Seconds of a chain's first run, or of a step without drafts."""
        return self._plain + self._more[way.drafts] + way.drafts * self._draft * way.modelled

    def _next(self, way: Way) -> float:
        """Seconds from a run of a chain to the next one."""
        tokens = 1 + way.drafts
        head = self._head.chunk(tokens) + tokens * self._draft * way.modelled
        back = (self._plain + self._more[way.drafts]) / max(1, way.runs)
        return max(back, head, self._costs.chunk(tokens))

    def _vain(self, way: Way) -> float:
        """Seconds that the step behind a chain waits in stages for runs in vain."""
        return self._more[way.drafts] * max(0, way.runs - 1) / self._stages


@dataclass(slots=True, eq=False)
class _Run:
    chain: _Chain
    drafts: int
    first: bool


@dataclass(slots=True, eq=False)
class _Chain:
    """Runs of one row, of `tokens` tokens together, that no settle has followed yet. `live` runs may still
    bring tokens. All drafts are of one source."""

    lane: Lane
    row: Row
    modelled: bool = False
    tokens: int = 0
    live: list[_Run] = field(default_factory=list)

    @property
    def most(self) -> int:
        """Drafts of another run, by the limits of the row and of a chain; the last token is left to steps
        without drafts."""
        left = self.lane.left(self.row) - sum(1 + run.drafts for run in self.live)
        return min(self.row.drafts, left - 2, MAX_UNSETTLED - self.tokens - 1)


class Drafting:
    """The steps of one epoch that have drafts, and the settles that follow them."""

    def __init__(self, ring: RingFacts) -> None:
        self._possible = ring.speculates
        self._depth = Depth(ring.costs, ring.stages, runs=ring.runs, draft=ring.draft, head=ring.head)
        self._row = 0
        self._likely = Likely()
        self._chain: _Chain | None = None
        self._runs: deque[_Run] = deque()
        self._at: float | None = None
        self._waits = False  # behind a chain steps are announced one by one, because the next may have drafts

    def wanted(self, lane: Lane, rows: int) -> Way | None:
        """The way of the lane's next step; None if it has to wait for those under way. `rows` are those
        of the ring and all that wait for it."""
        alone, chain = self.asks(lane, rows) and not lane.ready, self._chain
        if chain is not None and chain.lane is lane and chain.live and not chain.row.closed:
            way = self._depth.best(chain.most, self._likely, chain.modelled) if alone else Way()
            return way if len(chain.live) < way.runs else None
        if not alone:
            return Way()
        (row,) = lane.rows.values()
        if row.number != self._row:
            self._row, self._likely, self._at, self._waits = row.number, Likely(), None, False
            self._depth.begin()
        if row.closed:
            return Way()
        way = self._depth.best(_Chain(lane, row).most, self._likely)
        # The first run of a chain waits until no other step can bring a token of the row. For that run the
        # head calls `Lookup.drafts` in its compute loop, for tokens that come `Lookup.add` and `likely` in
        # its receiving thread: by this rule never at once, so node.engine.drafts.Lookup has no lock.
        return None if lane.outstanding and (way.drafts or self._waits) else way

    def asks(self, lane: Lane, rows: int) -> bool:
        """Whether the head reports the probability of a right draft: only a row that may get drafts needs
        it."""
        return self._possible and rows == 1 and any(row.drafts for row in lane.rows.values())

    def announced(self, lane: Lane, way: Way) -> None:
        first = self._chain is None
        if self._chain is None:
            (row,) = lane.rows.values()
            self._chain = _Chain(lane, row, way.modelled)
        run = _Run(self._chain, way.drafts, first)
        self._runs.append(run)
        self._chain.live.append(run)
        self._chain.tokens += 1 + way.drafts
        self._chain.row.request.progress.drafted += way.drafts + (not first)

    def plain(self, now: float, *, follows: bool, likely: Likely) -> None:
        """A step without drafts is done. `follows`: only one other step was under way with it."""
        if self._possible and self._at is not None:
            if follows:
                self._depth.plain(now - self._at)
            else:
                self._depth.took(Way(), 1, now - self._at)
        self._at, self._likely, self._waits = now, likely, False

    def done(self, tokens: int, now: float, *, likely: Likely, refuted: bool = False) -> None:
        """The first run under way brought `tokens` tokens, and the draft behind them is `refuted`. Raises
        InvalidInput (BAD_STEP) if no honest head can bring as many."""
        run = self._runs.popleft()
        chain = run.chain
        live, under_way = run in chain.live, len(chain.live)
        if chain.row.closed:
            return  # it leaves, so no cache of it is settled
        if not (run.first if live else 0) <= tokens <= (1 + run.drafts if live else 0):
            raise InvalidInput(f"a step with {run.drafts} drafts brought {tokens} tokens", reason="BAD_STEP")
        if not live:
            return
        chain.live.remove(run)
        if refuted or tokens <= run.drafts:
            chain.live.clear()
        chain.lane.steps += tokens
        chain.row.request.progress.accepted += tokens - run.first
        seconds = 0.0 if self._at is None else now - self._at
        self._depth.took(Way(run.drafts, under_way, chain.modelled), tokens, seconds, first=run.first)
        self._at, self._waits = now, True
        self._likely = likely if tokens else self._likely

    def settling(self) -> list[control.Change]:
        """The changes that the next step begins with."""
        chain = self._chain
        if chain is None or (chain.live and not chain.row.closed):
            return []
        self._chain = None
        if chain.row.closed:
            return []
        held = chain.row.prompt_tokens + chain.row.limit - 1 - chain.lane.left(chain.row)
        return [control.Change(settle=control.Settle(row=chain.row.number, tokens=held))]
