"""The images of prompts that are being prefilled: each is computed when the first chunk of it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import structlog

from sealring.mesh.errors import SealringError
from sealring.node.engine.text.picture import Picture

from .tower import Rows, Tower

log = structlog.get_logger()


class Images:
    """Rows of images, kept until they are prefilled. Used by the compute thread."""

    def __init__(self, tower: Tower) -> None:
        self._tower = tower
        self._made: dict[tuple[int, int], Rows] = {}  # row, the image's first token -> its rows

    def inputs(
        self,
        row: int,
        pictures: Sequence[Picture],
        start: int,
        end: int,
        fail: Callable[[SealringError], None],
    ) -> list[mx.array]:
        """What a stage takes beside the tokens [start, end) of a row's prompt (`Stage.take_images`); empty if
        no image is among them. Lazy.

        If the tower fails on an image, its rows are zeros and `fail` is called.
        """
        there = np.zeros(end - start, np.bool_)
        index = np.zeros(end - start, np.uint32)  # of the token's row among all rows
        count, made = 0, []
        for picture in pictures:
            inside = (picture.places >= start) & (picture.places < end)
            if inside.any():
                made.append(self._rows(row, picture, fail))
                at = picture.places[inside] - start
                there[at] = True
                index[at] = count + np.flatnonzero(inside)
                count += len(inside)
            if picture.end <= end:
                self._made.pop((row, picture.start), None)
        if not made:
            return []
        where, order = mx.array(there)[None], mx.array(index)[None]
        residuals = [
            mx.where(where[..., None], mx.concatenate(list(each))[order], 0)
            for each in zip(*(rows.residuals for rows in made), strict=True)
        ]
        return [where, mx.concatenate([rows.embeddings for rows in made])[order], *residuals]

    def _rows(self, row: int, picture: Picture, fail: Callable[[SealringError], None]) -> Rows:
        key = row, picture.start
        if key not in self._made:
            try:
                self._made[key] = self._tower.rows(picture)
            except SealringError as error:
                log.warning("tower_failed", error=error.message, exc_info=error.__cause__)
                fail(error)
                self._made[key] = self._tower.blank(len(picture.places))
        return self._made[key]

    def forget(self, row: int) -> None:
        """Forgets a row that is gone."""
        for key in [key for key in self._made if key[0] == row]:
            del self._made[key]
