"""The disks of members in virtual time: what is stored of prompts, when it is written, and how long it takes
to be read. They do what `node.engine.disk` does, without bytes; all members of a ring are alike."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sealring.mesh.ring import NO_CHAIN, Chain
from sealring.node.engine.disk import PIECE, WAITING
from sealring.node.stored.policy import WriteBudget


@dataclass(frozen=True)
class DiskTime:
    """Bytes of a token and of a snapshot on the member that stores most, and bytes a second of its disk with
    sealing and opening."""

    token_bytes: float
    snapshot_bytes: float
    reads: float
    writes: float


class VirtualDisk:
    """The stored blocks of one stage. `clock` gives the virtual time in seconds."""

    def __init__(self, times: DiskTime, clock: Callable[[], float]) -> None:
        self._times, self._clock = times, clock
        self._stored: set[bytes] = set()
        self._pieces: deque[deque[tuple[bytes, float]]] = deque()  # names and bytes of files to be written
        self._free = 0.0  # when the writer is done with the last file
        self._seen: dict[int, int] = {}
        self._budget = WriteBudget(clock)
        self._read = 0.0  # until when it reads
        self.written = 0.0

    def computed(self, row: int, chain: Chain) -> None:
        """A row's prompt is computed up to the end of a chain."""
        self._write()
        files = [
            (name, first, end)
            for name, (first, end) in zip(chain.names, itertools.pairwise([0, *chain.edges]), strict=True)
            if first >= self._seen.get(row, 0) and name not in self._stored
        ]
        while files and self._waiting < WAITING:
            piece = [(name, first, end) for name, first, end in files if end <= files[0][1] + PIECE]
            self._put((name, (end - first) * self._times.token_bytes) for name, first, end in piece)
            self._seen[row] = piece[-1][2]
            files = files[len(piece) :]
        if not files:
            self._seen[row] = chain.tokens

    def marked(self, chain: Chain) -> None:
        """A row is marked at the end of a chain."""
        self._write()
        if self._times.snapshot_bytes and (name := _snapshot(chain.names[-1])) not in self._stored:
            self._put([(name, self._times.snapshot_bytes)])

    @property
    def _waiting(self) -> float:
        """Tokens behind the piece that is being written."""
        pieces = itertools.islice(self._pieces, 1, None)
        return sum(size for piece in pieces for _, size in piece) / self._times.token_bytes

    def _put(self, files: Iterable[tuple[bytes, float]]) -> None:
        if piece := deque(files):
            if not self._pieces:
                self._free = max(self._free, self._clock())
            self._pieces.append(piece)

    def held(self, chain: Chain) -> Chain:
        """The part of a chain that is stored."""
        self._write()
        count = next((i for i, name in enumerate(chain.names) if name not in self._stored), len(chain.names))
        names = chain.names[:count]
        while names and self._times.snapshot_bytes and _snapshot(names[-1]) not in self._stored:
            names = names[:-1]
        return Chain(chain.scope, names) if names else NO_CHAIN

    def read(self, chain: Chain) -> float:
        """When a chain is read, behind what is read already."""
        size = chain.tokens * self._times.token_bytes + self._times.snapshot_bytes
        self._read = max(self._read, self._clock()) + size / self._times.reads
        return self._read

    def end_epoch(self) -> None:
        """Rows are numbered anew."""
        self._seen.clear()

    def _write(self) -> None:
        """Takes the writer on to this moment."""
        while self._pieces:
            files = self._pieces[0]
            while files and self._free + files[0][1] / self._times.writes <= self._clock():
                name, size = files.popleft()
                self._free += size / self._times.writes
                if not self._budget.take(round(size)):
                    files.clear()
                    break
                self._stored.add(name)
                self.written += size
            if files:
                return
            self._pieces.popleft()


def _snapshot(name: bytes) -> bytes:
    return b"snapshot" + name
