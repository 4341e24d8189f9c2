"""What a source of drafts is to the head: the same, whatever it guesses by.

The gateway chooses a source for a step by the share of its guesses that is right and by the seconds that they
take (`control.DraftFacts`, `DraftRate`), and knows nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from sealring.mesh.ring.composition import Change, ResolvedStep
from sealring.node.engine.drafts.tally import Tally
from sealring.v1 import control_pb2 as control

Source: TypeAlias = "control.DraftSource.ValueType"
Tokens = npt.NDArray[np.uint32]

Take = Callable[[int, int], list[int]]
"""Drafts of a chain: the number of those before, and how many."""


class Proposed(NamedTuple):
    """Drafts of a chain that are `there`, and what gives further ones; None if there are no others."""

    there: Sequence[int]
    more: Take | None = None


@dataclass(frozen=True)
class RowText:
    """What is known of a row when it is opened.

    `tokens` are all that are computed before its next token, and `text` the same without those of images. The
    first `prompt_tokens` of `text` are the prompt's, and the rest is of an answer that goes on. A client
    expects the tokens `predicted`. Later rows of the same `scope` may use what a model has computed of this
    one, none if it is empty. `forced` gives the next tokens that the row's grammar leaves no choice for.
    `model` counts how often a model's guesses were right in all rows; None: in this row alone.
    """

    tokens: Tokens
    text: Tokens
    prompt_tokens: int
    predicted: Sequence[int] = ()
    scope: bytes = b""
    forced: Callable[[], list[int]] = list
    model: Tally | None = None
    pictured: bool = False
    """Whether it has images."""


class RowSource(Protocol):
    """What a source guesses of one row.

    `propose` is called by the compute thread, the rest by the thread that receives tokens. The gateway waits
    with a chain until all tokens of the row are there, so a source without a thread of its own needs no lock.
    """

    def heard(self, token: int) -> None:
        """Takes the answer's next token."""

    def right(self) -> float:
        """The probability that a guess of the next token is right, by the last ones; 0 if there is none."""

    def propose(self, last: int, count: int) -> Proposed:
        """Drafts of a chain behind the answer's `last` token, whose first run has `count`."""

    def another(self, text: RowText) -> RowSource:
        """As this one, for another answer to the same prompt before its first token."""


class Rows(Protocol):
    """The rows that are open at the head."""

    def source(self, row: int, source: Source) -> RowSource | None:
        """What a source guesses of a row; None if it guesses nothing of it."""

    def parameters(self, row: int) -> bytes:
        """The row's parameter record."""


class Worker(Protocol):
    """A source that computes at the head, between the steps of its stage. Used by the compute thread, but for
    `wake`."""

    def before(self, step: ResolvedStep, rows: Sequence[int], opened: Rows) -> None:
        """These rows of a step are about to be computed."""

    def complete(self, step: ResolvedStep) -> None:
        """Has the guesses there that a step's chains begin with."""

    def propose(self, row: int, alive: Callable[[], bool]) -> Proposed:
        """As `RowSource.propose`, of a row for which it guesses; any tokens once the chain is not `alive`."""

    def work(self, spare: float) -> bool:
        """Guesses, for at most about `spare` seconds; False if there is nothing to guess."""

    def wake(self) -> None:
        """Has the compute loop call `work` if there may be something to guess; any thread."""

    def change(self, change: Change) -> None:
        """Follows a change of rows."""

    def drop(self) -> None:
        """All rows of the epoch are gone."""
