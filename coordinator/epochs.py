"""The epochs of one ring: prepare, commit, serve, end, and when to try again. Pure; time is an argument.

    WAITING --all online, back-off over--> PREPARING --all prepared--> COMMITTING --all up--> SERVING
       ^------------------------ any fault, loss or deadline ends the epoch -----------------------|

Every method takes the time in seconds of a monotonic clock and returns what is to be done, in order.
Messages about any epoch but the current one change nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from sealring.v1 import membership_pb2

FIRST_BACKOFF = 0.2
LAST_BACKOFF = 10.0
STEADY_SECONDS = 10.0
"""An epoch that served for this long was a good one: the next back-off starts anew."""


class Phase(enum.Enum):
    """Where a ring stands."""

    WAITING = "waiting"
    PREPARING = "preparing"
    COMMITTING = "committing"
    SERVING = "serving"


@dataclass(frozen=True)
class Timeouts:
    """Seconds: without progress while preparing, for the commit, and for a lost stream to return."""

    prepare: float = 120.0
    commit: float = 60.0
    grace: float = 6.0


@dataclass(frozen=True)
class Prepare:
    """Tell every member to prepare this epoch."""

    epoch: int


@dataclass(frozen=True)
class Commit:
    """Tell every member to commit it."""

    epoch: int


@dataclass(frozen=True)
class End:
    """Tell every member that it is over."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Changed:
    """The phase is another one: tell who watches."""


Action: TypeAlias = Prepare | Commit | End | Changed


@dataclass
class _Epoch:
    number: int
    deadline: float
    prepared: set[str] = field(default_factory=set)
    up: set[str] = field(default_factory=set)
    progress: dict[str, tuple[str, float]] = field(default_factory=dict)
    links: dict[str, list[membership_pb2.LinkInfo]] = field(default_factory=dict)
    serving_since: float = 0.0


