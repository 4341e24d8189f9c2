"""How much longer rounds may get because prompts wait: by how many wait, and for how long.

Long prompts (several chunks) may make every round longer by `SHARE` of its own time. Short prompts get more,
up to `MOST`: the more of them wait for each running row, and the longer. An early first token for many is
worth more than an even stream for a few. When a crowd of short prompts comes to a ring that does little, they
go first for `RUSH_SECONDS`: rows that are prefilled wait for the others, and all of them then decode
together, so no second token is delayed by more than that time. One prompt, or a few long ones, are no crowd.
"""

from __future__ import annotations

from sealring.gateway.scheduler.budget import SHARE

MOST = 3.0
"""Part of a round's own time by which short prompts make it longer at most, other than in a rush."""

CROWD = 0.5
"""Short prompts for every row that runs, besides the first, with which they get the most."""

PATIENCE, IMPATIENCE = 1.0, 3.0
"""Seconds for which short prompts have waited when they begin to get more, and get the most."""

RUSH = 2.0
"""Short prompts for every row that runs with which a rush begins."""

RUSH_SHARE = 8.0
RUSH_SECONDS = 3.0


class Crowd:
    """Time comes in by `tick`; a crowd is there from the first short prompt that waits until none does."""

    def __init__(self) -> None:
        self._now = 0.0
        self._since: float | None = None
        self._rushing = False

    def tick(self, now: float, waiting: bool) -> None:
        """The time in seconds, and whether a short prompt waits."""
        self._now = now
        if not waiting:
            self._since, self._rushing = None, False
        elif self._since is None:
            self._since = now

    def rush(self, waiting: float, running: int) -> bool:
        """Whether prompts go first; so many short ones wait besides the first."""
        if self._waited >= RUSH_SECONDS:
            self._rushing = False
        elif waiting >= max(1, RUSH * (running - 1)):
            self._rushing = True
        return self._rushing

    def share(self, waiting: float, running: int, short: bool) -> float:
        """By what part of its own time prefill may make a round longer; whether a short prompt waits."""
        if short and self.rush(waiting, running):
            return RUSH_SHARE
        many = waiting / max(1, running) / CROWD
        long = (self._waited - PATIENCE) / (IMPATIENCE - PATIENCE)
        return SHARE + (MOST - SHARE) * min(1.0, max(0.0, many, long))

    @property
    def _waited(self) -> float:
        return 0.0 if self._since is None else self._now - self._since
