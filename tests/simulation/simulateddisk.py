"""The double of a machine's disk of prefixes and of an engine's way to it (`node/engine/disk.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from simulatedmodel import EMPTY

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring import NO_CHAIN, Chain, Restoring

_WRITE_SECONDS = 0.02
_STANDS_SECONDS = 0.5


@dataclass
class PrefixDisk:
    """The prefixes that one machine has stored, which stay when its engines end. A file is read in `seconds`.

    While it is `full` nothing is written, and while it `stands` nothing is read either."""

    seconds: float = 0.005
    full: bool = False
    stands: bool = False
    files: dict[tuple[bytes, bytes, bytes], Sequence[bytes]] = field(default_factory=dict)
    """Caches by the stage's key, scope and name; none where a file is damaged."""
    read = 0
    """Tokens that were read."""

    def lose(self) -> None:
        """All is gone."""
        self.files.clear()

    def damage(self) -> None:
        """Every second file does not open any more."""
        for key in list(self.files)[::2]:
            self.files[key] = ()


@dataclass
class _Recall:
    chain: Chain
    done: Callable[[int], None]
    wanted: bool = True
    states: list[bytes] = field(default_factory=lambda: [EMPTY])


class StoredPrefixes:
    """One engine's part of the disk, in one epoch. Where caches cannot be cut (`exact`), a file has the whole
    of a prefix; else a block of it."""

    def __init__(
        self, disk: PrefixDisk, key: bytes, later: Callable[[float, Callable[[], None]], None], *, exact: bool
    ) -> None:
        self.key = key
        self._disk, self._later, self._exact = disk, later, exact
        self._chains: dict[int, Chain] = {}
        self._seen: dict[int, int] = {}
        self._recalls: dict[int, _Recall] = {}
        self._free_at = 0.0

    # Behind

    def began(self, row: int, chain: Chain) -> None:
        """A row of this chain begins."""
        if chain.names:
            self._chains[row] = chain

    def forget(self, row: int) -> None:
        self._chains.pop(row, None)
        self._seen.pop(row, None)

    def computed(self, row: int, states: Sequence[bytes]) -> None:
        """Stores the blocks of a row with these caches that are not stored yet."""
        chain = self._chains.get(row, NO_CHAIN).first(len(states) - 1)
        if not self._exact and chain.tokens > self._seen.get(row, 0):
            self._seen[row] = chain.tokens
            self._later(_WRITE_SECONDS, partial(self._write, chain, states[: chain.tokens + 1]))

    def marked(self, row: int, states: Sequence[bytes]) -> None:
        """Stores the caches of a row that is marked now, if a block ends there."""
        chain = self._chains.get(row, NO_CHAIN).first(len(states) - 1)
        if chain.names and chain.tokens == len(states) - 1:
            self._later(_WRITE_SECONDS, partial(self._write, chain, states[:]))

    def _write(self, chain: Chain, states: Sequence[bytes]) -> None:
        for name, first, end in self._units(chain) if not (self._disk.full or self._disk.stands) else ():
            self._disk.files.setdefault((self.key, chain.scope, name), states[first + 1 : end + 1])

    def _units(self, chain: Chain) -> Iterator[tuple[bytes, int, int]]:
        """Names, first and last tokens of a chain's files."""
        if self._exact:
            yield chain.names[-1], 0, chain.tokens
        else:
            for name, (first, end) in zip(chain.names, pairwise([0, *chain.edges]), strict=True):
                yield name, first, end

    # Ahead

    def held(self, chain: Chain) -> Chain:
        """The part of a chain that is stored."""
        names, here = chain.names, [(self.key, chain.scope, name) in self._disk.files for name in chain.names]
        count = len(here) - here[::-1].index(True) if True in here else 0
        if not self._exact:
            count = [*here, False].index(False)
        return Chain(chain.scope, names[:count]) if count else NO_CHAIN

    @property
    def recalled(self) -> tuple[int, int]:
        """Tokens and number of the recalls that are under way, or of which no prefix is made yet."""
        return sum(one.chain.tokens for one in self._recalls.values()), len(self._recalls)

    def recall(self, number: int, chain: Chain, done: Callable[[int], None]) -> Callable[[], None] | None:
        """As `Disk.recall`: what is returned begins to read."""
        if self._exact:
            chain = self.held(chain)
        if not chain.names:
            done(0)
            return None
        recall = self._recalls[number] = _Recall(chain, done)
        return partial(self._begin, recall)

    def _begin(self, recall: _Recall) -> None:
        now, files = asyncio.get_running_loop().time(), len(list(self._units(recall.chain)))
        self._free_at = max(now, self._free_at) + self._disk.seconds * files
        self._later(self._free_at - now, partial(self._read, recall))

    def _read(self, recall: _Recall) -> None:
        if not recall.wanted:
            return
        if self._disk.stands:
            self._later(_STANDS_SECONDS, partial(self._read, recall))
            return
        scope = recall.chain.scope
        for name, _, _ in self._units(recall.chain):
            found = self._disk.files.get((self.key, scope, name), ())
            if not found:  # a damaged file is removed
                self._disk.files.pop((self.key, scope, name), None)
                break
            recall.states += found
        self._disk.read += len(recall.states) - 1
        recall.done(len(recall.states) - 1)

    def cancel(self, number: int) -> None:
        """Forgets a recall."""
        recall = self._recalls.pop(number, None)
        if recall is not None:
            recall.wanted = False

    def restored(self, change: Restoring) -> list[bytes]:
        """The caches that were recalled. Raises InvalidInput (BAD_STEP) where they are not those that are to
        be restored."""
        recall = self._recalls.pop(change.recall, None)
        part = recall.chain.first(change.tokens) if recall is not None else NO_CHAIN
        if (
            recall is None
            or (part.tokens, part.names[-1:]) != (change.tokens, (change.name,))
            or len(recall.states) <= change.tokens
            or (self._exact and part != recall.chain)
        ):
            raise InvalidInput(f"prefix {change.prefix} was not recalled here", reason="BAD_STEP")
        return recall.states[: change.tokens + 1]

    def end_epoch(self) -> None:
        """Forgets rows and recalls; what waits to be written is written."""
        self._chains.clear()
        for number in list(self._recalls):
            self.cancel(number)
