"""How many tokens the head guesses for the one row of a ring, by what that is measured to bring.

The head guesses tokens (node.engine.drafts), a step computes them along with the last one, and those that
were right need no step of their own. While a ring has one row its stages are idle most of the time, so the
further tokens cost little; with more rows nothing is guessed. The gateway sees how many tokens a step
brought, and none of them.

A step with drafts is announced when all steps before it are done, because how many tokens the row then holds
follows from them; the next step of any kind tells the members (`Settle`).
"""

from __future__ import annotations

from dataclasses import dataclass

from sealring.gateway.scheduler.actions import RingFacts
from sealring.gateway.scheduler.lane import Lane
from sealring.gateway.scheduler.row import Row
from sealring.mesh.errors import InvalidInput
from sealring.v1 import control_pb2 as control

DEPTHS = (0, 3, 7)
"""Drafts of a step: with the last token these are chunks of 1, 4 and 8."""

FIRST_PROBE, LAST_PROBE = 16, 256
"""Steps after which another depth is tried; twice as many after each time that it was no better."""

_TOKENS_WEIGHT, _SECONDS_WEIGHT = 0.5, 0.125
"""Of the newest step, in what steps bring, which changes with the text, and in what they take."""


class Depth:
    """Which depth brings most tokens a second. Another is tried now and then: so nothing is lost for long."""

    def __init__(self) -> None:
        self._at = 0
        self._tokens = [1.0] * len(DEPTHS)
        self._seconds: list[float | None] = [None] * len(DEPTHS)
        self._interval = self._until = FIRST_PROBE

    def begin(self) -> None:
        """Another row: what it says may be guessed better."""
        self._until = min(self._until, FIRST_PROBE)

    def wanted(self, most: int) -> int:
        """Drafts of the next step, at most so many."""
        place = self._probe if self._until <= 0 else self._at
        return next(depth for depth in reversed(DEPTHS[: place + 1]) if depth <= max(most, 0))

    def measure(self, drafts: int, tokens: int, seconds: float) -> None:
        """What a step with so many drafts brought and took."""
        place, probe = DEPTHS.index(drafts), self._probe
        before = self._seconds[place]
        if before is None:
            self._tokens[place], self._seconds[place] = tokens, seconds
        else:
            self._tokens[place] += _TOKENS_WEIGHT * (tokens - self._tokens[place])
            self._seconds[place] = before + _SECONDS_WEIGHT * (min(seconds, 4 * before) - before)
        if self._until <= 0 and place == probe:
            better = self._rate(probe) > self._rate(self._at)
            self._at = probe if better else self._at
            self._interval = FIRST_PROBE if better else min(2 * self._interval, LAST_PROBE)
            self._until = self._interval
        elif self._at and self._rate(self._at) < self._rate(0):
            self._at, self._until = 0, self._interval
        else:
            self._until -= 1

    @property
    def _probe(self) -> int:
        """The depth that is tried next: one deeper, or at the deepest one less."""
        return self._at + 1 if self._at + 1 < len(DEPTHS) else self._at - 1

    def _rate(self, place: int) -> float:
        """Tokens a second. More drafts take no less time, whatever a few steps seemed to say."""
        known = [seconds for seconds in self._seconds[: place + 1] if seconds is not None]
        return self._tokens[place] / max(known) if self._seconds[place] and max(known) else 0.0


@dataclass(slots=True, eq=False)
class _Run:
    """A step with drafts, until the members are told how many tokens its row holds after it."""

    lane: Lane
    row: Row
    drafts: int
    done: bool = False


class Drafting:
    """Which steps of one epoch have drafts, and what has to be said after them."""

    def __init__(self, ring: RingFacts) -> None:
        self._possible = ring.speculates
        self._depth = Depth()
        self._row = 0
        self._run: _Run | None = None

    def under_way(self, lane: Lane) -> bool:
        """Whether a step with drafts of this lane is; the lane has no other before it is done."""
        return self._run is not None and self._run.lane is lane and not self._run.done

    def wanted(self, lane: Lane, rows: int) -> int:
        """Drafts of the lane's next step. `rows`: those of the ring and all that wait for it."""
        if not self._possible or rows != 1 or len(lane.rows) != 1 or lane.ready:
            return 0
        (row,) = lane.rows.values()
        if row.closed:
            return 0
        if row.number != self._row:
            self._row = row.number
            self._depth.begin()
        return self._depth.wanted(
            min(row.drafts, lane.left(row) - 2)
        )  # the row's limit is left to other steps

    def announced(self, lane: Lane, drafts: int) -> None:
        (row,) = lane.rows.values()
        self._run = _Run(lane, row, drafts)

    def measure(self, seconds: float) -> None:
        """What a step without drafts took, of a lane that was under way."""
        if self._possible:
            self._depth.measure(0, 1, seconds)

    def done(self, tokens: int, seconds: float) -> None:
        """The step brought so many tokens. Raises InvalidInput (BAD_STEP) where that cannot be."""
        run = self._run
        assert run is not None
        if run.row.closed:
            self._run = None  # it goes; nobody has to know what it holds
            return
        if not 1 <= tokens <= 1 + run.drafts:
            raise InvalidInput(f"a step with {run.drafts} drafts brought {tokens} tokens", reason="BAD_STEP")
        run.done = True
        run.row.request.drafted += run.drafts
        run.row.request.accepted += tokens - 1
        run.lane.steps += tokens - 1
        self._depth.measure(run.drafts, tokens, seconds)

    def settling(self) -> list[control.Change]:
        """What the next step has to tell first."""
        run = self._run
        if run is None or not run.done:
            return []
        self._run = None
        if run.row.closed:
            return []
        held = run.row.prompt_tokens + run.row.limit - 1 - run.lane.left(run.row)
        return [control.Change(settle=control.Settle(row=run.row.number, tokens=held))]
