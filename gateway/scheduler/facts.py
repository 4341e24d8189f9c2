"""The facts of a ring that it is scheduled by: its members' memory, and the seconds that its steps take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from sealring.mesh.ring.composition import MAX_LANES, Origin
from sealring.mesh.ring.prefix_names import Names
from sealring.v1 import control_pb2 as control

Times = tuple[tuple[int, float], ...]
"""Sizes, rising, and seconds of one stage, not falling."""

_SHORTEST, _LONGEST = 1e-6, 3600.0
"""Bounds of a step's seconds."""

MAX_TIMES = 32
"""Times of one member that count, more than any sends: every round looks through all of them."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The cost table: seconds of a decode step by its `rows`, and of a prefill step with one chunk by its
    `tokens`.

    Stages time steps when they load. A ring is as fast as its slowest stage, so the table has the longest
    time of any. Costs between timed sizes lie on a line; beyond the largest size they lie on the line through
    the last two.
    """

    rows: Times = ((1, 0.01), (16, 0.02))
    tokens: Times = ((1, 0.01), (512, 0.3))

    @classmethod
    def of(cls, timed: Iterable[Sequence[tuple[int, int, float]]]) -> StepCosts:
        """The table of stages that report (rows, tokens of each, seconds); the default where they time too
        little.

        One row of one token is both a decode step and a chunk. Impossible sizes and times are ignored.
        """
        slowest: dict[tuple[int, int], float] = {}
        for stage in timed:
            for rows, tokens, seconds in stage[:MAX_TIMES]:
                if rows >= 1 and tokens >= 1 and _SHORTEST <= seconds <= _LONGEST:
                    slowest[rows, tokens] = max(seconds, slowest.get((rows, tokens), 0.0))
        by_rows = sorted((rows, seconds) for (rows, tokens), seconds in slowest.items() if tokens == 1)
        by_tokens = sorted((tokens, seconds) for (rows, tokens), seconds in slowest.items() if rows == 1)
        if not by_rows or len(by_tokens) < 2:
            return cls()
        return cls(_rising(by_rows), _rising(by_tokens))

    def decode(self, rows: float) -> float:
        """Seconds of a decode step of `rows` rows in the slowest stage."""
        return _at(self.rows, rows)

    def chunk(self, tokens: float) -> float:
        """Seconds of a prefill step with one chunk of `tokens` tokens in the slowest stage."""
        return _at(self.tokens, tokens)


@dataclass(frozen=True, slots=True)
class MemberMemory:
    """KV memory of one member: bytes that its layers need, and its budget in bytes."""

    kv_bytes_per_token: int
    kv_bytes_per_row: int
    kv_budget: int


@dataclass(frozen=True, slots=True)
class RingFacts:
    """One epoch of a ring, as its roster and its members state it. `members` are in the order of ranks.

    `rows_in_turn`: on every member a step takes about as long as its rows would one after the other.
    `lockstep`: the members compute every step together, as one. `speculate`: the deployment wants
    drafts. `costs`: the cost table. `kept` are the prefixes of earlier epochs that every
    member still has, with their names in this epoch.
    """

    members: tuple[MemberMemory, ...]
    max_rows: int
    prefill_chunk: int
    prefixes: control.PrefixSupport.ValueType = control.PREFIX_SUPPORT_UNSPECIFIED
    rows_in_turn: bool = False
    speculate: bool = False
    costs: StepCosts = field(default_factory=StepCosts)
    kept: tuple[tuple[Origin, Names], ...] = ()
    lockstep: bool = False

    @property
    def stages(self) -> int:
        return 1 if self.lockstep else len(self.members)

    @property
    def speculates(self) -> bool:
        """Whether tokens are drafted: that cuts caches, as rows do that begin with a part of a prefix."""
        return self.speculate and self.stages > 1 and self.prefixes == control.PREFIX_SUPPORT_ANY

    @property
    def lanes(self) -> int:
        """Lanes that rows are spread over.

        One for each stage keeps all of them at work if steps take alike and the way to the next member no
        time. One more makes up for what is not so: it costs what a step takes besides its rows, so it is
        there only where that is little (docs/decisions/0011-one-lane-more-than-stages.md).
        """
        spare = self.rows_in_turn and self.stages > 1
        return min(self.stages + spare, MAX_LANES)


def _rising(times: list[tuple[int, float]]) -> Times:
    """Lowers a time to that of any larger size: it was measured at a slow moment."""
    least = list(accumulate((took for _, took in reversed(times)), min))
    return tuple(zip((size for size, _ in times), reversed(least), strict=True))


def _at(times: Times, size: float) -> float:
    if len(times) == 1:
        return times[0][1]
    after = next((index for index, (each, _) in enumerate(times) if each >= size), len(times) - 1)
    (low, least), (high, most) = times[max(0, after - 1)], times[max(1, after)]
    return max(times[0][1], least + (most - least) * (size - low) / (high - low))
