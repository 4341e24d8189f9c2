"""The places and sizes of a prompt's images, for positions in three dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from sealring.mesh.ring.limits import MAX_CONTEXT
from sealring.mesh.ring.unbroken import MAX_UNBROKEN

if TYPE_CHECKING:
    from .picture import Picture


class Grid(NamedTuple):
    """An image of a prompt: the index of its first token, and its size in tokens."""

    begin: int
    frames: int
    height: int
    width: int

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width

    @property
    def end(self) -> int:
        """The index behind its last token."""
        return self.begin + self.tokens


def grids_of(pictures: Iterable[Picture]) -> tuple[Grid, ...]:
    """The grids of a prompt's images, for a model whose processor reports patches; none for others."""
    found = []
    for picture in pictures:
        if picture.patches:
            frames, height, width = picture.patches
            merged = math.isqrt(
                frames * height * width // len(picture.places)
            )  # patches of a token, each way
            found.append(Grid(int(picture.places[0]), frames, height // merged, width // merged))
    return tuple(found)


def possible(grids: Sequence[Grid]) -> bool:
    """Whether these can be the images of one prompt."""
    return (
        len(grids) <= MAX_UNBROKEN
        and all(min(grid[1:]) > 0 and max(grid) <= MAX_CONTEXT and grid.end <= MAX_CONTEXT for grid in grids)
        and all(one.end <= two.begin for one, two in pairwise(grids))
    )
