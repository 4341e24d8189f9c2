"""The epochs of one ring: prepare, commit, serve, end, and when to try again. Pure; time is an argument.

    WAITING --all online, back-off over--> PREPARING --all prepared--> COMMITTING --all up--> SERVING
       ^------------------------ any fault, loss or deadline ends the epoch -----------------------|

An epoch needs the coordinator to begin, and not to go on. So one that members still have up is adopted when
they come (back), and a member that only the coordinator does not hear of ends none that a gateway attends.

Every method takes the time in seconds of a monotonic clock and returns what is to be done, in order.
Messages about any epoch but the current one change nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from sealring.coordinator.rings.forming import Forming
from sealring.mesh.errors import SealringError
from sealring.mesh.rpc.reach import Backoff
from sealring.mesh.system.pace import STARTING, Reached
from sealring.v1 import membership_pb2

FIRST_BACKOFF = 0.2
LAST_BACKOFF = 10.0
STEADY_SECONDS = 10.0
"""An epoch that served for this long was a good one: the next back-off starts anew."""


RETRY_SECONDS = 1.0
"""How long to wait when the number of the next epoch cannot be stored."""


class Phase(enum.Enum):
    """The phase of a ring."""

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
    """Send every member the epoch to prepare."""

    epoch: int


@dataclass(frozen=True)
class Commit:
    """Send every member the commit, with the address at which each rank of a tensor ring awaits its group.

    `caches` says with what each rank computes its caches.
    """

    epoch: int
    addresses: tuple[str, ...] = ()
    caches: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class End:
    """Send every member the end of the epoch."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Changed:
    """The phase or its reason has changed: report it."""


Action: TypeAlias = Prepare | Commit | End | Changed


@dataclass(frozen=True)
class _Cause:
    """Why an epoch ended. A root cause lies with the member that it names; others may follow from one."""

    epoch: int
    text: str
    root: bool


