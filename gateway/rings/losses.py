"""Finds records that were lost on a link whose connection stands: somebody on the path dropped them.

A missing record is no evidence: its sender may compute for minutes. It is lost once its sender has begun to
send it, and its receiver waits for it and has had no byte for LOST_SECONDS. Both report this in their pongs.
Pure; time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

LOST_SECONDS = 3.0
"""Seconds for which both must hold."""


@dataclass(slots=True)
class _Link:
    sent: int = 0
    received: int = 0
    behind_since: float | None = None


class LossWatch:
    """The links of one epoch's ring, in the order of ranks: link r leads from rank r to the next."""

    def __init__(self, size: int) -> None:
        self._links = [_Link() for _ in range(size)]

    def heard(self, rank: int, *, sent: int, received: int, waiting_seconds: float, now: float) -> int | None:
        """Takes a member's counts of the records on its two links since the epoch began.

        Returns the rank whose outgoing link has lost a record, if this shows one.
        """
        outgoing, incoming = self._links[rank], self._links[rank - 1]
        if sent > outgoing.sent:
            outgoing.sent = sent
            _look(outgoing, now)
        if received > incoming.received:
            incoming.received = received
            incoming.behind_since = None
            _look(incoming, now)
        since = incoming.behind_since
        lost = since is not None and now - since >= LOST_SECONDS and waiting_seconds >= LOST_SECONDS
        return (rank - 1) % len(self._links) if lost else None


def _look(link: _Link, now: float) -> None:
    if link.behind_since is None and link.sent > link.received:
        link.behind_since = now
