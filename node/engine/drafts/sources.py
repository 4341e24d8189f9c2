"""The sources of drafts, by their numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from sealring.node.engine.drafts.guesses import Guesses, GuessesAhead
from sealring.node.engine.drafts.source import RowSource, RowText, Source, Worker
from sealring.node.engine.drafts.tail import TailDrafter
from sealring.node.engine.drafts.text import TextSource
from sealring.v1 import control_pb2 as control

LOOKUP: Source = control.DRAFT_SOURCE_LOOKUP

OF_ROW: Mapping[Source, Callable[[RowText], RowSource | None]] = {
    LOOKUP: TextSource,
    control.DRAFT_SOURCE_MODEL: Guesses.of,
    control.DRAFT_SOURCE_MTP_HEAD: GuessesAhead.of,
    control.DRAFT_SOURCE_HIDDEN: GuessesAhead.of,
}
"""What guesses of a row that is opened; None for a row of which the source guesses nothing."""

FREE = (control.DraftFacts(source=LOOKUP),)
"""The sources that every head has."""


@dataclass(frozen=True)
class Sources:
    """A ring's sources of drafts, as one of its members has them."""

    workers: Mapping[Source, Worker] = field(default_factory=dict)
    """Those that compute at this member, the head."""
    tail: TailDrafter | None = None
    """The one that computes at this member, the tail."""
    ahead: Source = control.DRAFT_SOURCE_UNSPECIFIED
    """The one that guesses ahead, at the ring's tail."""
    facts: tuple[control.DraftFacts, ...] = ()
    """What the gateway learns of those that compute at this member."""
    memory: int = 0
    """Bytes of their weights and caches."""

    @property
    def at_head(self) -> set[Source]:
        """The sources of which the head of the ring has guesses, and may be asked for drafts."""
        return {*(one.source for one in FREE), *self.workers} | ({self.ahead} if self.ahead else set())

    def drop(self, *, failed: bool) -> None:
        """All rows of the epoch are gone, since computing `failed` or since the epoch is over."""
        for worker in self.workers.values():
            worker.drop()
        if self.tail is not None:
            if failed:
                self.tail.distrust()
            self.tail.end_epoch()


def of_row(text: RowText, sources: Collection[Source]) -> dict[Source, RowSource]:
    """What guesses of a row, by source."""
    made = {source: OF_ROW[source](text) for source in sorted(sources)}
    return {source: one for source, one in made.items() if one is not None}
