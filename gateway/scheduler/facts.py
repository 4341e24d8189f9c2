"""The facts of a ring that it is scheduled by: its members' memory, and the seconds that its steps take."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.kept_prefixes import Origin
from sealring.mesh.ring.limits import MAX_CONTEXT, MAX_RUNS
from sealring.mesh.ring.prefix_names import Names, split
from sealring.mesh.ring.spread import Times, between, rounds_with_another, spreads
from sealring.v1 import control_pb2 as control

_SHORTEST, _LONGEST = 1e-6, 3600.0
"""Bounds of a step's seconds."""

MARK_EVERY = 4096
"""Tokens from one mark of a prompt to the next at least: to compute as many again takes seconds on a Mac."""

MAX_TIMES = 64
"""Times of one member that count, more than any sends: every round looks through them."""

Source: TypeAlias = "control.DraftSource.ValueType"
"""A source of drafts, by its number alone."""

LOOKUP: Source = control.DRAFT_SOURCE_LOOKUP

MAX_SOURCES = 8
"""Sources of drafts of a ring that count: each is looked at before a step may have drafts."""

HOP = 1e-3
"""Seconds from the end of a stage to the input of the next: 0.62 to 0.82 ms on 2 x H200
(`docs/performance/data/ring.json`), by estimate 1.2 to 1.4 ms on Macs, whose threads take longer to wake."""


class Timed(NamedTuple):
    """Seconds that a step took a stage: of `rows` rows with `tokens` tokens each, behind `context` tokens."""

    rows: int
    tokens: int
    seconds: float
    context: int = 0


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The cost table: seconds of a decode step by its `rows`, and of a prefill step with one chunk by its
    `tokens`, both with caches that are hardly filled; `behind` are the seconds that each token in the cache
    of each row adds to a decode step.

    Stages time steps when they load. A ring is as fast as its slowest stage, so the table has the longest
    time of any.
    """

    rows: Times = ((1, 0.01), (16, 0.02))
    tokens: Times = ((1, 0.01), (512, 0.3))
    behind: float = 0.0

    @classmethod
    def of(cls, timed: Iterable[Sequence[Timed]]) -> StepCosts:
        """The table of stages that report their times; the default where all time too little.

        One row of one token is both a decode step and a chunk. Impossible sizes and times are ignored. A slow
        stage times fewer sizes, and its times of larger ones are extrapolated (`between`).
        """
        stages = [stage for stage in map(cls._of_one, timed) if stage is not None]
        if not stages:
            return cls()
        return cls(
            _slowest([stage.rows for stage in stages]),
            _slowest([stage.tokens for stage in stages]),
            max(stage.behind for stage in stages),
        )

    @classmethod
    def _of_one(cls, timed: Sequence[Timed]) -> StepCosts | None:
        found = {
            (rows, tokens, context): seconds
            for rows, tokens, seconds, context in timed[:MAX_TIMES]
            if rows >= 1 and tokens >= 1 and context >= 0 and _SHORTEST <= seconds <= _LONGEST
        }
        by_rows = [
            (rows, took) for (rows, tokens, behind), took in found.items() if (tokens, behind) == (1, 0)
        ]
        by_tokens = [
            (tokens, took) for (rows, tokens, behind), took in found.items() if (rows, behind) == (1, 0)
        ]
        if not by_rows or len(by_tokens) < 2:
            return None
        costs = cls(tuple(sorted(by_rows)), tuple(sorted(by_tokens)))
        more = [
            (took - costs.decode(rows)) / (rows * behind)
            for (rows, tokens, behind), took in found.items()
            if behind and tokens == 1
        ]
        return replace(costs, behind=max(0.0, *more)) if more else costs

    def decode(self, rows: float, context: float = 0.0) -> float:
        """Seconds of a decode step of `rows` rows in the slowest stage, behind `context` tokens of each."""
        return between(self.rows, rows) + self.behind * rows * context

    def chunk(self, tokens: float) -> float:
        """Seconds of a prefill step with one chunk of `tokens` tokens in the slowest stage."""
        return between(self.tokens, tokens)


@dataclass(frozen=True, slots=True)
class MemberMemory:
    """KV memory of one member: bytes that its layers need, and its budget in bytes. `mark_bytes` are those of
    a mark (`mesh.ring.prefix_marks`), 0 without marks."""

    kv_bytes_per_token: int
    kv_bytes_per_row: int
    kv_budget: int
    mark_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What is known of a source of drafts, whatever it is.

    `seconds` in which it guesses a token, and those in which it guesses a token for each of `rows` rows at
    once (`together`); 0: for one row after another. It guesses for `rows` rows at most; 0: for any number.
    Guesses that are made `ahead` come with the tokens of a step, and are the drafts of the next one. A
    `block` of tokens at most is guessed in those seconds; 0: one token after another. With `taps`, steps of
    its rows have to bring hidden states.
    """

    seconds: float = 0.0
    rows: int = 0
    together: float = 0.0
    ahead: bool = False
    block: int = 0
    taps: bool = False

    @classmethod
    def of(cls, told: control.DraftFacts) -> SourceFacts:
        """What a member says of it."""
        times = told.microseconds / 1e6, told.rows, told.rows_microseconds / 1e6
        return cls(*times, told.ahead, told.block, told.taps)

    def run(self, drafts: int) -> float:
        """Seconds in which a run of drafts is guessed for one row."""
        return min(drafts, 1) * self.seconds if self.block else drafts * self.seconds

    def serves(self, rows: int) -> bool:
        """Whether it guesses for as many rows."""
        return not self.rows or rows <= self.rows

    def guessing(self, rows: int) -> float:
        """Seconds in which a token is guessed for each of `rows` rows of a lane."""
        if self.rows <= 1 or not self.together:
            return rows * self.seconds
        return between(((1, self.seconds), (self.rows, max(self.seconds, self.together))), rows)