@dataclass
class _EpochProgress:
    number: int
    deadline: float
    forming: Forming
    prepared: set[str] = field(default_factory=set)
    up: set[str] = field(default_factory=set)
    links: dict[str, list[membership_pb2.LinkInfo]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    caches: dict[str, bytes] = field(default_factory=dict)
    serving_since: float = 0.0


class RingEpochs:
    """The machine of one ring. `next_epoch` gives numbers that rise and are never given twice; where it
    raises an error of the tree, that is the ring's reason until a later try succeeds."""

    def __init__(
        self,
        members: Mapping[str, str],
        next_epoch: Callable[[], int],
        timeouts: Timeouts,
        *,
        undecided: bool = False,
        weights: Mapping[str, int] | None = None,
    ) -> None:
        """`members` are ids, by rank, with the names that people know them by, and `weights` the bytes of
        the stage of each.

        While it is `undecided`, the members may have an epoch up that began before this machine.
        """
        self.undecided = undecided
        self.members = tuple(members)
        self.phase = Phase.WAITING
        self._names = dict(members)
        self._weights = dict.fromkeys(members, 0) | dict(weights or {})
        self._cause = _Cause(0, "forming", root=True)
        self._next_epoch = next_epoch
        self._timeouts = timeouts
        self._online: set[str] = set()
        self._missing: dict[str, float] = {}
        self._epoch: _EpochProgress | None = None
        self._last_number = 0
        self._not_before = 0.0
        self._backoff = Backoff(FIRST_BACKOFF, LAST_BACKOFF, steady=STEADY_SECONDS, spread=0.0)
        self._share = 0.0
        """Told of the last epoch, if that did not come to serve."""
        self.failures = 0
        """Epochs in a row that ended before they served."""

    @property
    def reason(self) -> str:
        """The reason for not serving: the missing members, else the end of the last epoch.

        While the ring serves, the members that the coordinator does not hear of, or "".
        """
        if self.phase is Phase.SERVING:
            silent = ", ".join(self._names[member] for member in self._missing)
            return f"the coordinator hears nothing of {silent}" if silent else ""
        return self._offline(self.awaited) if self.awaited else self._cause.text

    @property
    def awaited(self) -> list[str]:
        """Members that the next epoch waits for; all of a serving ring of which nothing is heard."""
        present = () if self._unheard else self._online
        return [member for member in self.members if member not in present]

    @property
    def epoch(self) -> int:
        """The current epoch, or the last one when there is none."""
        return self._epoch.number if self._epoch else self._last_number

    @property
    def links(self) -> list[membership_pb2.LinkInfo]:
        """The links of the current epoch as members reported them, each once: as its sender does, if it has
        said over which address."""
        reported = self._epoch.links.values() if self._epoch else ()
        both = sorted((link for links in reported for link in links), key=lambda link: bool(link.address))
        unique = {(link.from_rank, link.to_rank): link for link in both}
        return [unique[edge] for edge in sorted(unique)]

    @property
    def progress(self) -> dict[str, Reached]:
        """How far each member is that has said it, while the epoch forms."""
        forming = self._epoch if self.phase in (Phase.PREPARING, Phase.COMMITTING) else None
        return dict(forming.forming.reached) if forming else {}

    @property
    def slowest(self) -> tuple[str, Reached, float]:
        """The member for which the epoch that forms waits longest, how far it is, and the share of all
        members' work that is done."""
        current = self._epoch
        if current is None:
            return self.members[0], Reached(STARTING), 0.0
        return *current.forming.slowest(current.prepared), current.forming.share(current.prepared)

    def deadline(self) -> float | None:
        """The time of the next `tick` that has work, or None."""
        if self.phase is Phase.WAITING:
            return self._not_before if self._all_here() else None
        if self.phase is Phase.SERVING:
            return None if self._unheard else min(self._missing.values(), default=None)
        return self._epoch.deadline if self._epoch else None

    def online(
        self, member: str, now: float, *, serving: int = 0, links: Sequence[membership_pb2.LinkInfo] = ()
    ) -> list[Action]:
        """A member's stream is there (again). Has it the epoch `serving` up, that is not 0, with `links`."""
        if member not in self.members:
            return []
        if self._unheard:
            self._await(self._missing, now)
        self._online.add(member)
        self._missing.pop(member, None)
        adopted = self.undecided and serving and self._online == {member}
        actions = self._adopt(serving, now) if adopted else self.tick(now)
        current = self._current(member, serving, Phase.SERVING)
        if current is not None and links:
            current.links[member] = list(links)
        return actions

    def attended(self, epoch: int, now: float) -> None:
        """A member says that a gateway drives the epoch, and so hears of every member."""
        if self.phase is Phase.SERVING and epoch == self.epoch:
            self._await(self._missing, now)

    def lost(self, member: str, now: float) -> list[Action]:
        """A member's stream broke.

        A serving ring goes on for the grace period; for longer while a member says that it is attended, or
        while there is none that could say so.
        """
        if member not in self._online or member in self._missing:
            return []
        if self.phase is not Phase.SERVING:
            return self.offline(member, now)
        self._await((member,), now)
        return []

    def offline(self, member: str, now: float) -> list[Action]:
        """A member is gone: it said goodbye, was silent for too long, or was thrown out."""
        if member not in self.members:
            return []
        self._online.discard(member)
        self._missing.pop(member, None)
        if self._epoch is None:
            return self._blame(_Cause(self._last_number, self._offline([member]), root=True))
        return self._fail(self._offline([member]), now)

    def advanced(self, member: str, epoch: int, reached: Reached, now: float) -> list[Action]:
        """A member reports how far it is. Only other work and more bytes count against the deadline."""
        current = self._current(member, epoch, Phase.PREPARING)
        if current is None:
            return []
        before = current.forming.reached.get(member)
        current.forming.take(member, reached)
        if before is None or (before.what, before.done) != (reached.what, reached.done):
            current.deadline = now + self._timeouts.prepare
        return []

    def prepared(
        self,
        member: str,
        epoch: int,
        links: Sequence[membership_pb2.LinkInfo],
        now: float,
        address: str = "",
        caches: bytes = b"",
    ) -> list[Action]:
        """A member is ready for the commit, and awaits others of its group at `address`, if it is in one.

        `caches` as in EpochPrepared.
        """
        current = self._current(member, epoch, Phase.PREPARING)
        if current is None or member in current.prepared:
            return []
        current.prepared.add(member)
        current.links[member] = list(links)
        if address:
            current.addresses[member] = address
        if caches:
            current.caches[member] = caches
        current.deadline = now + self._timeouts.prepare
        if current.prepared != set(self.members):
            return []
        self.phase = Phase.COMMITTING
        current.deadline = now + self._timeouts.commit
        addresses = tuple(current.addresses[one] for one in self.members if one in current.addresses)
        caches_of_all = tuple(current.caches[one] for one in self.members if one in current.caches)
        return [Commit(current.number, addresses, caches_of_all), Changed()]

    def up(
        self, member: str, epoch: int, now: float, links: Sequence[membership_pb2.LinkInfo] = ()
    ) -> list[Action]:
        """A member's carrier has opened the confirmation records, and uses these `links`."""
        current = self._current(member, epoch, Phase.COMMITTING)
        if current is None:
            return []
        if links:
            current.links[member] = list(links)
        current.up.add(member)
        if current.up != set(self.members):
            return []
        self.phase, self.failures = Phase.SERVING, 0
        current.serving_since = now
        return [Changed()]

    def fault(self, member: str, epoch: int, reason: str, now: float, *, root: bool = True) -> list[Action]:
        """A member reports that the epoch cannot go on. A report on others is no `root` cause.

        One end has many witnesses, and the culprit's neighbours are often first. A later report therefore
        replaces the reason of an epoch that is over, unless a root cause is known.
        """
        if member not in self.members:
            return []
        if self._epoch is None or epoch != self._epoch.number:
            return self._blame(_Cause(epoch, reason, root))
        return self._fail(reason, now, root=root)

    def tick(self, now: float) -> list[Action]:
        """The actions that are due: the next epoch, or the end of one that is late or lost a member."""
        if self.phase is Phase.WAITING:
            return self._begin(now) if self._all_here() and now >= self._not_before else []
        if self.phase is Phase.SERVING:
            return self._drop_missing(now)
        if self._epoch is not None and now >= self._epoch.deadline:
            return self._fail(f"{self.phase.value} took too long: {self._late(self._epoch)}", now)
        return []

    def close(self, reason: str) -> list[Action]:
        """Ends the current epoch for good."""
        self._online.clear()
        self._missing.clear()
        current, self._epoch, self.phase = self._epoch, None, Phase.WAITING
        return [End(current.number, reason)] if current else []

    def _all_here(self) -> bool:
        return self._online.issuperset(self.members) and not self._missing

    def _current(self, member: str, epoch: int, phase: Phase) -> _EpochProgress | None:
        expected = self._epoch is not None and self._epoch.number == epoch and self.phase is phase
        return self._epoch if expected and member in self.members else None

    @property
    def _unheard(self) -> bool:
        return len(self._missing) == len(self.members)

    def _await(self, members: Iterable[str], now: float) -> None:
        self._missing |= dict.fromkeys(members, now + self._timeouts.grace)

    def _adopt(self, number: int, now: float) -> list[Action]:
        """Adopts the epoch that the first member reports; it serves until another member does not confirm
        it."""
        self._epoch = _EpochProgress(number, now, Forming(self._weights), serving_since=now)
        self._last_number = number
        self.phase, self.undecided = Phase.SERVING, False
        self._await((member for member in self.members if member not in self._online), now)
        self._online.update(self.members)
        return [Changed()]

    def _begin(self, now: float) -> list[Action]:
        self.undecided = False
        try:
            number = self._next_epoch()
        except SealringError as error:  # the number could not be stored
            self._not_before = now + RETRY_SECONDS
            text = f"the coordinator cannot begin an epoch: {error.message}"
            known, self._cause = self._cause, _Cause(self._last_number, text, root=True)
            return [Changed()] if self._cause != known else []
        forming = Forming(self._weights, self._share)
        self._epoch = _EpochProgress(number, now + self._timeouts.prepare, forming)
        self._last_number = self._epoch.number
        self.phase = Phase.PREPARING
        return [Prepare(self._epoch.number), Changed()]

    def _drop_missing(self, now: float) -> list[Action]:
        for member, until in list(self._missing.items()):
            if now >= until and not self._unheard:
                return self.offline(member, now)
        return []

    def _late(self, current: _EpochProgress) -> str:
        done = current.prepared if self.phase is Phase.PREPARING else current.up
        waited_for = [name for member, name in self._names.items() if member not in done]
        return f"{', '.join(waited_for)} did not finish"

    def _offline(self, members: Sequence[str]) -> str:
        names = ", ".join(self._names[member] for member in members)
        return f"{names} {'is' if len(members) == 1 else 'are'} offline"

    def _blame(self, cause: _Cause) -> list[Action]:
        """Take in a cause that is reported after the epoch has ended."""
        ended = self.phase is not Phase.SERVING and cause.epoch == self._cause.epoch
        if not ended or self._cause.root or not cause.root:
            return []
        self._cause = cause
        return [Changed()]

    def _fail(self, reason: str, now: float, *, root: bool = True) -> list[Action]:
        current, self._epoch = self._epoch, None
        if current is None:
            return []
        # A report on another member's failure while a member is missing: the missing one is the cause.
        if self._missing and not root:
            reason, root = self._offline(list(self._missing)), True
        for member in self._missing:
            self._online.discard(member)
        self._missing.clear()
        served = now - current.serving_since if self.phase is Phase.SERVING else 0.0
        self._share = 0.0 if self.phase is Phase.SERVING else current.forming.share(current.prepared)
        self.failures += self.phase is not Phase.SERVING
        self._not_before = now + self._backoff.after(served)
        self.phase, self._cause = Phase.WAITING, _Cause(current.number, reason, root)
        return [End(current.number, reason), Changed()]
