"""Arrays that are longer in some rows of a batch than in others."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

_ROOM = 64


class Ragged:
    """Entries [rows, room, width], of each row as many as `counts` says, from the front."""

    def __init__(self, room: int = _ROOM) -> None:
        """`room`: entries that it makes room for at once."""
        self._step = room
        self._array: mx.array | None = None
        self.counts: list[int] = []

    def recompose(self, keep: Sequence[int], rows: Sequence[mx.array | None]) -> None:
        """Keeps the rows with these indices, in this order, and appends rows [1, entries, width]."""
        held = [self.row(index) for index in keep] + list(rows)
        self.counts = [0 if one is None else one.shape[1] for one in held]
        filled = [one for one in held if one is not None]
        self._array = None
        if filled:
            room = self._with_room(max(self.counts))
            self._array = mx.concatenate(
                [
                    mx.zeros((1, room, filled[0].shape[2]), filled[0].dtype)
                    if one is None
                    else mx.pad(one, [(0, 0), (0, room - one.shape[1]), (0, 0)])
                    for one in held
                ]
            )

    def row(self, index: int) -> mx.array | None:
        """A row's entries [1, entries, width]; None where there are none."""
        if self._array is None or not self.counts[index]:
            return None
        return mx.contiguous(self._array[index : index + 1, : self.counts[index]])

    def add(self, rows: list[int], entries: mx.array) -> None:
        """One more entry for each of these rows, [len(rows), width]."""
        room = self._with_room(1 + max(self.counts))
        if self._array is None:
            self._array = mx.zeros((len(self.counts), room, entries.shape[-1]), entries.dtype)
        elif room > self._array.shape[1]:
            self._array = mx.pad(self._array, [(0, 0), (0, room - self._array.shape[1]), (0, 0)])
        self._array[mx.array(rows), mx.array([self.counts[row] for row in rows])] = entries
        for row in rows:
            self.counts[row] += 1

    def take(self, rows: list[int]) -> mx.array:
        """The entries of rows that have the same number, [len(rows), entries, width]; they have none then."""
        assert self._array is not None
        taken = self._array[mx.array(rows), : self.counts[rows[0]]]
        for row in rows:
            self.counts[row] = 0
        return taken

    def held(self) -> mx.array | None:
        """Entries as long as the longest row; those behind shorter rows' ends have no meaning."""
        longest = max(self.counts, default=0)
        return self._array[:, :longest] if self._array is not None and longest else None

    @property
    def arrays(self) -> list[mx.array]:
        return [] if self._array is None else [self._array]

    def _with_room(self, entries: int) -> int:
        return -(-entries // self._step) * self._step
