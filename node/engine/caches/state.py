"""The state of a recurrent or convolution layer, mlx-lm's `ArraysCache`, for one row and for several."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from .kind import Kind, Several, Snapshot


class StateRows(Several, ArraysCache):  # type: ignore[misc]
    """mlx-lm's own. Its `lengths` are the first tokens of each place that count in the next pass."""

    lengths: mx.array | None
    repeats = True

    def note(self) -> Sequence[Any]:
        return list(self.cache)

    def before(self, note: Sequence[Any], tokens: int, kept: Sequence[int]) -> None:
        self.cache, self.lengths = list(note), mx.array(list(kept))

    def repeated(self, surplus: Sequence[int]) -> None:
        self.lengths = None


class State(Kind):
    """It is as it was after the last token, and knows no positions."""

    several = StateRows
    goes_back = True

    def snapshot(self, cache: Any) -> Snapshot:
        return Snapshot(copy.deepcopy(cache.cache))

    def restore(self, cache: Any, at: Snapshot) -> None:
        cache.cache = copy.deepcopy(list(at.arrays))

    def stored(self, cache: Any) -> int:
        return len(cache.cache)


class States(ArraysCache):  # type: ignore[misc]
    """As mlx-lm's, with what the text models of mlx-vlm call besides."""

    def update_window(self, index: int, source: mx.array, width: int, *, lengths: Any = None) -> mx.array:
        """Keeps the last `width` tokens of `source`, [rows, tokens, ...]."""
        assert lengths is None
        kept = self.cache[index] = mx.contiguous(source[:, source.shape[1] - width :])
        return kept

    def update_recurrent(self, index: int, _: int, update: Callable[..., Any]) -> tuple[mx.array, mx.array]:
        """Keeps the state that follows from the one that it has; returns the output and the state."""
        output, self.cache[index] = update(self.cache[index], None)[:2]
        return output, self.cache[index]


class RowsOfStates(StateRows, States):
    """Rows of `States`. mlx-vlm's code masks no states."""

    repeats = False

    def extract(self, idx: int) -> States:
        row = States(len(self.cache))
        row.cache = [array[idx : idx + 1] for array in self.cache]
        return row


class Recurrent(State):
    """The states of mlx-vlm's recurrent and convolution layers."""

    several = RowsOfStates


class RunningSums:
    """The interface of mlx-vlm's `Z1TCache`, for one row: sums over all tokens, and terms of the last."""

    def __init__(self) -> None:
        self.offset = 0
        self.cum_eKV = self.cum_eK = self.win_eKV = self.win_eK = None

    @property
    def state(self) -> list[Any]:
        return [self.cum_eKV, self.cum_eK, self.win_eKV, self.win_eK]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state if array is not None)

    def empty(self) -> bool:
        return self.cum_eKV is None


class Sums(Kind):
    """Its arrays are never written into, so a snapshot has them by reference."""

    goes_back = True

    def snapshot(self, cache: Any) -> Snapshot:
        return Snapshot(cache.state, cache.offset)

    def restore(self, cache: Any, at: Snapshot) -> None:
        cache.cum_eKV, cache.cum_eK, cache.win_eKV, cache.win_eK = at.arrays
        cache.offset = at.rest

    def stored(self, cache: Any) -> int:
        return len(cache.state)
