"""The world that all simulated machines share: the connections between carriers, and the faults of a run.

A connection is as reliable as TCP: what the network drops is sent again, and an end that is gone resets it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

Send: TypeAlias = Callable[[str, str, Callable[[], None]], None]
"""Called with the hosts from and to which something goes, and what happens at its arrival. The network may
change the order, and drop what cannot arrive or keep it until it can."""

_FIRST_RETRY, _LONGEST_RETRY = 0.3, 5.0


@dataclass
class Served:
    """One member's part in an epoch, for those who judge a run."""

    host: str
    ring: str
    epoch: int
    rank: int
    size: int
    steps: int = 0
    rows: int = 0
    """Rows in its caches now."""
    kv_bytes: int = 0
    open: bool = True
    since: float = 0.0
    """When it was opened."""


class Wires:
    """Finds carriers by their addresses. `broken` has each invariant that a run has broken."""

    def __init__(self, send: Send, source: random.Random, *, lost_seconds: float = 120.0) -> None:
        """`lost_seconds`: after this time without an acknowledgement a connection is reset."""
        self.send = send
        self.random = source
        self.lost_seconds = lost_seconds
        self.broken: list[str] = []
        self.served: list[Served] = []
        self.begun: Counter[str] = Counter()
        """How often a head has begun a prompt."""
        self.announced = set[str]()
        """The prompts of which a chunk is announced to a head."""
        self.resumed = 0
        """Rows that went on behind tokens of an earlier epoch."""
        self.computed: dict[str, float] = {}
        """When a head last had a token for a prompt."""
        self.listeners: dict[tuple[str, int], Any] = {}
        self._digests: dict[tuple[str, int, int], bytes] = {}
        self._highest: dict[tuple[str, str], int] = {}

    def note(self, what: str) -> None:
        """Notes a broken invariant."""
        self.broken.append(what)

    def listener(self, address: tuple[str, int]) -> Any:
        """The carrier that listens there, or None."""
        return self.listeners.get(address) or self.listeners.get(("0.0.0.0", address[1]))

    def opened(self, served: Served) -> None:
        """An engine has opened an epoch."""
        key = served.host, served.ring
        if served.epoch <= self._highest.get(key, 0):
            self.note(f"{served.host} opens epoch {served.epoch} of {served.ring} after a later one")
        self._highest[key] = max(served.epoch, self._highest.get(key, 0))
        for other in self.served:
            same = (other.ring, other.epoch, other.rank) == (served.ring, served.epoch, served.rank)
            if same and other.host != served.host:
                self.note(f"two members are rank {served.rank} of {served.ring} in epoch {served.epoch}")
        served.since = asyncio.get_running_loop().time()
        self.served.append(served)

    def forming(self, host: str, ring: str, epoch: int) -> None:
        """A carrier is to meet its neighbours: all members of the epoch have opened it before."""
        members = [one for one in self.served if (one.ring, one.epoch) == (ring, epoch)]
        if not members or len({one.rank for one in members}) < members[0].size:
            self.note(f"{host} joins epoch {epoch} of {ring}, which not all members have opened")

    def executed(self, served: Served, step: int, digest: bytes) -> None:
        """An engine has computed a step."""
        if step != served.steps + 1:
            self.note(f"{served.host} computes step {step} after {served.steps}")
        served.steps = step
        key = served.ring, served.epoch, step
        if self._digests.setdefault(key, digest) != digest:
            self.note(f"members of {served.ring} disagree about step {step} of epoch {served.epoch}")


@dataclass
class Pipe:
    """A connection from a carrier to the next, which carries bytes one way."""

    wires: Wires
    caller: Any
    listener: Any
    shut: bool = False
    """Whether the listener has closed its end."""
    ended: bool = False
    """Whether the listener has heard that the caller has closed its end."""
    _sent: int = 0
    _received: int = 0
    _early: dict[int, bytes] = field(default_factory=dict)
    _unacknowledged: deque[tuple[int, float, bytes]] = field(default_factory=deque)
    _retry: float = _FIRST_RETRY
    _timer: asyncio.TimerHandle | None = None
    _over: bool = False

    def write(self, message: bytes) -> None:
        """Sends a message; an empty one is the end."""
        if self._over:
            return
        now = asyncio.get_running_loop().time()
        self._unacknowledged.append((self._sent, now, message))
        self._transmit(self._sent, message)
        self._sent += 1
        if self._timer is not None and not message:
            self._timer.cancel()  # it may be of a process that has ended by now
            self._timer = None
        if self._timer is None:
            self._arm()

    def vanish(self) -> None:
        """The caller's machine has lost its power."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def _transmit(self, number: int, message: bytes) -> None:
        self.wires.send(self.caller.host, self.listener.host, partial(self._arrive, number, message))

    def _arrive(self, number: int, message: bytes) -> None:
        if self.shut or self.listener.child.status is not None:
            self.wires.send(self.listener.host, self.caller.host, self._reset)
        elif number >= self._received:
            self._early[number] = message
            while self._received in self._early:
                next_one = self._early.pop(self._received)
                self._received += 1
                self.listener.child.do(partial(self.listener.arrived, self, next_one))

    def _reset(self) -> None:
        if not self._over:
            self.vanish()
            self.caller.child.do(partial(self.caller.cut, self))

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._retry, self._look)

    def _look(self) -> None:
        """Sends again what has not arrived. The acknowledgement itself is not simulated."""
        self._timer = None
        while self._unacknowledged and self._unacknowledged[0][0] < self._received:
            self._unacknowledged.popleft()
            self._retry = _FIRST_RETRY
        if self._over or not self._unacknowledged:
            return
        now = asyncio.get_running_loop().time()
        if now - self._unacknowledged[0][1] > self.wires.lost_seconds:
            self._reset()
            return
        if now - self._unacknowledged[0][1] >= _FIRST_RETRY:
            for number, _, message in self._unacknowledged:
                self._transmit(number, message)
            self._retry = min(2 * self._retry, _LONGEST_RETRY)
        self._arm()
