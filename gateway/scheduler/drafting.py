"""How many tokens the head guesses for the one row of a ring, by what steps take and how many were right.

The head guesses tokens (node.engine.drafts), a step computes them along with the last one, and those that
were right need no step of their own. A ring with one row has stages that are idle, so further steps follow
before the first is verified: a chain of runs, each of which goes on where the one before ends if all of its
guesses are right. At the first wrong one the rest of the chain counts for nothing, and the next step cuts all
caches to what was right (`Settle`). The gateway sees how many tokens each run brought, and none of them.

With more rows nothing is guessed, nor where the head knows of nothing that the answer repeats.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sealring.gateway.scheduler.actions import RingFacts
from sealring.gateway.scheduler.costs import StepCosts
from sealring.gateway.scheduler.lane import Lane
from sealring.gateway.scheduler.row import Row
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.composition import MAX_UNSETTLED
from sealring.v1 import control_pb2 as control

DEPTHS = (1, 3, 7, 15)
"""Drafts of a step: few lengths, because a GPU plans anew for each."""

LOSS = 0.02
"""Of the time that an answer takes without drafts, what drafts that are wrong may cost."""

_RIGHT, _TRIED = 1.0, 2.0
"""Drafts that count as right and as tried beside those that were."""

_KEPT, _WEIGHT = 0.7, 0.125
"""What the drafts before weigh after a run, and what one time weighs in a mean."""

_FURTHEST = 2.0
"""Times that a run may differ from what is expected of it: what is beyond is something else."""


class Depth:
    """How many drafts pay, for the answer of one row after the other.

    A run of d drafts takes all stages as long as a step without, and what the table of costs says that d more
    tokens take, until such runs have been timed. In a chain another is done after a stage's part of that,
    which `_crowd` corrects. With `_right` of `_tried` drafts right, d are chosen such that a chain brings
    most tokens a second.

    What an answer loses by drafts comes out of a credit. What it gains by them fills that, and its time
    without them at a rate of LOSS. No run is longer than the credit allows if all of its drafts are wrong;
    an answer begins with what the shortest may lose.
    """

    def __init__(self, costs: StepCosts, stages: int) -> None:
        self._stages = stages
        self._more = {depth: stages * (costs.chunk(1 + depth) - costs.chunk(1)) for depth in DEPTHS}
        self._timed: set[int] = set()
        self._crowd = 1.0
        self._plain: float | None = None
        self.begin()

    def begin(self) -> None:
        """Another answer."""
        self._right = self._tried = 0.0
        self._credit = self._loss(DEPTHS[0])

    def wanted(self, most: int) -> int:
        """Drafts of a chain's first run, at most so many; 0 where none are worth it."""
        depths = [depth for depth in DEPTHS if depth <= most and self._loss(depth) <= self._credit]
        if self._plain is None or not depths:
            return 0
        best = max(depths, key=self._rate)
        return best if self.pays(best) else DEPTHS[0]

    def pays(self, drafts: int) -> bool:
        """Whether a chain of such runs is expected to bring more than steps without."""
        return self._plain is not None and self._rate(drafts) * self._plain > 1

    def plain(self, seconds: float) -> None:
        """What a step without drafts took."""
        if self._plain is None:
            self._plain = seconds
        seconds = min(seconds, _FURTHEST * self._plain)
        self._plain += _WEIGHT * (seconds - self._plain)
        if self._credit < self._loss(DEPTHS[0]):
            self._credit += LOSS * seconds

    def waited(self, seconds: float) -> None:
        """What a step without drafts took that was not announced ahead, because of drafts."""
        if self._plain is not None:
            self._credit -= max(0.0, min(seconds, _FURTHEST * self._plain) - self._plain)

    def run(self, drafts: int, right: int, tried: int, tokens: int, seconds: float, *, first: bool) -> None:
        """A run has brought so many tokens, `seconds` after what came before it."""
        self._right = _KEPT * self._right + right
        self._tried = _KEPT * self._tried + tried
        if self._plain is None or seconds <= 0:
            return
        expected = self._first(drafts) if first else self._next(drafts)
        seconds = min(seconds, _FURTHEST * expected)
        if first:
            weight = _WEIGHT if drafts in self._timed else 1.0
            self._timed.add(drafts)
            self._more[drafts] += weight * (max(0.0, seconds - self._plain) - self._more[drafts])
        else:
            self._crowd += _WEIGHT * (self._crowd * seconds / expected - self._crowd)
        self._credit += tokens * self._plain - seconds

    def _rate(self, drafts: int) -> float:
        """Tokens a second of a chain until it breaks, each draft as likely right as the last ones were."""
        right = (self._right + _RIGHT) / (self._tried + _TRIED)
        whole = right ** (1 + drafts)
        return 1 / (1 - right) / (self._first(drafts) + self._next(drafts) * whole / (1 - whole))

    def _first(self, drafts: int) -> float:
        return (self._plain or 0.0) + self._loss(drafts)

    def _next(self, drafts: int) -> float:
        return self._crowd * self._first(drafts) / self._stages

    def _loss(self, drafts: int) -> float:
        """Seconds that a run loses where no draft is right: more drafts take no less time."""
        return max(more for depth, more in self._more.items() if depth <= drafts)


