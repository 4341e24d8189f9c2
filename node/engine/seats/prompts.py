"""The head's text side, as an epoch sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sealring.mesh.ring.composition import Adopting, Chunk, Keeping, ResolvedStep
from sealring.node.engine.logprobs import Asking, TokenLogprobs


class Prompts(Protocol):
    """Rows that clients opened at the head: their prompts, and the receiver of their tokens."""

    def prompt(self, row: int) -> npt.NDArray[np.uint32]:
        """The tokens of an opened row's prompt. Raises InvalidInput for a row that was not opened."""

    def parameters(self, row: int) -> bytes:
        """The row's parameter record."""

    def drafts(self, row: int, last: int, count: int) -> list[int]:
        """Up to `count` tokens that may follow the row's `last` one. Raises InvalidInput (BAD_STEP) for a row
        that was opened without drafts."""

    def prefilled(self, row: int) -> None:
        """Forgets the row's prompt, which is computed."""

    def keep(self, keeping: Keeping) -> None:
        """Notes a prefix that is kept of a row. Raises InvalidInput (BAD_STEP) if it must not be kept."""

    def adopt(self, adopting: Adopting) -> None:
        """Notes a prefix of an earlier epoch that is kept in this one. Raises InvalidInput (BAD_STEP)."""

    def reuse(self, chunk: Chunk) -> None:
        """Begins a row with a kept prefix. Raises InvalidInput (BAD_STEP) unless it is the row's own."""

    def drop(self, prefix: int) -> None:
        """Forgets a kept prefix."""

    def forget(self, row: int) -> None:
        """Forgets an evicted row; tokens of it that still arrive are ignored."""

    def asking(self, rows: Sequence[int], *, first: bool) -> Asking:
        """The step's sampled rows that ask for log-probabilities; `first` if it is their first token."""

    def deliver(self, step: ResolvedStep, tokens: list[int], logprobs: Mapping[int, TokenLogprobs]) -> None:
        """Takes a step's tokens, or none when it was executed and samples none.

        They are as many as `step.sampled`, or fewer after drafts. `logprobs` are those of the rows that ask,
        by index in `tokens`.
        """
