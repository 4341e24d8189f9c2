"""An image of a prompt, from the processor that prepares it to the vision tower that computes its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_NO_TOKEN = 1 << 31
"""No vocabulary has as many tokens."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One image of a prompt, ready for the tower."""

    start: int
    """Index in the prompt of the first token that stands for it, special tokens around its rows included."""
    end: int
    """Index behind the last of them."""
    places: npt.NDArray[Any]
    """int64, (rows,): indices in the prompt, from start to end, whose embeddings the image's rows replace."""
    digest: bytes
    """SHA-256 over the file's bytes and whatever else changes the rows."""
    arrays: Mapping[str, npt.NDArray[Any]]
    """What the tower of the model's family takes: `pixel_values`, `image_grid_thw` and others."""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.places.nbytes + sum(array.nbytes for array in self.arrays.values())


def with_digests(tokens: npt.NDArray[np.uint32], pictures: Sequence[Picture]) -> npt.NDArray[np.uint32]:
    """A prompt's tokens as its prefixes are named by: words of an image's digest stand for its tokens.

    Each has 31 bits of the digest, and its highest bit says that it is no token.
    """
    words = tokens.copy() if pictures else tokens
    for picture in pictures:
        digest = np.frombuffer(picture.digest, ">u4").astype(np.uint32) | np.uint32(_NO_TOKEN)
        words[picture.start : picture.end] = np.resize(digest, picture.end - picture.start)
    return words


def text_of(tokens: npt.NDArray[np.uint32], pictures: Sequence[Picture]) -> npt.NDArray[np.uint32]:
    """The tokens of a prompt that stand for no image."""
    spans = [np.arange(picture.start, picture.end) for picture in pictures]
    return np.delete(tokens, np.concatenate(spans)) if spans else tokens
