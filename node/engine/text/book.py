"""The head's book of open rows, and of prefixes that are kept, which no row but their owners' begins with."""

from __future__ import annotations

import hmac
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sealring.mesh.errors import Internal, InvalidInput, ResourceExhausted, SealringError
from sealring.mesh.ring.composition import (
    Adopting,
    Change,
    Chunk,
    Dropping,
    Eviction,
    Keeping,
    ResolvedStep,
    Restoring,
)
from sealring.mesh.ring.kept_prefixes import Origin
from sealring.mesh.ring.prefix_ends import Ends
from sealring.mesh.ring.prefix_names import KEY_BYTES, NO_CHAIN, Chain, PrefixNames, chain_of, is_clear
from sealring.node.engine.drafts.source import RowSource, Source
from sealring.node.engine.logprobs import Asking, TokenLogprobs, asking_of, pooled
from sealring.node.engine.text.answers import OpenRow, Tokens, parts_of, rates, refusal
from sealring.node.engine.text.picture import Picture
from sealring.node.stored.policy import Sights
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference

MAX_UNSTARTED = 1024
"""The most prompts at the head that are not prefilled, and the most recalls.

A gateway opens 16 ahead; the head does not trust it to.
"""

Emit = Callable[[engine.EngineEvent], None]


class StoredNames(NamedTuple):
    """A key for the chains of prompts, and what finds the part of a chain that is on disk; any thread."""

    key: bytes
    held: Callable[[Chain], Chain]


