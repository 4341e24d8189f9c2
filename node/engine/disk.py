"""Prefixes on their way to this member's disk and back, beside the compute loop.

**Behind.** A prefix that is kept in memory is a copy that nothing changes any more. The compute thread only
asks MLX for its bytes; a thread waits for these, and seals and writes the blocks that are not stored yet. A
prefix that is dropped meanwhile is not finished. Prompts that come while two wait to be written are not
written: they are when they are sent again.

**Ahead.** Two threads read and open blocks and put them into arrays, before the first chunk of the row that
begins with them is announced. The compute thread joins the arrays of the blocks when it restores the prefix.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from queue import SimpleQueue

import mlx.core as mx
import structlog

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.composition import Keeping, Restoring
from sealring.mesh.ring.prefix_marks import thinned
from sealring.mesh.ring.prefix_names import NAME_BYTES, NO_CHAIN, Chain
from sealring.node.engine.blocks import Layout
from sealring.node.engine.staging.caches import Cache
from sealring.node.stored.codec import Place
from sealring.node.stored.store import Store
from sealring.node.wire.timelog import TimeLog, now
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import trace_pb2

log = structlog.get_logger()

WAITING = 2
"""Prefixes that wait to be written: their arrays take memory that the gateway may count as free."""

NEWEST = 64
"""Prefixes whose blocks are removed where computing has failed: a failure is known a few steps later."""

READERS = 2
"""Threads that read: one opens a block while the other waits for the disk."""

MAX_RECALLS = 64
"""Recalls at once; a gateway has one for each row that it has opened ahead."""

SNAPSHOTS = 4
"""Snapshots of one conversation that are left if no row has begun with them. Each has the windows and states
of all layers, and mostly the last is wanted; others are where messages are edited or conversations part."""


def blocks_of(chain: Chain) -> list[Place]:
    """The places of a chain's blocks."""
    return [
        Place(name, first, end)
        for name, (first, end) in zip(chain.names, pairwise([0, *chain.edges]), strict=True)
    ]


def snapshot_of(chain: Chain) -> Place:
    """The place of the snapshot at the end of a chain."""
    name = hashlib.sha256(b"sealring/v1 snapshot" + chain.names[-1]).digest()[:NAME_BYTES]
    return Place(name, 0, chain.tokens)


@dataclass(frozen=True, slots=True)
class _Unit:
    """A file to be read: a block, or the snapshot."""

    place: Place
    size: int
    is_snapshot: bool = False


@dataclass(slots=True, eq=False)
class _Prefix:
    """A kept prefix that waits to be written: of `tokens` tokens, with the snapshot at its chain's end."""

    chain: Chain
    tokens: int
    arrays: list[mx.array]
    snapshot: list[mx.array]
    begun: bool = False
    dropped: bool = False
    written: list[Place] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Recall:
    """Blocks that are read, and a snapshot as the last. `good` of them from the first on are of use; the rest
    is not read on."""

    chain: Chain
    done: Callable[[int], None]
    units: Sequence[_Unit]
    good: int
    blocks: dict[int, list[mx.array]] = field(default_factory=dict)
    unread: int = 0
    wanted: bool = True


