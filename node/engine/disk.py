"""Prefixes on their way to this member's disk and back, beside the compute loop.

**Behind.** Blocks are written while their prompt is computed, whether memory keeps it afterwards or not: a
full ring keeps nothing for long. At the end of a chunk the compute thread has MLX copy the blocks that are
not stored yet; a thread waits for these, and seals and writes them. Blocks that come while WAITING tokens
wait are left to a later chunk, or to the next time that their prompt is sent.

**Ahead.** Two threads read and open blocks and put them into arrays, before the first chunk of the row that
begins with them is announced. The compute thread joins the arrays of the blocks when it restores the prefix.
Files of a ring with other stages are put together from their parts, and parts that other members have are
brought first. Rows that go on from there are written like any others, as files of this stage.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from queue import SimpleQueue
from types import MappingProxyType

import mlx.core as mx
import structlog

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.composition import Restoring
from sealring.mesh.ring.prefix_marks import thinned
from sealring.mesh.ring.prefix_names import NO_CHAIN, Chain
from sealring.node.engine.blocks import BlockLayout
from sealring.node.engine.caches import Cache
from sealring.node.stored.parts import Former
from sealring.node.stored.places import Place, Unit, blocks_of, snapshot_of, units_of
from sealring.node.stored.store import Store
from sealring.node.wire.timelog import TimeLog, now
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import trace_pb2

log = structlog.get_logger()

PIECE = 4096
"""Tokens of a piece, at most: those of two chunks of a GPU, so that one makes up for another left out."""

WAITING = 2 * PIECE
"""Tokens that wait to be written before no more are taken: copies, in memory that the gateway does not
count. A snapshot counts as a piece."""

NEWEST = 64
"""Pieces whose blocks are removed where computing has failed: a failure is known a few steps later."""

READERS = 2
"""Threads that read: one opens a block while the other waits for the disk."""

MAX_RECALLS = 64
"""Recalls at once; a gateway has one for each row that it has opened ahead."""

SNAPSHOTS = 4
"""Snapshots of one conversation that are left if no row has begun with them. Each has the windows and states
of all layers, and mostly the last is wanted; others are where messages are edited or conversations part."""


@dataclass(slots=True, eq=False)
class _Piece:
    """Files of a chain that wait to be written: blocks, of which `arrays` have the tokens [first, end), or
    the snapshot at the chain's end. It is not `wanted` where computing has failed."""

    chain: Chain
    units: Sequence[Unit]
    arrays: list[mx.array]
    first: int = 0
    end: int = 0
    wanted: bool = True
    written: list[Place] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The tokens that it counts as while it waits."""
        return self.end - self.first or PIECE


@dataclass(slots=True, eq=False)
class _Recall:
    """Blocks that are read, and a snapshot as the last. `good` of them from the first on are of use; the rest
    is not read on. What this stage has not stored comes from the former ring with the number `former`."""

    chain: Chain
    done: Callable[[int], None]
    former: int | None
    units: Sequence[Unit]
    good: int
    blocks: dict[int, list[mx.array]] = field(default_factory=dict)
    unread: int = 0
    wanted: bool = True


class Disk:
    """One stage's prefixes on disk, for one epoch after the other."""

    def __init__(
        self,
        layout: BlockLayout,
        store: Store,
        former: Mapping[int, Former] = MappingProxyType({}),
        bring: Callable[[engine.BringBlocks], None] = lambda _: None,
    ) -> None:
        """`former` are rings with other stages, newest first, by the daemon's numbers. `bring` asks the
        daemon for what their members have; `brought` is its answer."""
        self.store = store
        self._former = former
        self._bring = bring
        self._layout = layout
        self._chains: dict[int, Chain] = {}  # of rows; compute thread
        self._seen: dict[int, int] = {}  # tokens of rows that are stored, or on their way; compute thread
        self._newest: deque[_Piece] = deque(maxlen=NEWEST)  # of this epoch; compute thread
        self._recalls: dict[int, _Recall] = {}
        self._lock = threading.Lock()
        self._behind: SimpleQueue[_Piece | list[_Piece] | None] = SimpleQueue()
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
        self._seen.pop(row, None)

    def computed(self, row: int, tokens: int, cache: Cache) -> None:
        """Writes the first blocks that are not stored of a row that has `tokens` tokens, behind the steps."""
        chain = self._chains.get(row, NO_CHAIN).first(tokens)
        begin = bisect_right(chain.edges, self._seen.get(row, 0))
        if begin == len(chain.names) or not self._layout.bytes(1):
            return
        wanted = [unit for unit in self._blocks(chain)[begin:] if self._wants(chain, unit)]
        while wanted and self._waiting < WAITING:  # several pieces of what was asked again in memory
            units = [unit for unit in wanted if unit.place.end <= wanted[0].place.first + PIECE]
            first, end = units[0].place.first, units[-1].place.end
            self._put(
                _Piece(chain, units, self._layout.views(self._layout.of_row(cache), first, end), first, end)
            )
            self._seen[row] = end
            wanted = wanted[len(units) :]
        if not wanted:
            self._seen[row] = chain.tokens

    def marked(self, row: int, tokens: int, cache: Cache) -> None:
        """Writes the snapshot of a row that has `tokens` tokens, if a block ends there."""
        chain, layout = self._chains.get(row, NO_CHAIN).first(tokens), self._layout
        if not chain.names or chain.tokens != tokens or not layout.snapshots or self._waiting > WAITING:
            return
        unit = Unit(snapshot_of(chain), is_snapshot=True)
        if self._wants(chain, unit) and (arrays := layout.snapshot(layout.of_row(cache), tokens)) is not None:
            self._put(_Piece(chain, [unit], arrays))

    def _wants(self, chain: Chain, unit: Unit) -> bool:
        return self.store.wants(chain.scope, unit.place)

    def _put(self, piece: _Piece) -> None:
        mx.async_eval(*piece.arrays)  # type: ignore[no-untyped-call]
        self._newest.append(piece)
        with self._lock:
            self._waiting += piece.size
        self._behind.put(piece)

    def distrust(self) -> None:
        """Computing has failed: no more of the newest pieces is written, and what was written is removed. A
        device that fails may leave anything in arrays; MLX raises its error in one waiting thread alone."""
        failed = list(self._newest)
        for piece in failed:
            piece.wanted = False
        self._newest.clear()
        self._behind.put(failed)

    # The thread that writes

    def _write_all(self) -> None:
        self.store.look()
        while (piece := self._behind.get()) is not None:
            if isinstance(piece, list):
                for each in piece:
                    self.store.remove(each.chain.scope, each.written)
                continue
            with self._lock:
                self._waiting -= piece.size
            try:
                self._write(piece)
            except Exception as error:  # the device may have failed; the epoch says so
                log.info("prefix_not_stored", error=type(error).__name__)
            piece.arrays = []
            del piece

    def _write(self, piece: _Piece) -> None:
        layout, scope = self._layout, piece.chain.scope
        blocks = layout.bytes_of(piece.arrays, piece.end - piece.first) if piece.end else []  # waits
        for unit in piece.units:
            place = unit.place
            if not piece.wanted:
                return
            if unit.is_snapshot:
                content = layout.snapshot_content(piece.arrays, place.end)
            else:
                content = layout.content(blocks, place.first - piece.first, place.end - piece.first)
            begin = now()
            if not self.store.write(scope, place, content):
                return
            self._writes.add(begin, now(), self._tokens(unit))
            piece.written.append(place)
        if layout.snapshots:
            self._thin(piece.chain)

    def _thin(self, chain: Chain) -> None:
        """Leaves SNAPSHOTS of this conversation's."""
        found = {edge: snapshot_of(chain.first(edge)) for edge in chain.edges}
        unused = [edge for edge, place in found.items() if self.store.unused(chain.scope, place)]
        gone = set(unused).difference(thinned(unused, SNAPSHOTS))
        self.store.remove(chain.scope, [found[edge] for edge in gone])

    # Any thread

    def _units(self, chain: Chain) -> list[Unit]:
        """What there is to read of a chain."""
        return [unit for unit in units_of(chain) if self._bytes(unit)]

    def _blocks(self, chain: Chain) -> list[Unit]:
        return [Unit(place) for place in blocks_of(chain)]

    def _bytes(self, unit: Unit) -> int:
        place, layout = unit.place, self._layout
        return layout.snapshot_bytes(place.end) if unit.is_snapshot else layout.bytes(place.end - place.first)

    def _tokens(self, unit: Unit) -> int:
        """The tokens that a file brings: those of a snapshot are in blocks, if there are any."""
        return 0 if unit.is_snapshot and self._layout.bytes(1) else unit.place.end - unit.place.first

    # The thread that reads commands: ahead

    def held(self, chain: Chain) -> Chain:
        """The part of a chain that is stored, with its snapshot if these caches need one. What other members
        have is taken to be there."""
        return self._reach(chain)[0]

    def _reach(self, chain: Chain) -> tuple[Chain, int, int | None]:
        """As `held`; how many blocks of it this stage has stored; the number of the former ring with most of
        the others."""
        if not self._layout.bytes(1):
            return self._with_snapshot(chain, tuple(self._former)), 0, next(iter(self._former), None)
        blocks = self._blocks(chain)
        own = self.store.held(chain.scope, [unit.place for unit in blocks])
        found, best = own, None
        for number, former in self._former.items() if own < len(blocks) else ():
            more = own + len(list(takewhile(partial(former.here, chain.scope), blocks[own:])))
            if more > found:
                found, best = more, number
        reached = Chain(chain.scope, chain.names[:found])
        if self._layout.snapshots:
            reached = self._with_snapshot(reached, () if best is None else (best,))
        return (reached if reached.names else NO_CHAIN), own, best

    def _with_snapshot(self, chain: Chain, former: Sequence[int]) -> Chain:
        """The part of a chain at whose end there is a snapshot."""
        names = chain.names
        while names:
            found = Chain(chain.scope, names)
            unit = Unit(snapshot_of(found), is_snapshot=True)
            if self.store.held(chain.scope, [unit.place]) or any(
                self._former[number].here(chain.scope, unit) for number in former
            ):
                return found
            names = names[:-1]
        return NO_CHAIN

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
        reached, own, former = self._reach(chain)
        if self._layout.snapshots:
            chain = reached
        units = self._units(chain) if chain.names else []
        recall = _Recall(chain, done, former, units, good=len(units), unread=len(units))
        with self._lock:
            if number in self._recalls:
                return None
            too_many = len(self._recalls) >= MAX_RECALLS or not chain.names
            if not too_many:
                self._recalls[number] = recall
        if too_many:
            done(0)
            return None
        if former is not None:
            lacks = partial(self._former[former].lacks, chain.scope)
            if any(map(lacks, units[own:])):
                asked = engine.BringBlocks(number=number, former=former, chain=chain.packed(), skip=own)
                return partial(self._bring, asked)
        return partial(self._begin, recall)

    def brought(self, number: int) -> None:
        """All that other members have of a recall is here."""
        with self._lock:
            recall = self._recalls.get(number)
        if recall is not None:
            self._begin(recall)

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
                content = self.store.read(recall.chain.scope, place, self._bytes(unit))
                if content is None and recall.former is not None:
                    content = self._former[recall.former].read(recall.chain.scope, unit)
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
        if self._layout.snapshots:
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
        if recall is not None and self._layout.snapshots:
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
        layout = self._layout
        snapshot = (
            blocks.pop() if layout.snapshots else layout.snapshot_arrays(memoryview(b""), change.tokens)
        )
        layout.fill(layout.of_row(cache), blocks, snapshot, change.tokens)
        return cache

    # Epochs

    def end_epoch(self) -> None:
        """Forgets rows and recalls; what waits to be written is written. Compute thread."""
        self._chains.clear()
        self._seen.clear()
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