class Book:
    """Implements node.engine.epoch.Prompts. Threads that read prompts add rows.

    `emit` is called in the thread that calls a method.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._rows: dict[int, OpenRow] = {}
        self._kept: dict[int, tuple[Origin, PrefixNames]] = {}
        self._earlier: dict[Origin, PrefixNames] = {}
        self._prefix_key = os.urandom(KEY_BYTES)
        self._ends = Ends()
        self._recalled: dict[int, tuple[PrefixNames, Chain]] = {}
        self._disk: StoredNames | None = None
        self._sights = Sights()
        self._asking: dict[int, tuple[int, int]] = {}  # of open rows that ask for log-probabilities: of how
        # many tokens in each place, and of how many of the prompt
        self.width = 0
        """Numbers of the vector that each row has, where the model makes these."""

        self._lock = threading.Lock()
        self._telling = threading.Lock()  # outputs leave in their order; taken before the other lock

    # The threads that read prompts

    def holds(self, row: int) -> bool:
        """Whether the row is open."""
        return row in self._rows

    @property
    def unstarted(self) -> int:
        """Prompts that are not prefilled."""
        with self._lock:
            return sum(row.prompt is not None for row in self._rows.values())

    @property
    def picture_bytes(self) -> int:
        """The images of all prompts that are not prefilled."""
        with self._lock:
            return sum(picture.nbytes for row in self._rows.values() for picture in row.pictures)

    def add(self, first: int, rows: Sequence[OpenRow], likeliest: int | None) -> None:
        """Opens rows, numbered from `first`.

        Rows that ask for log-probabilities get those of the `likeliest` tokens at each place.
        """
        with self._lock:
            for number, row in enumerate(rows, first):
                self._rows[number] = row
                if likeliest is not None:
                    self._asking[number] = likeliest, max(0, len(row.scored) - 1)

    def chain(self, scope: bytes, words: bytes) -> Chain:
        """The names on disk of a prompt's blocks, where it may be stored."""
        disk = self._disk  # another thread begins epochs, which have no disk at first
        return chain_of(disk.key, scope, words) if disk is not None and is_clear(scope) else NO_CHAIN

    def worth(self, chain: Chain, *, returns: bool) -> Chain:
        """The part of a chain that is worth to be stored; `returns`: a next prompt will begin with it."""
        return self._sights.worth(chain, returns=returns) if chain.names else NO_CHAIN

    def stored(self, chain: Chain) -> bytes:
        """The part of a chain that is on disk, packed."""
        disk = self._disk
        return disk.held(chain).packed() if disk is not None and chain.names else b""

    def name(self, scope: bytes, words: bytes) -> tuple[PrefixNames, bytes, bytes]:
        """The names of a prompt's prefixes, and what the gateway gets of them: regular names, and ends."""
        names = PrefixNames(self._prefix_key, scope)
        return names, *self._ends.extend(names, words)

    def kept_of(self, names: PrefixNames) -> int:
        """Tokens of the longest kept prefix with which a row of these names may begin, as far as the head
        knows: it may be dropped before, and begin elsewhere if caches cannot be cut."""
        kept = [*self._earlier.values(), *(names for _, names in list(self._kept.values()))]
        return max((names.common(each) for each in kept if each.scope == names.scope), default=0)

    # The thread that reads commands

    def close_rows(self) -> None:
        """Forgets all rows."""
        with self._telling, self._lock:
            self._rows.clear()
            self._asking.clear()

    def begin_epoch(self, origins: Mapping[Origin, Sequence[int]]) -> dict[Origin, tuple[bytes, bytes]]:
        """As `Front.begin_epoch`."""
        self._recalled.clear()
        self._disk = None
        self._prefix_key = os.urandom(KEY_BYTES)
        earlier = self._earlier | dict(self._kept.values())
        self._kept.clear()
        self._earlier = {
            origin: earlier[origin].first(origin.tokens, self._prefix_key, marks)
            for origin, marks in origins.items()
            if origin in earlier
        }
        self._ends.clear()
        told = {}
        for origin, names in self._earlier.items():
            marks = origins[origin]
            self._ends.remember(names, marks)
            told[origin] = names.told((*marks, origin.tokens) if marks else ())
        return told

    def use_disk(self, disk: StoredNames) -> None:
        """Blocks of prompts in clear are named by this in the open epoch."""
        self._disk = disk

    def recalls(self, recall: control.Recall) -> bool:
        """Whether a recall names blocks of its row's own prompt; a Restore of it may follow then. For the
        thread that reads commands."""
        opened = self._rows.get(recall.row)
        chain = Chain.unpack(recall.chain)
        if (
            opened is None
            or opened.names is None
            or not opened.chain.names
            or chain.scope != opened.chain.scope
        ):
            return False
        if opened.chain.names[: len(chain.names)] != chain.names:
            return False
        if recall.number in self._recalled or len(self._recalled) >= MAX_UNSTARTED:
            return False  # what is read under a number belongs to the row that it was first used for
        self._recalled[recall.number] = opened.names, chain
        return True

    def cancel_recall(self, number: int) -> None:
        """Forgets a recall. For the thread that reads commands."""
        self._recalled.pop(number, None)

    # The epoch

    def prompt(self, row: int) -> Tokens:
        opened = self._rows.get(row)
        if opened is None or opened.prompt is None:
            raise _bad_step(f"row {row} is not open at the head")
        return opened.prompt

    def parameters(self, row: int) -> bytes:
        opened = self._rows.get(row)
        if opened is None:
            raise _bad_step(f"row {row} is not open at the head")
        return opened.parameters

    def source(self, row: int, source: Source) -> RowSource | None:
        opened = self._rows.get(row)
        return opened.sources.get(source) if opened is not None else None

    def gone(self, row: int) -> bool:
        return row not in self._rows

    def ended(self, row: int) -> bool:
        opened = self._rows.get(row)
        return opened is not None and bool(opened.answer.finish)

    def pictures(self, row: int) -> Sequence[Picture]:
        opened = self._rows.get(row)
        return opened.pictures if opened is not None else ()

    def prefilled(self, row: int) -> None:
        if (opened := self._rows.get(row)) is not None:
            opened.prompt = None
            opened.pictures = ()
            opened.copies = []

    def fail(self, row: int, error: SealringError) -> None:
        with self._telling:
            opened = self._rows.get(row)
            if opened is not None and not opened.answer.finish:
                opened.answer.finish = inference.FINISH_REASON_STOP  # nothing more is sent
                self._emit(refusal(row, error))

    def begin(self, chunk: Chunk) -> None:
        if chunk.prefix:
            self._reuse(chunk)
        if chunk.takes:
            self._kept.pop(chunk.prefix, None)

    def change(self, change: Change) -> None:
        if isinstance(change, Eviction):
            self.forget(change.row)
        elif isinstance(change, Keeping):
            self._keep(change)
        elif isinstance(change, Adopting):
            self._adopt(change)
        elif isinstance(change, Restoring):
            self._restore(change)
        elif isinstance(change, Dropping):
            self._kept.pop(change.prefix, None)

    def _keep(self, keeping: Keeping) -> None:
        names = self._names(keeping.row)
        if names is None or keeping.tokens not in names.names:
            raise _not_kept(keeping.prefix)
        kept = names.first(keeping.tokens, also=keeping.marks)  # an earlier row's end may be one
        self._kept[keeping.prefix] = keeping.origin, kept

    def _adopt(self, adopting: Adopting) -> None:
        names = self._earlier.get(adopting.origin)
        if names is None:
            raise _not_kept(adopting.prefix)
        self._kept[adopting.prefix] = adopting.origin, names

    def _reuse(self, chunk: Chunk) -> None:
        _, kept = self._kept.get(chunk.prefix, (None, None))
        own = self._names(chunk.row)
        name = kept.names.get(chunk.start, b"") if kept is not None else b""
        if own is None or not name or not hmac.compare_digest(name, own.names.get(chunk.start, b"")):
            raise _not_kept(chunk.prefix)

    def _restore(self, change: Restoring) -> None:
        names, chain = self._recalled.pop(change.recall, (None, NO_CHAIN))
        part = chain.first(change.tokens)
        if names is None or (part.tokens, part.names[-1:]) != (change.tokens, (change.name,)):
            raise _not_kept(change.prefix)
        self._kept[change.prefix] = change.origin, names.first(change.tokens)

    def _names(self, row: int) -> PrefixNames | None:
        opened = self._rows.get(row)
        return opened.names if opened is not None else None

    def forget(self, row: int) -> None:
        """Forgets a row; tokens of it that still arrive are ignored."""
        with self._lock:  # `open`, in another thread, may be counting rows
            opened = self._rows.pop(row, None)
            self._asking.pop(row, None)
        for copy in opened.copies if opened is not None else ():
            self.forget(copy)

    def asking(self, rows: Sequence[int], *, first: bool) -> Asking:
        if self.width:
            return pooled(len(rows), self.width)
        if not self._asking:
            return ()
        asked = [self._asking.get(row, (None, 0)) for row in rows]
        return asking_of((count for count, _ in asked), (tokens * first for _, tokens in asked))

    def deliver(
        self,
        step: ResolvedStep,
        tokens: list[int],
        logprobs: Mapping[int, TokenLogprobs],
        *,
        refuted: bool = False,
    ) -> None:
        """Tells the gateway what a step brought. Rows that have finished or are gone are left out."""
        with self._telling:
            self._deliver(step, tokens, logprobs, refuted)

    def _deliver(
        self,
        step: ResolvedStep,
        tokens: list[int],
        logprobs: Mapping[int, TokenLogprobs],
        refuted: bool,
    ) -> None:
        outputs, failed, ended = [], [], []
        for index, (row, token) in enumerate(zip(step.sampled, tokens, strict=True)):
            opened = self._rows.get(row)
            if opened is None or opened.answer.finish:
                continue
            try:
                outputs.append(output := opened.output(row, token, logprobs.get(index), self._ends))
            except (Internal, ResourceExhausted) as error:
                opened.answer.finish = inference.FINISH_REASON_STOP  # nothing more is sent
                failed.append(refusal(row, error))
            else:
                if output.finish:
                    ended.append((row, opened))
        *parts, rest = parts_of(outputs)
        for part in parts:
            done = control.StepDone(step=step.number, outputs=part, more=True)
            self._emit(engine.EngineEvent(done=done))
        done = control.StepDone(step=step.number, outputs=rest, refuted=refuted)
        if step.asks and outputs:
            rows = [self._rows[row] for row in dict.fromkeys(step.sampled) if row in self._rows]
            done.rates.extend(rates(rows))
        for event in failed:  # first, for a row whose last step is done must have ended
            self._emit(event)
        self._emit(engine.EngineEvent(done=done))
        for row, opened in ended:  # the gateway may have had it forgotten by now
            self._say_digests(row, opened)

    def _say_digests(self, row: int, opened: OpenRow) -> None:
        """Says what is to be signed for a row whose answer is sent whole, where it asks for a receipt."""
        if opened.answer.receipt is not None:
            digests = opened.answer.receipt.digests(row, opened.answer.finish)
            self._emit(engine.EngineEvent(digests=digests))


def _not_kept(prefix: int) -> InvalidInput:
    """The gateway may ask for a row's own prefixes only: else an answer would show another's prompt."""
    return _bad_step(f"prefix {prefix} is not one of the row's own")


def _bad_step(what: str) -> InvalidInput:
    return InvalidInput(what, reason="BAD_STEP", hint="gateway and head disagree; the epoch must end")