class RingEpochs:
    """The machine of one ring. `next_epoch` gives numbers that rise and are never given twice."""

    def __init__(self, members: Sequence[str], next_epoch: Callable[[], int], timeouts: Timeouts) -> None:
        self.members = tuple(members)
        self.phase = Phase.WAITING
        self.reason = "forming"
        self._next_epoch = next_epoch
        self._timeouts = timeouts
        self._online: set[str] = set()
        self._missing: dict[str, float] = {}
        self._epoch: _Epoch | None = None
        self._last_number = 0
        self._not_before = 0.0
        self._backoff = FIRST_BACKOFF

    @property
    def epoch(self) -> int:
        """The current epoch, or the last one when there is none."""
        return self._epoch.number if self._epoch else self._last_number

    @property
    def links(self) -> list[membership_pb2.LinkInfo]:
        """What the members reported of the links of the current epoch, each link once."""
        reported = self._epoch.links.values() if self._epoch else ()
        unique = {(link.from_rank, link.to_rank): link for links in reported for link in links}
        return [unique[edge] for edge in sorted(unique)]

    @property
    def progress(self) -> dict[str, tuple[str, float]]:
        """What each member did last while the current epoch is being formed: words and a fraction."""
        forming = self._epoch if self.phase in (Phase.PREPARING, Phase.COMMITTING) else None
        return dict(forming.progress) if forming else {}

    def deadline(self) -> float | None:
        """When `tick` has something to do next, if ever."""
        if self.phase is Phase.WAITING:
            return self._not_before if self._all_here() else None
        if self.phase is Phase.SERVING:
            return min(self._missing.values(), default=None)
        return self._epoch.deadline if self._epoch else None

    def online(self, member: str, now: float) -> list[Action]:
        """A member's stream is there (again)."""
        if member not in self.members:
            return []
        self._online.add(member)
        self._missing.pop(member, None)
        return self.tick(now)

    def lost(self, member: str, now: float) -> list[Action]:
        """A member's stream broke. A serving ring gives it the grace period to return."""
        if member not in self._online or member in self._missing:
            return []
        if self.phase is not Phase.SERVING:
            return self.offline(member, now)
        self._missing[member] = now + self._timeouts.grace
        return []

    def offline(self, member: str, now: float) -> list[Action]:
        """A member is gone: it said goodbye, was silent for too long, or was thrown out."""
        if member not in self.members:
            return []
        self._online.discard(member)
        self._missing.pop(member, None)
        return self._fail("a member is offline", now)

    def advanced(self, member: str, epoch: int, what: str, fraction: float, now: float) -> list[Action]:
        """A member reports progress; only a change counts against the deadline."""
        current = self._current(member, epoch, Phase.PREPARING)
        if current is not None and current.progress.get(member) != (what, fraction):
            current.progress[member] = (what, fraction)
            current.deadline = now + self._timeouts.prepare
        return []

    def prepared(
        self, member: str, epoch: int, links: Sequence[membership_pb2.LinkInfo], now: float
    ) -> list[Action]:
        """A member is ready for the commit."""
        current = self._current(member, epoch, Phase.PREPARING)
        if current is None or member in current.prepared:
            return []
        current.prepared.add(member)
        current.links[member] = list(links)
        current.deadline = now + self._timeouts.prepare
        if current.prepared != set(self.members):
            return []
        self.phase = Phase.COMMITTING
        current.deadline = now + self._timeouts.commit
        return [Commit(current.number), Changed()]

    def up(self, member: str, epoch: int, now: float) -> list[Action]:
        """A member's carrier has opened the confirmation records."""
        current = self._current(member, epoch, Phase.COMMITTING)
        if current is None:
            return []
        current.up.add(member)
        if current.up != set(self.members):
            return []
        self.phase, self.reason = Phase.SERVING, ""
        current.serving_since = now
        return [Changed()]

    def fault(self, member: str, epoch: int, reason: str, now: float) -> list[Action]:
        """A member says that the epoch cannot go on."""
        if self._epoch is None or epoch != self._epoch.number or member not in self.members:
            return []
        return self._fail(reason, now)

    def tick(self, now: float) -> list[Action]:
        """Whatever is due: the next epoch, or the end of one that took too long or lost a member."""
        if self.phase is Phase.WAITING:
            return self._begin(now) if self._all_here() and now >= self._not_before else []
        if self.phase is Phase.SERVING:
            return self._drop_missing(now)
        if self._epoch is not None and now >= self._epoch.deadline:
            return self._fail(f"{self.phase.value} took too long", now)
        return []

    def close(self, reason: str) -> list[Action]:
        """The ring is no more: the current epoch ends and no other begins."""
        self._online.clear()
        self._missing.clear()
        current, self._epoch, self.phase = self._epoch, None, Phase.WAITING
        return [End(current.number, reason)] if current else []

    def _all_here(self) -> bool:
        return self._online.issuperset(self.members) and not self._missing

    def _current(self, member: str, epoch: int, phase: Phase) -> _Epoch | None:
        expected = self._epoch is not None and self._epoch.number == epoch and self.phase is phase
        return self._epoch if expected and member in self.members else None

    def _begin(self, now: float) -> list[Action]:
        self._epoch = _Epoch(self._next_epoch(), now + self._timeouts.prepare)
        self._last_number = self._epoch.number
        self.phase = Phase.PREPARING
        return [Prepare(self._epoch.number), Changed()]

    def _drop_missing(self, now: float) -> list[Action]:
        for member, until in list(self._missing.items()):
            if now >= until:
                return self.offline(member, now)
        return []

    def _fail(self, reason: str, now: float) -> list[Action]:
        current, self._epoch = self._epoch, None
        if current is None:
            return []
        for member in self._missing:
            self._online.discard(member)
        self._missing.clear()
        if self.phase is Phase.SERVING and now - current.serving_since >= STEADY_SECONDS:
            self._backoff = FIRST_BACKOFF
        self._not_before = now + self._backoff
        self._backoff = min(LAST_BACKOFF, self._backoff * 2)
        self.phase, self.reason = Phase.WAITING, reason
        return [End(current.number, reason), Changed()]
