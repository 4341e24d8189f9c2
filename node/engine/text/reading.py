"""Threads that read prompts at the head, by turns of the clients (node.engine.text.turns).

No client waits for what another one's prompt costs. The first thread loads the tokenizer while the weights
load.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

from sealring.mesh.clock import AwakeClock, Clock
from sealring.mesh.errors import (
    FailedPrecondition,
    ModelError,
    ResourceExhausted,
)
from sealring.mesh.prompt.images import has_images
from sealring.node.engine.text.answers import OpenRow, refusal
from sealring.node.engine.text.book import MAX_UNSTARTED, Book, Emit
from sealring.node.engine.text.inputs import InputProcessor, client_of
from sealring.node.engine.text.picture import Reading
from sealring.node.engine.text.turns import Turn, Turns
from sealring.v1 import engine_pb2 as engine

MAX_UNREAD_BYTES = 256 << 20
"""The most bytes of prompts that wait to be read.

A gateway opens 16 ahead, of 4 MiB at most and up to 24 MiB of images; the head does not trust it to.
"""

READERS = 4
"""Threads that read prompts: one may have a long prompt, one images, one a costly chat, and one is left."""

LONG_BYTES = 256 << 10
"""A prompt is long from here on: to read it takes a tenth of a second and more."""

LOAD_SECONDS = 120.0
STUCK_SECONDS = 600.0
"""No prompt takes as long to read. Its images take a minute, and processes for them a minute each to start. A
chat is rendered twice, in a process that has 20 s for each and a minute to start. Where a process is lost
another is asked, which may take as long again. Grammars are tried in another process, MAX_TRIED_TOOLS and two
at most, until one costs too much: each has a part of a second of a processor. All else that a prompt costs is
bounded in processor time."""


class PromptReader:
    """Reads prompts into rows of `book`. `emit` may be called from any of its threads."""

    def __init__(
        self, inputs: InputProcessor, book: Book, emit: Emit, clock: Clock, *, picture_bytes: int
    ) -> None:
        """`picture_bytes` bounds the images of all prompts that are not prefilled."""
        self._inputs = inputs
        self._book = book
        self._emit = emit
        # under the lock; a prompt that was being read while the machine slept is not stuck for it
        self._clock = AwakeClock(clock)
        self._most_picture_bytes = picture_bytes
        self._unread = 0  # bytes of prompts that wait to be read
        self._turns: Turns[tuple[engine.OpenEngineRow, Generator[Reading]]] = Turns()
        self._resting: dict[int, int] = {}  # rows whose images are half read, and what these hold
        self._reading: dict[int, float] = {}  # rows whose prompts are being read, and since when
        self._discarded: set[int] = set()  # of these
        self._generation = 0
        self._lock = threading.Lock()  # taken before the book's
        self._loaded = threading.Event()
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, name="front", daemon=True).start()
        for number in range(1, READERS):
            threading.Thread(target=self._read, name=f"front {number}", daemon=True).start()

    def wait_loaded(self) -> None:
        """Returns when the tokenizer is there. Raises ModelError where the folder has none that works."""
        if not self._loaded.wait(LOAD_SECONDS):
            raise ModelError(
                f"the tokenizer could not be loaded within {LOAD_SECONDS:g} s",
                reason="TOKENIZER_CORRUPT",
                hint="download or convert the model again",
            )
        if self._failure is not None:
            raise self._failure

    @property
    def stuck(self) -> bool:
        """Whether a prompt has been read for longer than any takes; the thread cannot be helped then."""
        with self._lock:
            now, since = self._clock(), min(self._reading.values(), default=None)
        return since is not None and now - since > STUCK_SECONDS

    def stop(self) -> None:
        """Ends the threads."""
        self._turns.close()

    # The thread that reads commands

    def open(self, command: engine.OpenEngineRow) -> None:
        """Answers with RowOpened or RowRefused, for each client in the order of the calls; at once if there
        are too many."""
        size = command.ByteSize()
        with self._lock:
            most = max(self._book.unstarted, len(self._turns))
            if self._unread + size > MAX_UNREAD_BYTES or most >= MAX_UNSTARTED:
                full = ResourceExhausted("the head holds too many prompts", reason="TOO_MANY_ROWS")
                self._emit(refusal(command.row, full))
                return
            self._unread += size
            item = command, self._open(command, self._generation)
            kind = "images" if has_images(command.prompt) else "long" if size > LONG_BYTES else ""
            self._turns.put(client_of(command), command.row, item, kind)

    def discard(self, row: int) -> None:
        """Refuses a row that no step will name, if it waits to be read."""
        with self._lock:
            waiting = self._turns.remove(row)
            if waiting is not None:
                self._unread -= waiting[0].ByteSize()
                self._resting.pop(row, None)
            elif row in self._reading:
                self._discarded.add(row)
        if waiting is not None:
            self._emit(refusal(row, FailedPrecondition("nobody wants the row any more", reason="DISCARDED")))

    def close_rows(self) -> None:
        """Forgets all rows that wait to be opened."""
        with self._lock:
            self._generation += 1
            self._unread -= sum(command.ByteSize() for command, _ in self._turns.clear())
            self._resting.clear()

    # The reader's own threads

    def _run(self) -> None:
        try:
            self._inputs.load()
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._loaded.set()
        self._read()
        self._inputs.close()

    def _read(self) -> None:
        self._loaded.wait()
        while (turn := self._turns.take()) is not None:
            command, steps = turn.item
            with self._lock:
                self._unread -= command.ByteSize()
                self._resting.pop(command.row, None)
                begun = self._reading[command.row] = self._clock()
            for images in steps:
                with self._lock:
                    now = self._clock()
                    if self._turns.charge(turn, now - begun) and self._rest(turn, images):
                        break
                    begun = now
            else:
                self._turns.done(turn)

    def _rest(self, turn: Turn[tuple[engine.OpenEngineRow, Generator[Reading]]], images: Reading) -> bool:
        """Has a prompt go on later, whose images are half read; whether there is memory for them until then.
        Under the lock."""
        command, _ = turn.item
        size = images.nbytes
        if self._book.picture_bytes + sum(self._resting.values()) + size > self._most_picture_bytes:
            return False
        images.close()
        self._resting[command.row] = size
        del self._reading[command.row]
        self._unread += command.ByteSize()
        self._turns.put_back(turn, command.row)
        return True

    def _open(self, command: engine.OpenEngineRow, generation: int) -> Generator[Reading]:
        """Reads a prompt. It may rest after each of its images, which are in what is yielded then."""
        rows: list[OpenRow] = []
        try:
            with contextlib.ExitStack() as reading:
                opened, rows = yield from self._inputs.rows(command, reading)
            event = engine.EngineEvent(opened=opened)
        except Exception as error:
            event = refusal(command.row, error)
        with self._lock:
            del self._reading[command.row]
            wanted = command.row not in self._discarded
            self._discarded.discard(command.row)
            if generation != self._generation:
                return
            size = sum(picture.nbytes for row in rows for picture in row.pictures)
            if size and size + self._book.picture_bytes > self._most_picture_bytes:
                event, rows = refusal(command.row, _too_many_pictures()), []
            sampling = command.prompt.sampling
            likeliest = sampling.logprobs if sampling.HasField("logprobs") else None
            self._book.add(command.row, rows if wanted else (), likeliest)
        self._emit(event)


def _too_many_pictures() -> ResourceExhausted:
    return ResourceExhausted(
        "the head holds too many images of prompts that are not prefilled",
        hint="try again later, or send fewer images",
        reason="TOO_MANY_ROWS",
    )