class Disk:
    """One stage's prefixes on disk, for one epoch after the other."""

    def __init__(self, layout: Layout, store: Store) -> None:
        self.store = store
        self._layout = layout
        self._chains: dict[int, Chain] = {}  # of rows; compute thread
        self._writing: dict[int, _Prefix] = {}  # by the number of the prefix; compute thread
        self._newest: deque[_Prefix] = deque(maxlen=NEWEST)  # of this epoch; compute thread
        self._recalls: dict[int, _Recall] = {}
        self._lock = threading.Lock()
        self._behind: SimpleQueue[_Prefix | list[_Prefix] | None] = SimpleQueue()
        self._waiting = 0
        self._tokens_read = 0
        self._reads, self._writes = TimeLog(3), TimeLog(3)  # of blocks: begin, end, tokens
        self._readers = ThreadPoolExecutor(READERS, "prefixes ahead")
        self._writer = threading.Thread(target=self._write_all, name="prefixes behind", daemon=True)
        self._writer.start()

    def figures(self) -> engine.StoredFigures:
        """Figures for the daemon; any thread."""
        found = self.store.figures()
        return engine.StoredFigures(
            bytes=found.bytes,
            blocks=found.blocks,
            tokens_read=self._tokens_read,
            oldest=int(found.oldest),
            broken=not found.writes,
            damaged=found.damaged,
        )

    @property
    def logs(self) -> dict[trace_pb2.Activity.ValueType, TimeLog]:
        """Begin, end and tokens of blocks that were read and written."""
        return {trace_pb2.ACTIVITY_RECALL: self._reads, trace_pb2.ACTIVITY_STORE: self._writes}

    def since(self, moment: int) -> tuple[int, int]:
        """Tokens that were read and written since then, nanoseconds on the machine's clock. Any thread."""
        both = (log.entries()[0] for log in (self._reads, self._writes))
        read, written = (sum(tokens for _, end, tokens in entries if end >= moment) for entries in both)
        return read, written

    # The compute thread: behind

    def began(self, row: int, chain: Chain) -> None:
        """A row of this chain begins."""
        if chain.names:
            self._chains[row] = chain

    def forget(self, row: int) -> None:
        self._chains.pop(row, None)

    def write(self, keeping: Keeping, cache: Cache, marks: Mapping[int, Callable[[], Cache]]) -> None:
        """Writes what was kept of a row, behind the steps. `cache` is evaluated, or will be without this.

        `marks` make the row's cache, lazily, as it was at other lengths. If it cannot be cut, it is stored up
        to the longest of these at which a block ends.
        """
        layout = self._layout
        chain = self._chains.get(keeping.row, NO_CHAIN).first(keeping.tokens)
        if layout.held:
            chain = chain.first(max(marks.keys() & set(chain.edges), default=0))
        if not chain.names or self._waiting >= WAITING:
            return
        units = reversed(self._units(chain))  # most often the last is wanted; one before it if it was damaged
        if not any(self.store.wants(chain.scope, unit.place) for unit in units):
            return
        snapshot = layout.snapshot(marks[chain.tokens](), chain.tokens) if layout.held else []
        if snapshot is None:
            return
        arrays = layout.views(cache)
        mx.async_eval(*arrays, *snapshot)  # type: ignore[no-untyped-call]
        prefix = self._writing[keeping.prefix] = _Prefix(chain, keeping.tokens, arrays, snapshot)
        self._newest.append(prefix)
        with self._lock:
            self._waiting += 1
        self._behind.put(prefix)

    def drop(self, prefix: int) -> None:
        """A kept prefix is given up: no more of it is written than the block that is."""
        writing = self._writing.pop(prefix, None)
        if writing is None:
            return
        with self._lock:
            writing.dropped = True
            if not writing.begun:  # another may wait in its place
                self._free(writing)

    def _free(self, prefix: _Prefix) -> None:
        """Gives the memory of a prefix back that waits no more. The lock is held."""
        if prefix.arrays or prefix.snapshot:
            prefix.arrays, prefix.snapshot = [], []
            self._waiting -= 1

    def distrust(self) -> None:
        """Computing has failed: no more of the newest prefixes is written, and what was written is removed.
        A device that fails may leave anything in arrays; MLX raises its error in one waiting thread alone."""
        failed = list(self._newest)
        for prefix in failed:
            prefix.dropped = True
        self._newest.clear()
        self._behind.put(failed)

    # The thread that writes

    def _write_all(self) -> None:
        self.store.look()
        while (prefix := self._behind.get()) is not None:
            if isinstance(prefix, list):
                for each in prefix:
                    self.store.remove(each.chain.scope, each.written)
                continue
            with self._lock:
                prefix.begun = True
                waits = not prefix.dropped
            try:
                if waits:
                    self._write(prefix)
            except Exception as error:  # the device may have failed; the epoch says so
                log.info("prefix_not_stored", error=type(error).__name__)
            with self._lock:
                self._free(prefix)
            del prefix

    def _write(self, prefix: _Prefix) -> None:
        layout, chain = self._layout, prefix.chain
        arrays = layout.bytes_of(prefix.arrays, prefix.tokens)  # waits for the device
        for unit in self._units(chain):
            place = unit.place
            if prefix.dropped:
                return
            if not self.store.wants(chain.scope, place):
                continue
            if unit.is_snapshot:
                content = layout.snapshot_content(prefix.snapshot, chain.tokens)
            else:
                content = layout.content(arrays, place.first, place.end)
            begin = now()
            if not self.store.write(chain.scope, place, content):
                return
            self._writes.add(begin, now(), self._tokens(unit))
            prefix.written.append(place)
        if layout.held:
            self._thin(chain)

    def _thin(self, chain: Chain) -> None:
        """Leaves SNAPSHOTS of this conversation's."""
        found = {edge: snapshot_of(chain.first(edge)) for edge in chain.edges}
        unused = [edge for edge, place in found.items() if self.store.unused(chain.scope, place)]
        gone = set(unused).difference(thinned(unused, SNAPSHOTS))
        self.store.remove(chain.scope, [found[edge] for edge in gone])

    # Any thread

    def _units(self, chain: Chain) -> list[_Unit]:
        """What there is to read and write of a chain."""
        layout = self._layout
        blocks = blocks_of(chain) if layout.bytes(1) else []
        units = [_Unit(place, layout.bytes(place.end - place.first)) for place in blocks]
        if layout.held:
            units.append(_Unit(snapshot_of(chain), layout.snapshot_bytes(chain.tokens), is_snapshot=True))
        return units

    def _tokens(self, unit: _Unit) -> int:
        """The tokens that a file brings: those of a snapshot are in blocks, if there are any."""
        return 0 if unit.is_snapshot and self._layout.bytes(1) else unit.place.end - unit.place.first

    # The thread that reads commands: ahead

    def held(self, chain: Chain) -> Chain:
        """The part of a chain whose blocks are stored, with its snapshot if these caches need one."""
        names = chain.names
        if self._layout.bytes(1):
            names = names[: self.store.held(chain.scope, blocks_of(chain))]
        while names and self._layout.held:
            found = Chain(chain.scope, names)
            if self.store.held(chain.scope, [snapshot_of(found)]):
                break
            names = names[:-1]
        return Chain(chain.scope, names) if names else NO_CHAIN

    @property
    def recalled(self) -> tuple[int, int]:
        """Tokens and number of recalls whose blocks are in memory, or on their way there, and of which no
        prefix is made yet."""
        with self._lock:
            return sum(recall.chain.tokens for recall in self._recalls.values()), len(self._recalls)

    def recall(self, number: int, chain: Chain, done: Callable[[int], None]) -> Callable[[], None] | None:
        """Counts a recall. What is returned begins to read; None where nothing is to be read.

        `done` gets the tokens that are in memory once all is read, in any thread.
        """
        if self._layout.held:
            chain = self.held(chain)
        units = self._units(chain) if chain.names else []
        recall = _Recall(chain, done, units, good=len(units), unread=len(units))
        with self._lock:
            if number in self._recalls:
                return None
            too_many = len(self._recalls) >= MAX_RECALLS or not chain.names
            if not too_many:
                self._recalls[number] = recall
        if too_many:
            done(0)
            return None
        return partial(self._begin, recall)

    def _begin(self, recall: _Recall) -> None:
        if recall.wanted:
            for index in range(len(recall.units)):
                self._readers.submit(self._read, recall, index)

    def cancel(self, number: int) -> None:
        """Forgets a recall."""
        with self._lock:
            recall = self._recalls.pop(number, None)
            if recall is not None:
                recall.wanted = False
                recall.blocks.clear()  # what is still to be read of it stands in line, and holds it

    # The threads that read

    def _read(self, recall: _Recall, index: int) -> None:
        unit = recall.units[index]
        arrays, begin, place = None, now(), unit.place
        try:
            if recall.wanted and index < recall.good:
                content = self.store.read(recall.chain.scope, place, unit.size)
                if content is not None:
                    tokens = place.end - place.first
                    read = self._layout.snapshot_arrays if unit.is_snapshot else self._layout.arrays
                    arrays = read(content, tokens)
        except Exception as error:
            log.warning("prefix_not_read", error=type(error).__name__)
        with self._lock:
            if arrays is None:
                recall.good = min(recall.good, index)
            elif recall.wanted:
                recall.blocks[index] = arrays
                self._reads.add(begin, now(), self._tokens(unit))
            recall.unread -= 1
            last = not recall.unread
        if last and recall.wanted:
            self._finish(recall)

    def _finish(self, recall: _Recall) -> None:
        """All is read. A snapshot is of use with all of its blocks only, and they are with it."""
        chain = recall.chain
        names = chain.names[: recall.good]
        if self._layout.held:
            names = chain.names if recall.good == len(recall.units) else ()
        found = Chain(chain.scope, names)
        self.store.used(chain.scope, [unit.place for unit in recall.units[: recall.good]] if names else [])
        with self._lock:
            self._tokens_read += found.tokens
        recall.done(found.tokens)

    # The compute thread: ahead

    def restored(self, change: Restoring, cache: Cache) -> Cache:
        """An empty cache for one row, with what was recalled. Raises InvalidInput (BAD_STEP) where that is
        not what is to be restored, on all members alike."""
        with self._lock:
            recall = self._recalls.pop(change.recall, None)
        chain = recall.chain.first(change.tokens) if recall is not None else None
        count = len(chain.names) if chain is not None else 0
        if recall is not None and self._layout.held:
            count = len(recall.units) if chain == recall.chain else 0
        if (
            recall is None
            or chain is None
            or recall.unread
            or not 0 < count <= recall.good
            or (chain.tokens, chain.names[-1]) != (change.tokens, change.name)
        ):
            raise InvalidInput(
                f"prefix {change.prefix} was not recalled here",
                reason="BAD_STEP",
                hint="gateway and member disagree; the epoch must end",
            )
        blocks = [recall.blocks[index] for index in range(count)]
        snapshot = blocks.pop() if self._layout.held else []
        self._layout.fill(cache, blocks, snapshot, change.tokens)
        return cache

    # Epochs

    def end_epoch(self) -> None:
        """Forgets rows and recalls; what waits to be written is written. Compute thread."""
        self._chains.clear()
        self._writing.clear()
        self._newest.clear()
        with self._lock:
            numbers = list(self._recalls)
        for number in numbers:
            self.cancel(number)

    def close(self, seconds: float = 0.0) -> None:
        """Ends the threads. Waits up to `seconds` for what is still to be written."""
        self.end_epoch()
        self._behind.put(None)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.join(seconds)
