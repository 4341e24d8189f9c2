"""What a model guesses of one row."""

from __future__ import annotations

import threading
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from sealring.node.engine.drafts.source import Proposed, RowText
from sealring.node.engine.drafts.tally import UNTRIED, WORD, Tally, spelt

CAUGHT_UP = 16
"""Tokens that a draft model computes along with a guess: as many as one run can bring."""


class Feed(NamedTuple):
    """Tokens of a row that a draft model is to compute next, behind the first `start` ones."""

    start: int
    tokens: npt.NDArray[np.uint32]
    refuted: int  # guesses of the row that were wrong until then

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Guesses:
    """What a model guesses of one row: the row's tokens, and guesses behind them.

    `heard` and `right` are called by the thread that receives tokens, the rest by the compute loop, which
    runs the model. A guess may come late, when its token is there already: then it only counts as right or
    wrong.
    """

    def __init__(
        self, prompt: npt.NDArray[np.uint32], scope: bytes = b"", model: Tally | None = None
    ) -> None:
        """`prompt`: uint32. Later rows of the same `scope` may use what the model has computed of it; if that
        is empty, none may. `model` counts the guesses of all rows."""
        self.scope = scope
        self._model = model or Tally.of_all_rows()
        self.held = 0
        """Tokens of the row, from its first, that the model has computed."""
        self._text = bytearray(prompt.tobytes())
        self._ahead: list[int] = []
        self._refuted = 0
        self._sent = 0  # tokens, from the row's first, that steps compute or have computed
        self._run = 1  # tokens of the last step
        self._probe = 0  # tokens of the row from which on a guess is made though no run has it
        self._pause = 1  # tokens to the next such guess
        self._tally = self._model.next_row()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, text: RowText) -> Self | None:
        """None of a row with images: the model sees nothing."""
        return None if text.pictured else cls(text.tokens, text.scope, text.model)

    def another(self, text: RowText) -> Guesses:
        return type(self)(self.text, self.scope, self._model)

    def propose(self, last: int, count: int) -> Proposed:
        """The guesses that are there; any tokens if they are too few."""
        return Proposed(self.taken(self.known, count) or [last] * count)

    @property
    def text(self) -> npt.NDArray[np.uint32]:
        """The row's tokens, uint32."""
        with self._lock:
            return np.frombuffer(bytes(self._text), np.uint32)

    @property
    def known(self) -> int:
        """The number of the row's tokens."""
        return len(self._text) // WORD

    @property
    def whole(self) -> int:
        """The number of the row's tokens, and of guesses behind them."""
        return self.known + len(self._ahead)

    @property
    def ahead(self) -> bool:
        """Whether anything is guessed."""
        return bool(self._ahead)

    @property
    def wanting(self) -> bool:
        """Whether to guess another token: there are to be as many as the last run had behind what steps
        compute, so that the next run finds its drafts there. While there are no runs there is to be one now
        and then, so that it is known how often guesses are right. It is more rare after each: right ones do
        not pay either, or there would be runs."""
        if self._run == 1 and self.known < self._probe:
            return False
        return self.known + len(self._ahead) < max(self.known, self._sent) + self._run

    def heard(self, token: int) -> None:
        with self._lock:
            if self._ahead:
                right = self._ahead.pop(0) == token
                self._count(right)
                if not right:
                    self._ahead.clear()
                    self._refuted += 1
                    self._sent = 0
                    self.held = min(self.held, self.known)
            self._text += spelt(token)

    def _count(self, right: bool) -> None:
        self._tally.add(right)
        self._model.add(right)
        self._pause = 1 if right and self._run > 1 else min(2 * self._pause, CAUGHT_UP)
        self._probe = self.known + self._pause

    def right(self) -> float:
        """0 also while the model is further behind."""
        tried = self._tally.tried > UNTRIED and self.known - self.held <= CAUGHT_UP
        return self._tally.rate if tried else 0.0

    def begin(self, held: int) -> None:
        """The model has computed the first `held` tokens of the row, and nothing else."""
        with self._lock:
            self.held = held

    def feed(self, most: int, first: int | None = None) -> Feed:
        """At most `most` tokens that the model is to compute next. They count as computed. They begin where
        it has computed nothing, or at place `first` if that comes before. There are none, and none count, if
        the model has computed fewer than `first`: a guess was found wrong, and its cache has to be cut."""
        with self._lock:
            whole = self.whole
            if first is not None and self.held < first:
                return Feed(self.held, np.zeros(0, np.uint32), self._refuted)
            start = self.held if first is None else first
            end = min(whole, start + most)
            sure = np.frombuffer(bytes(self._text[start * WORD : end * WORD]), np.uint32)
            behind = self._ahead[max(0, start - self.known) : max(0, end - self.known)]
            self.held = end
            return Feed(start, np.concatenate([sure, np.array(behind, np.uint32)]), self._refuted)

    def guess(self, feed: Feed, token: int) -> None:
        """Takes the model's guess of the token behind those that it was fed."""
        with self._lock:
            if feed.refuted != self._refuted:
                return
            if feed.end < self.known:
                self._count(self._text[feed.end * WORD : (feed.end + 1) * WORD] == spelt(token))
            elif feed.end == self.known + len(self._ahead):
                self._ahead.append(token)

    def step(self, drafts: int) -> None:
        """Notes a step of `drafts` guesses of the model."""
        self._run = 1 + drafts

    def send(self, end: int) -> None:
        """Notes that steps compute the row's tokens and guesses before place `end`."""
        with self._lock:
            self._sent = max(self._sent, end)

    def taken(self, first: int, count: int) -> list[int] | None:
        """The tokens from place `first` on, as far as they are known, and guesses. None if there are
        fewer."""
        with self._lock:
            sure = np.frombuffer(bytes(self._text[first * WORD : (first + count) * WORD]), np.uint32)
            begin = max(0, first - self.known)
            found = [*sure.tolist(), *self._ahead[begin : begin + count - len(sure)]]
        return found if len(found) == count else None


class GuessesAhead(Guesses):
    """Guesses that come round with a step's tokens, by a model at the tail."""

    def __init__(
        self, prompt: npt.NDArray[np.uint32], scope: bytes = b"", model: Tally | None = None
    ) -> None:
        super().__init__(prompt, scope, model)
        self._offered: tuple[int, list[int]] | None = None

    def heard(self, token: int) -> None:
        super().heard(token)
        with self._lock:
            if self._offered is not None and self._offered[0] == self.known:
                self.held, self._ahead, self._offered = self.known, self._offered[1], None

    def offer(self, first: int, guesses: list[int]) -> None:
        """Takes guesses that come with the row's next tokens, for the place `first` tokens behind the
        last."""
        with self._lock:
            self._offered = self.known + first, guesses
