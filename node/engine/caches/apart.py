"""Rows of a batch that keep their own caches, because what is done with them differs by row."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from .kind import Several


class ApartRows(Several):
    """The caches of several rows, which know how many tokens they hold."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = list(rows)

    @classmethod
    def merge(cls, rows: Sequence[Any]) -> Self:
        return cls(rows)

    def recompose(self, keep: Sequence[int], rows: Sequence[Any]) -> None:
        self.rows = [*(self.rows[index] for index in keep), *rows]

    def extract(self, index: int) -> Any:
        return copy.deepcopy(self.rows[index])

    def look_at(self, place: int) -> Any:
        return self.rows[place]

    @property
    def offset(self) -> mx.array:
        """Tokens of each row, [rows]."""
        return mx.array([row.offset for row in self.rows])

    @property
    def _idx(self) -> int:
        """By this name mlx-vlm asks for the longest row's tokens, without reading `offset`."""
        return max(int(row.offset) for row in self.rows)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> None:
        """Has each row's cache take its tokens of [rows, heads, tokens, width] in."""
        for place, row in enumerate(self.rows):
            row.update_and_fetch(keys[place : place + 1], values[place : place + 1])

    @property
    def state(self) -> list[Any]:
        return [row.state for row in self.rows]
