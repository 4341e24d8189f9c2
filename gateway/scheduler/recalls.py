"""Prompts whose beginning members have on disk: the row waits until all of them have read it.

The head says how much of a prompt it has on disk. If that is more than what is kept in memory once the row
has its memory, all members are asked to read it, and the row begins behind what all of them have read. They
read into the row's memory, so that a ring that is full reads as well as one that is not. A prompt of which
nothing is stored waits for nobody. A row waits no longer than prefill would take: members read for one row
after another, as they would compute their prompts, and for one of each key at a time. Where caches cannot be
cut, members that have read more than others are asked once more, for what all have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sealring.gateway.scheduler.actions import RecallBlocks
from sealring.gateway.scheduler.facts import RingFacts
from sealring.gateway.scheduler.prefixes import PrefixCache
from sealring.gateway.scheduler.request import Row
from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.prefix_names import NO_CHAIN, STORED_BLOCK, Chain
from sealring.mesh.ring.unbroken import around
from sealring.v1 import control_pb2 as control

LEAST_SECONDS = 1.0
"""The shortest patience with a disk: the scheduler looks at deadlines once a second."""

RETRY_SECONDS = 600.0
"""Longest time for which nothing is recalled after a recall was slower than prefill: it cost a row twice the
time."""

_FIRST_RETRY_SECONDS = 10.0
"""The first time, twice as long after each until a recall was in time: a member that is gone is not asked for
its blocks again."""


@dataclass(slots=True, eq=False)
class _Recall:
    row: Row
    chain: Chain
    until: float
    tokens: dict[int, int] = field(default_factory=dict)  # by rank


class Recalls:
    """The recalls of one epoch."""

    def __init__(self, ring: RingFacts, prefixes: PrefixCache) -> None:
        self._ring = ring
        self._exact = ring.prefixes == control.PREFIX_SUPPORT_EXACT
        self._prefixes = prefixes
        self._waiting: dict[int, _Recall] = {}
        self._due: dict[int, RecallBlocks] = {}
        self._last = 0
        self._not_before = 0.0
        self._pause = _FIRST_RETRY_SECONDS

    @property
    def due(self) -> bool:
        """Whether members are still to be asked: what makes room for the answer must be announced before."""
        return bool(self._due)

    def take_due(self) -> Sequence[RecallBlocks]:
        """What members are to be asked now."""
        due, self._due = self._due, {}
        return list(due.values())

    def opened(self, row: Row, stored: bytes) -> None:
        """The head has this part of a row's prompt on disk. Raises InvalidInput (BAD_PREFIXES)."""
        chain = Chain.unpack(stored)
        row.stored = chain.tokens
        if self._ring.recalls and self._ring.prefixes and row.names and not row.request.idle:
            row.chain = _usable(row, chain.first(row.prompt_tokens - 1))

    def begin(self, row: Row, now: float) -> bool:
        """Members are to be asked for what is stored of a row that has got its memory. Returns whether there
        is anything to wait for: the row is `recalling` then, or members read for another row of its key, and
        this is to be called again."""
        chain, row.chain = row.chain, NO_CHAIN
        if not chain.names or now < self._not_before or not self._worth(row, chain.tokens):
            return False
        if any(recall.row.request.key == row.request.key for recall in self._waiting.values()):
            row.chain = chain
            return True
        begins = max([now, *(recall.until for recall in self._waiting.values())])
        most = self._ring.prefill_chunk
        seconds = self._ring.costs.chunk(most) * chain.tokens / most  # of the slowest stage
        self._ask(row, chain, begins + max(LEAST_SECONDS, seconds))
        return True

    def _ask(self, row: Row, chain: Chain, until: float) -> None:
        self._last += 1
        self._waiting[self._last] = _Recall(row, chain, until)
        row.recalling = self._last
        self._due[self._last] = RecallBlocks(self._last, chain, row.number)

    def answered(self, recalled: control.Recalled) -> Iterator[RecallBlocks]:
        """Takes a member's answer. Raises InvalidInput (BAD_STEP) for more than it was asked for."""
        recall = self._waiting.get(recalled.number)
        if recall is None:
            return  # it was given up
        if recalled.tokens > recall.chain.tokens:
            raise InvalidInput(f"the member of rank {recalled.rank} recalls too much", reason="BAD_STEP")
        recall.tokens[recalled.rank] = recalled.tokens
        if len(recall.tokens) < len(self._ring.members):
            return
        self._end(recalled.number)
        self._pause = _FIRST_RETRY_SECONDS
        chain = _usable(recall.row, recall.chain.first(min(recall.tokens.values())))
        row, cancelled = recall.row, RecallBlocks(recalled.number, NO_CHAIN, recall.row.number)
        if not chain.names or not self._worth(row, chain.tokens):
            yield cancelled
        elif self._exact and chain != recall.chain:  # what the others have read cannot be cut
            yield cancelled
            self._ask(row, chain, recall.until)
        elif not self._prefixes.restore(row, recalled.number, chain):
            yield cancelled

    def expire(self, now: float) -> Iterator[RecallBlocks]:
        """Gives up what takes longer than prefill would."""
        for number, recall in list(self._waiting.items()):
            if recall.until <= now:
                self._not_before, self._pause = now + self._pause, min(2 * self._pause, RETRY_SECONDS)
                yield from self._give_up(number)

    def close(self, row: Row) -> Iterator[RecallBlocks]:
        """Gives up what nobody wants any more."""
        if row.recalling in self._waiting:
            yield from self._give_up(row.recalling)

    def _give_up(self, number: int) -> Iterator[RecallBlocks]:
        recall = self._end(number)
        if self._due.pop(number, None) is None:
            yield RecallBlocks(number, NO_CHAIN, recall.row.number)

    def _end(self, number: int) -> _Recall:
        recall = self._waiting.pop(number)
        recall.row.recalling = 0
        return recall

    def _worth(self, row: Row, tokens: int) -> bool:
        return tokens >= self._prefixes.secured(row) + STORED_BLOCK


def _usable(row: Row, chain: Chain) -> Chain:
    """The part of a chain behind which the row can begin: inside none of its images."""
    while (begin := around(row.unbroken, chain.tokens)[0]) < chain.tokens:
        chain = chain.first(begin)
    return chain