@dataclass(slots=True, eq=False)
class _Chain:
    """Runs of one row, of so many tokens each, after which the members are not yet told what it holds."""

    lane: Lane
    row: Row
    drafts: int
    runs: int = 0
    live: int = 0  # runs under way that may bring something

    @property
    def more(self) -> bool:
        """Whether the limits of the row and of a chain leave room for another run."""
        each = 1 + self.drafts
        return each * (self.runs + 1) <= MAX_UNSETTLED and each * (self.live + 1) < self.lane.left(self.row)


@dataclass(slots=True, eq=False)
class _Run:
    chain: _Chain
    first: bool
    dead: bool = False


class Drafting:
    """Which steps of one epoch have drafts, and what has to be said after them."""

    def __init__(self, ring: RingFacts) -> None:
        self._possible = ring.speculates
        self._stages = ring.stages
        self._depth = Depth(ring.costs, ring.stages)
        self._row = 0
        self._knows = False
        self._chain: _Chain | None = None
        self._runs: deque[_Run] = deque()
        self._at: float | None = None
        self._waits = False  # the next step without drafts could not be announced ahead

    def wanted(self, lane: Lane, rows: int) -> int | None:
        """Drafts of the lane's next step; None where it has to wait for those under way. `rows`: those of the
        ring and all that wait for it."""
        alone = self._possible and rows == 1 and len(lane.rows) == 1 and not lane.ready
        chain = self._chain
        if chain is not None and chain.lane is lane and chain.live and not chain.row.closed:
            on = alone and chain.live < self._stages and chain.more and self._depth.pays(chain.drafts)
            return chain.drafts if on else None
        if not alone:
            return 0
        (row,) = lane.rows.values()
        if row.number != self._row:
            self._row, self._at, self._knows = row.number, None, False
            self._depth.begin()
        if row.closed or not self._knows:
            return 0
        drafts = self._depth.wanted(min(row.drafts, lane.left(row) - 2))  # the limit is left to other steps
        if not drafts or not lane.outstanding:
            return drafts
        self._waits = True
        return None

    def asks(self, lane: Lane) -> bool:
        """Whether it matters if the head could guess how the lane's row goes on; else it is not to tell."""
        return self._possible and any(row.drafts for row in lane.rows.values()) and len(lane.rows) == 1

    def announced(self, lane: Lane, drafts: int) -> None:
        chain = self._chain
        first = chain is None
        if chain is None:
            (row,) = lane.rows.values()
            chain = self._chain = _Chain(lane, row, drafts)
        self._waits = True
        chain.runs += 1
        chain.live += 1
        chain.row.request.drafted += drafts + (not first)
        self._runs.append(_Run(chain, first))

    def plain(self, now: float, *, follows: bool, knows: bool) -> None:
        """A step without drafts is done; `follows` another that was under way with it, and nothing else.
        `knows`: the head could guess how the row goes on."""
        if self._possible and self._at is not None:
            if follows:
                self._depth.plain(now - self._at)
            elif self._waits:
                self._depth.waited(now - self._at)
        self._waits = self._waits and follows
        self._at, self._knows = now, knows

    def done(self, tokens: int, now: float, *, knows: bool) -> None:
        """The first run under way brought so many tokens. Raises InvalidInput (BAD_STEP) where that cannot
        be."""
        run = self._runs.popleft()
        chain, drafts = run.chain, run.chain.drafts
        chain.live -= not run.dead
        if chain.row.closed:
            return  # it goes; nobody has to know what it holds
        if not (0 if run.dead else run.first) <= tokens <= (0 if run.dead else 1 + drafts):
            raise InvalidInput(f"a step with {drafts} drafts brought {tokens} tokens", reason="BAD_STEP")
        if run.dead:
            return
        chain.lane.steps += tokens
        right, tried = tokens - run.first, min(tokens + (not run.first), drafts + (not run.first))
        chain.row.request.accepted += right
        if tokens <= drafts:
            chain.live = 0
            for other in self._runs:
                other.dead = other.dead or other.chain is chain
        seconds = 0.0 if self._at is None else now - self._at
        self._depth.run(drafts, right, tried, tokens, seconds, first=run.first)
        self._at, self._knows = now, knows if tokens else self._knows

    def settling(self) -> list[control.Change]:
        """What the next step has to tell first."""
        chain = self._chain
        if chain is None or (chain.live and not chain.row.closed):
            return []
        self._chain = None
        if chain.row.closed:
            return []
        held = chain.row.prompt_tokens + chain.row.limit - 1 - chain.lane.left(chain.row)
        return [control.Change(settle=control.Settle(row=chain.row.number, tokens=held))]
