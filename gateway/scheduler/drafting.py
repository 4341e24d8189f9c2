"""How many tokens the head guesses for the one row of a ring, by what steps take and how many were right.

The head guesses tokens (node.engine.drafts), a step computes them along with the last one, and those that
were right need no step of their own. Further steps may follow before the first is verified: a chain of runs,
each of which goes on where the one before ends if all of its guesses are right. At the first wrong one the
rest of the chain counts for nothing, and the next step cuts all caches to what was right (`Settle`). The
gateway sees how many tokens each run brought, and none of them.

With more rows nothing is guessed, nor where the head finds nothing that the answer may be repeating.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median

from sealring.gateway.scheduler.actions import RingFacts
from sealring.gateway.scheduler.costs import StepCosts
from sealring.gateway.scheduler.lane import Lane
from sealring.gateway.scheduler.row import Row
from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.composition import MAX_UNSETTLED
from sealring.v1 import control_pb2 as control

DEPTHS = (1, 3, 7, 15)
"""Drafts of a step: few lengths, because a GPU plans anew for each."""

LOSS, AT_ONCE = 0.01, 4.0
"""What wrong drafts may cost: a part of the steps that an answer takes without them, and so many steps."""

_SUREST = 0.99
_FURTHEST = 2.0  # times what is expected: a run that takes longer is an accident, unless the next one does
_DOUBT, _SEEN = 2, 7  # chains that are taken to be as the table says, and all that tell


class Depth:
    """How many drafts pay, and how many runs may be under way, each behind one that is not verified.

    A first run of d drafts takes as long as a step without and what the table says that d more tokens take in
    all stages. Of n under way another is done after the n-th part of that. What chains of n really took
    corrects it, by the median. Of all d and n those are best that bring most tokens a second.

    Whatever is not a step without drafts behind another counts against a credit, in such steps: what it took
    longer than they for as many tokens. What it took less fills that, and each of them pays back LOSS of one.
    Nothing is guessed by which more than AT_ONCE could be lost, if it is wrong and stages share a processor.
    """

    def __init__(self, costs: StepCosts, stages: int) -> None:
        self._stages = stages
        self._more = {depth: stages * (costs.chunk(1 + depth) - costs.chunk(1)) for depth in (0, *DEPTHS)}
        self._took = [deque([1.0] * _DOUBT, maxlen=_SEEN) for _ in range(stages)]
        self._times = [1.0] * stages  # what the table says chains take, by runs under way
        self._unseen = False
        self._slow = False
        self._plains: deque[float] = deque(maxlen=_SEEN)
        self._plain = 0.0
        self._credit = 0.0
        # of the last one: seconds expected, seconds seen, runs under way
        self._chain: tuple[float, float, int] | None = None

    def begin(self) -> None:
        """Another answer. If the last one saw no chain, what was seen of them is doubted."""
        self._credit, self._chain = 0.0, None
        if self._unseen:
            for runs in range(self._stages):
                self._see(runs + 1, 1.0)
        self._unseen = True

    def best(self, most: int, right: float) -> tuple[int, int]:
        """Drafts of a run, at most so many, each of which is right with that probability, and how many such
        runs may be under way; (0, 0) where none are worth it."""
        if not (self._plain and right):
            return 0, 0
        ways = [(depth, runs + 1) for depth in DEPTHS if depth <= most for runs in range(self._stages)]
        lost = self._credit + AT_ONCE
        gains = [(self._gain(right, *way), way) for way in ways if self._loss(*way) <= lost]
        return max([(1.0, (0, 0)), *gains])[1]

    def plain(self, seconds: float) -> None:
        """What a step without drafts took that followed another."""
        self._plains.append(seconds)
        most = _FURTHEST * median(self._plains)  # the mean, as runs count with what they took
        self._plain = fmean(min(each, most) for each in self._plains)
        self._credit = max(self._credit, min(0.0, self._credit + LOSS))

    def took(self, drafts: int, tokens: int, seconds: float, runs: int = 1, *, first: bool = True) -> None:
        """A run brought so many tokens, with so many under way, or a step without drafts one that was not
        announced behind another. Behind a chain both wait for what was in vain, and so tell of it."""
        if not self._plain or seconds <= 0:
            return
        alone = self._first(drafts)
        expected, spent, ahead = self._chain or (0.0, 0.0, 1)
        expected, spent, runs = expected + alone / (1 if first else runs), spent + seconds, max(runs, ahead)
        if first and self._chain:
            self._see(ahead, spent / expected)
            self._unseen = False
        slow = seconds > _FURTHEST * expected * self._times[runs - 1]
        self._credit += tokens - (alone if slow and not self._slow else seconds) / self._plain
        self._slow = slow if drafts else self._slow
        if first:
            self._chain = (alone + self._vain(drafts, runs), seconds, runs) if drafts else None
        else:
            self._chain = expected, spent, runs

    def _see(self, runs: int, times: float) -> None:
        self._took[runs - 1].append(times)
        self._times[runs - 1] = median(self._took[runs - 1])

    def _gain(self, right: float, drafts: int, runs: int) -> float:
        """Times as fast as without drafts."""
        right = min(right, _SUREST)
        first, whole = self._first(drafts), right ** (1 + drafts)
        tokens, takes = (1 - whole) / (1 - right), first
        if runs > 1:
            tokens = 1 / (1 - right)
            takes = first * (1 + whole / (1 - whole) / runs) + self._vain(drafts, runs)
        return tokens * self._plain / takes / self._times[runs - 1]

    def _loss(self, drafts: int, runs: int) -> float:
        """Steps that are lost at most where no draft is right."""
        return max(1.0, self._times[0]) * runs * self._first(drafts) / self._plain - 1

    def _first(self, drafts: int) -> float:
        return self._plain + self._more[drafts]

    def _vain(self, drafts: int, runs: int) -> float:
        """Seconds that the step behind a chain waits in stages for runs that were in vain."""
        return self._more[drafts] * (runs - 1) / self._stages


@dataclass(slots=True, eq=False)
class _Run:
    chain: _Chain
    drafts: int
    first: bool


@dataclass(slots=True, eq=False)
class _Chain:
    """Runs of one row, of so many tokens, after which the members are not yet told what it holds. `live` may
    bring something."""

    lane: Lane
    row: Row
    tokens: int = 0
    live: list[_Run] = field(default_factory=list)

    @property
    def most(self) -> int:
        """Drafts of another run, by the limits of the row and of a chain; the last token is left to other
        steps."""
        left = self.lane.left(self.row) - sum(1 + run.drafts for run in self.live)
        return min(self.row.drafts, left - 2, MAX_UNSETTLED - self.tokens - 1)


class Drafting:
    """Which steps of one epoch have drafts, and what has to be said after them."""

    def __init__(self, ring: RingFacts) -> None:
        self._possible = ring.speculates
        self._depth = Depth(ring.costs, ring.stages)
        self._row = 0
        self._likely = 0.0
        self._chain: _Chain | None = None
        self._runs: deque[_Run] = deque()
        self._at: float | None = None
        self._waits = False  # behind a chain no step is announced before another, for one may have drafts

    def wanted(self, lane: Lane, rows: int) -> int | None:
        """Drafts of the lane's next step; None where it has to wait for those under way. `rows`: those of the
        ring and all that wait for it."""
        alone, chain = self.asks(lane, rows) and not lane.ready, self._chain
        if chain is not None and chain.lane is lane and chain.live and not chain.row.closed:
            drafts, runs = self._depth.best(chain.most, self._likely) if alone else (0, 0)
            return drafts if len(chain.live) < runs else None
        if not alone:
            return 0
        (row,) = lane.rows.values()
        if row.number != self._row:
            self._row, self._likely, self._at, self._waits = row.number, 0.0, None, False
            self._depth.begin()
        if row.closed:
            return 0
        drafts, _ = self._depth.best(_Chain(lane, row).most, self._likely)
        return None if lane.outstanding and (drafts or self._waits) else drafts

    def asks(self, lane: Lane, rows: int) -> bool:
        """Whether the head is to tell how likely it guesses the next token: where it may come to guess."""
        return self._possible and rows == 1 and any(row.drafts for row in lane.rows.values())

    def announced(self, lane: Lane, drafts: int) -> None:
        first = self._chain is None
        if self._chain is None:
            (row,) = lane.rows.values()
            self._chain = _Chain(lane, row)
        run = _Run(self._chain, drafts, first)
        self._runs.append(run)
        self._chain.live.append(run)
        self._chain.tokens += 1 + drafts
        self._chain.row.request.progress.drafted += drafts + (not first)

    def plain(self, now: float, *, follows: bool, likely: float) -> None:
        """A step without drafts is done; `follows` another that was under way with it, and nothing else."""
        if self._possible and self._at is not None:
            if follows:
                self._depth.plain(now - self._at)
            else:
                self._depth.took(0, 1, now - self._at)
        self._at, self._likely, self._waits = now, likely, False

    def done(self, tokens: int, now: float, *, likely: float) -> None:
        """The first run under way brought so many tokens. Raises InvalidInput (BAD_STEP) where that cannot
        be."""
        run = self._runs.popleft()
        chain = run.chain
        live, under_way = run in chain.live, len(chain.live)
        if chain.row.closed:
            return  # it goes; nobody has to know what it holds
        if not (run.first if live else 0) <= tokens <= (1 + run.drafts if live else 0):
            raise InvalidInput(f"a step with {run.drafts} drafts brought {tokens} tokens", reason="BAD_STEP")
        if not live:
            return
        chain.live.remove(run)
        if tokens <= run.drafts:
            chain.live.clear()
        chain.lane.steps += tokens
        chain.row.request.progress.accepted += tokens - run.first
        seconds = 0.0 if self._at is None else now - self._at
        self._depth.took(run.drafts, tokens, seconds, under_way, first=run.first)
        self._at, self._waits = now, True
        self._likely = likely if tokens else self._likely

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