NO_MODEL: Mapping[Source, SourceFacts] = MappingProxyType({LOOKUP: SourceFacts()})
"""The sources of a ring where no model guesses."""


@dataclass(frozen=True, slots=True)
class RingFacts:
    """One epoch of a ring, as its roster and its members state it. `members` are in the order of ranks.

    `lockstep`: the members compute every step together, as one. `speculate`: the deployment wants drafts.
    `costs`: the cost table. `kept` are the prefixes of earlier epochs that every member still has, with their
    names in this epoch. `recalls`: all members store prefixes on disk. `sharing`: the number of stages that
    compute on one GPU, at most. `sources` are what guesses tokens, by `DraftSource`. `head`: the head's own
    cost table. `draft_runs`: the number of runs of drafts that every member can take back; `together`: also
    of rows of one lane, which count as a run each. `epoch`: the epoch's number. `prompts_alone`: prefixes are
    kept of prompts, without answers.
    """

    members: tuple[MemberMemory, ...]
    max_rows: int
    prefill_chunk: int
    prefixes: control.PrefixSupport.ValueType = control.PREFIX_SUPPORT_UNSPECIFIED
    speculate: bool = False
    costs: StepCosts = field(default_factory=StepCosts)
    kept: tuple[tuple[Origin, Names], ...] = ()
    lockstep: bool = False
    recalls: bool = False
    sharing: int = 1
    sources: Mapping[Source, SourceFacts] = field(default_factory=lambda: NO_MODEL)
    head: StepCosts | None = None
    draft_runs: int = 0
    together: bool = False
    epoch: int = 1
    prompts_alone: bool = False

    @classmethod
    def of(
        cls,
        attached: Sequence[control.Attached],
        *,
        epoch: int,
        max_rows: int,
        prefill_chunk: int,
        speculate: bool = False,
        lockstep: bool = False,
    ) -> RingFacts:
        """The facts of an epoch whose members answer so, by rank."""
        timed = [
            [Timed(each.rows, each.tokens, each.microseconds / 1e6, each.context) for each in member.times]
            for member in attached
        ]
        sources = [each for member in attached for each in member.sources[:MAX_SOURCES] if each.source]
        return cls(
            members=tuple(
                MemberMemory(each.kv_bytes_per_token, each.kv_bytes_per_row, each.kv_budget, each.mark_bytes)
                for each in attached
            ),
            max_rows=max_rows,
            prefill_chunk=prefill_chunk,
            prefixes=min(each.prefixes for each in attached),
            speculate=speculate,
            lockstep=lockstep,
            costs=StepCosts.of(timed),
            kept=tuple(_kept_by_all(attached)),
            recalls=all(each.recalls for each in attached),
            sharing=max([1, *Counter(each.device for each in attached if each.device).values()]),
            sources={**NO_MODEL, **{each.source: SourceFacts.of(each) for each in sources[:MAX_SOURCES]}},
            head=StepCosts.of(timed[:1]),
            draft_runs=min(each.draft_runs for each in attached),
            together=all(each.drafts_together or each.draft_runs > MAX_RUNS for each in attached),
            epoch=epoch,
            prompts_alone=any(each.prompts_alone for each in attached),
        )

    @property
    def stages(self) -> int:
        return 1 if self.lockstep else len(self.members)

    @property
    def speculates(self) -> bool:
        """Whether tokens are drafted."""
        return self.speculate and self.runs > 0

    @property
    def runs(self) -> int:
        """Runs of drafts that may be under way at once: one for each stage, if members take them back."""
        return min(self.stages, self.draft_runs) if self.stages > 1 else 0

    @property
    def drafts_together(self) -> bool:
        """Whether rows of one lane can have drafts together: where all members take these back."""
        return self.together or self.draft_runs > MAX_RUNS

    @property
    def mark_every(self) -> int:
        """Tokens from one mark of a prompt to the next, so that marks take no more memory than keys and
        values; 0 for none."""
        if self.prefixes != control.PREFIX_SUPPORT_EXACT:
            return 0
        marks = sum(one.mark_bytes for one in self.members)
        tokens = sum(one.kv_bytes_per_token for one in self.members)
        return max(MARK_EVERY, marks // tokens) if tokens else MAX_CONTEXT

    @property
    def hop(self) -> float:
        """Seconds from one stage to the next."""
        return HOP if self.stages > 1 else 0.0

    def lanes(self, rows: int, context: int = 0) -> tuple[int, ...]:
        """The sizes of the lanes that make most tokens a second of `rows` rows with about `context` tokens,
        largest first (docs/decisions/0043-lanes-by-the-cost-table.md)."""
        most = 1 << max(4, rows - 1).bit_length()
        return _lanes(self.costs, self._devices, self.hop, most, context)[rows]

    def rounds_with_another(self, sizes: Sequence[int], context: int = 0) -> list[float]:
        """Seconds from a row's token to its next, without prefill, if a row joins each of these lanes."""
        costs = partial(self.costs.decode, context=context)
        return rounds_with_another(sizes, costs, self._devices, self.hop)

    @property
    def _devices(self) -> int:
        """Stages that compute beside each other. Those that share a device compute one after another, so
        their round is that of fewer stages, as many times as long."""
        return max(1, self.stages // self.sharing)


@lru_cache(maxsize=64)
def _lanes(costs: StepCosts, stages: int, hop: float, most: int, context: int) -> list[tuple[int, ...]]:
    return spreads(most, partial(costs.decode, context=context), stages, hop)


def _kept_by_all(attached: Sequence[control.Attached]) -> Iterator[tuple[Origin, Names]]:
    """Prefixes that every member still has; where caches cannot be cut, with the names at the ends and marks
    that every such member has. Malformed names of the head are ignored."""
    held = [
        {Origin(one.epoch, one.row, one.tokens): set(one.marks) for one in each.kept} for each in attached
    ]
    cutting = [each.prefixes == control.PREFIX_SUPPORT_ANY for each in attached]
    for kept in attached[0].kept:
        origin = Origin(kept.epoch, kept.row, kept.tokens)
        if not all(origin in others for others in held) or not kept.names:
            continue
        marks = [others[origin] for others, cuts in zip(held, cutting, strict=True) if not cuts]
        with contextlib.suppress(InvalidInput):
            names = split(kept.names, kept.tokens, ends=kept.ends)
            if names and names[-1][0] == kept.tokens and origin.epoch < attached[0].epoch:
                if marks:
                    common = {kept.tokens}.union(set.intersection(*marks))
                    names = tuple(pair for pair in names if pair[0] in common)
                yield origin, names


def _slowest(stages: Sequence[Times]) -> Times:
    sizes = sorted({size for times in stages for size, _ in times})
    return tuple((size, max(between(times, size) for times in stages)) for size in sizes)
