"""Brings sampled tokens back to the head's next step.

In a ring of one they stay on the device: the next step's graph is built on a token that is not known yet. In
a longer ring a thread of its own receives them as records, and the compute loop waits when it needs them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from sealring.mesh.errors import DeadlineExceeded, EpochEnded
from sealring.mesh.ring.composition import Change, Eviction, ResolvedStep, Settling
from sealring.node.wire.waiting import Rhythm


class LocalFeedback:
    """The last tokens of rows at a member that samples them itself: uint32 [len(sampled)] of each step."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[mx.array, int]] = {}

    def launched(self, step: ResolvedStep, tokens: mx.array | None) -> None:
        assert tokens is not None
        for index, row in enumerate(step.sampled):
            self._last[row] = (tokens, index)

    def inputs(self, rows: Sequence[int]) -> mx.array:
        """The last tokens of these rows, uint32 [rows, 1], lazily."""
        held = [self._last[row] for row in rows]
        first = held[0][0]
        if first.size == len(rows) and all(
            array is first and at == index for index, (array, at) in enumerate(held)
        ):
            return first[:, None]
        return mx.concatenate([array[at : at + 1] for array, at in held])[:, None]

    def change(self, change: Change) -> None:
        if isinstance(change, Eviction):
            self._last.pop(change.row, None)

    def end(self) -> None:
        self._last.clear()


class RingFeedback:
    """The last tokens of rows at the head of a longer ring.

    `arrived` is called by the receiving thread, the rest by the compute loop. While it waits it does what
    `meanwhile` does, as long as that has something to do.
    """

    def __init__(self, deadline: float, meanwhile: Callable[[], bool] = lambda: False) -> None:
        self._deadline = deadline
        self._meanwhile = meanwhile
        self._changed = threading.Condition()
        self._rhythm = Rhythm()
        self._last: dict[int, int] = {}
        self._awaited: dict[int, int] = {}
        self._arrived_step = 0
        self._over = False

    def launched(self, step: ResolvedStep, tokens: mx.array | None) -> None:
        for row in step.sampled:
            self._awaited[row] = step.number

    def arrived(self, step: ResolvedStep, tokens: Sequence[int]) -> None:
        with self._changed:
            for row, token in zip(step.sampled, tokens, strict=True):
                if row in self._awaited:
                    self._last[row] = token
            self._arrived_step = step.number
            self._changed.notify_all()

    def last(self, rows: Sequence[int]) -> bytes:
        """The rows' last tokens, uint32. Raises EpochEnded, or DeadlineExceeded when they do not come."""
        needed = max(self._awaited[row] for row in rows)
        if self._arrived_step < needed:
            self._wait(needed)
        last = self._last
        return np.array([last[row] for row in rows], np.uint32).tobytes()

    def _wait(self, needed: int) -> None:
        def over_or_there() -> bool:
            return self._over or self._arrived_step >= needed

        while not over_or_there() and self._meanwhile():
            pass

        def sleep(seconds: float | None) -> bool:
            if seconds == 0:
                time.sleep(0)  # lets the receiving thread have the interpreter
                return over_or_there()
            with self._changed:
                return self._changed.wait_for(over_or_there, seconds)

        if not self._rhythm.wait(sleep, self._deadline):
            raise DeadlineExceeded(
                f"no tokens came round within {self._deadline:g} s",
                reason="RECORD_OVERDUE",
                hint="a member of the ring hangs; the epoch must end",
            )
        if self._arrived_step < needed:
            raise EpochEnded("the epoch ended while tokens were on their way")

    def change(self, change: Change) -> None:
        if isinstance(change, Settling):
            self._awaited[change.row] = 0  # its last token has arrived, although later runs are under way
        elif isinstance(change, Eviction):
            self._awaited.pop(change.row, None)
            with self._changed:
                self._last.pop(change.row, None)

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
