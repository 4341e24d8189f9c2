"""Chooses the stored blocks that are worth their bytes. Pure; times are seconds of the wall clock."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sealring.mesh.clock import Clock
from sealring.mesh.ring.prefix_names import NO_CHAIN, Chain

MAX_AGE = 30 * 86_400.0
"""Seconds without use after which a block goes: the conversation is over."""

HALF_LIFE = 86_400.0
"""Seconds in which what a block is worth halves: what was sent yesterday is sent again less often than what
was sent today."""

LEAST_FREE = 1 << 30
"""Bytes that are left free on the disk."""

MOST = 20 << 30
SHARE = 10
"""The part of the free disk that bounds prefixes, as MOST does, if no setting says otherwise."""

WRITE_RATE = 2 << 20
BURST = MOST
"""Bytes a second that are written in the long run, 170 GiB a day, and at once, as much as may be stored. The
SSD of a Mac bears some hundred times its size, so that 512 GB last for years of such days."""


MOST_SEEN = 1 << 15
"""Names of blocks that are remembered: 8 million tokens of prompts that were asked once, in some 5 MB."""


class Sights:
    """Which blocks of a prompt are worth writing before anybody has needed them. Any thread."""

    def __init__(self) -> None:
        self._seen: dict[bytes, None] = {}  # names, those that were seen last at the end
        self._lock = threading.Lock()

    def worth(self, chain: Chain, *, returns: bool) -> Chain:
        """The part of a prompt's chain to be written: all of it if the prompt `returns`, as the beginning of
        a next one, else what an earlier prompt began with as well."""
        with self._lock:
            known = sum(1 for _ in itertools.takewhile(self._seen.__contains__, chain.names))
            for name in chain.names:
                self._seen.pop(name, None)
                self._seen[name] = None
            for name in list(itertools.islice(self._seen, max(0, len(self._seen) - MOST_SEEN))):
                del self._seen[name]
        names = chain.names if returns else chain.names[:known]
        return Chain(chain.scope, names) if names else NO_CHAIN


class Entry(NamedTuple):
    """A stored block: its bytes, its tokens [first, end), how often it was used, and when last."""

    size: int
    first: int
    end: int
    uses: int
    used: float


def worth(entry: Entry, now: float) -> tuple[int, int]:
    """The order of eviction, least first: tokens saved times uses, over bytes. Among blocks that are about
    alike, those that lie deeper in their prompt go first, since they are of no use without the others."""
    tokens = (entry.end - entry.first) * (1 + entry.uses) / max(1, entry.size)
    age = max(0.0, now - entry.used) / HALF_LIFE
    return math.floor(2 * (math.log2(tokens) - age)), -entry.end


def victims(entries: Mapping[str, Entry], excess: int, now: float) -> list[str]:
    """The blocks to remove so that `excess` bytes become free, and all that are too old."""
    gone = [name for name, entry in entries.items() if now - entry.used > MAX_AGE]
    excess -= sum(entries[name].size for name in gone)
    old = set(gone)
    order = sorted((worth(entry, now), name) for name, entry in entries.items() if name not in old)
    for _, name in order if excess > 0 else ():
        if excess <= 0:
            break
        gone.append(name)
        excess -= entries[name].size
    return gone


def bound(setting: int | None, used: int, free: int) -> int:
    """Bytes that may be stored. Without a setting the free disk decides; what is stored counts as free."""
    return setting if setting is not None else min(MOST, (used + free) // SHARE)


def total(entries: Iterable[Entry]) -> int:
    """The bytes of all of them."""
    return sum(entry.size for entry in entries)


class WriteBudget:
    """The bytes that may be written now: WRITE_RATE in the long run, BURST at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left, self._since = float(BURST), clock()

    def take(self, size: int) -> bool:
        """Whether `size` bytes may be written; if so, they count."""
        now = self._clock()
        self._left = min(BURST, self._left + max(0.0, now - self._since) * WRITE_RATE)
        self._since = now
        if size > self._left:
            return False
        self._left -= size
        return True
