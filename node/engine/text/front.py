"""The head's text side: prompts to tokens (`PromptReader`), open rows (`Book`), text (`Answer`).

Prompts are read while the compute loop runs. Tokens become text in the thread in which they arrive
(`Book.deliver`), which divides it into thoughts, text and calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.ring.kept_prefixes import Origin
from sealring.mesh.ring.limits import MAX_PREFILL_CHUNK
from sealring.node.engine.drafts.source import Source
from sealring.node.engine.text.book import Book, Emit
from sealring.node.engine.text.inputs import InputProcessor
from sealring.node.engine.text.picture import Sight
from sealring.node.engine.text.reading import PromptReader
from sealring.node.engine.text.showing import MAX_WAITING_BYTES


class Front:
    """The head's `book` of open rows, `inputs`, which makes rows of prompts, and `reader`, the threads."""

    def __init__(
        self,
        path: Path,
        context: int,
        vocabulary: int,
        emit: Emit,
        sight: Sight,
        clock: Clock = monotonic_clock,
        *,
        picture_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """`vocabulary` is the number of tokens that the model may sample. `emit` may be called from any
        thread. `sight` reads images, unless `inputs.blind` is called. `picture_bytes` bounds the images of
        prompts that are not prefilled."""
        self.book = Book(emit)
        self.inputs = InputProcessor(path, context, vocabulary, self.book, sight)
        self.reader = PromptReader(self.inputs, self.book, emit, clock, picture_bytes=picture_bytes)

    def stop(self) -> None:
        """Ends the reader's threads."""
        self.close_rows()
        self.reader.stop()

    def discard(self, row: int) -> None:
        """Forgets a row that no step will name; if it waits to be read it is refused instead."""
        self.reader.discard(row)
        self.book.forget(row)

    def close_rows(self) -> None:
        """Forgets all rows, also those that wait to be opened."""
        self.reader.close_rows()
        self.book.close_rows()

    def begin_epoch(
        self,
        origins: Mapping[Origin, Sequence[int]],
        *,
        sources: Collection[Source] = (),
        tail_reads: bool = False,
        sealed: bool = False,
        longest: int = MAX_PREFILL_CHUNK,
    ) -> dict[Origin, tuple[bytes, bytes]]:
        """An epoch opens: all rows are forgotten, and names are made under another key from now on.

        Returns the new names of kept prefixes (PrefixNames.told), so that nobody can tell by names what two
        epochs have in common but for what goes on. `origins` has the lengths of their marks. Nothing is
        guessed, and nobody told what repeats, without `sources` of drafts: unless the deployment wants it to
        speculate. With `tail_reads` the tail guesses by a model and is sent prompts. `sealed`: parameters are
        to be sealed for the tail. `longest` is the number of tokens of a chunk at most, and so of an image.
        """
        self.close_rows()
        self.close_rows()
        self.inputs.begin_epoch(sources=sources, tail_reads=tail_reads, sealed=sealed, longest=longest)
        return self.book.begin_epoch(origins)
