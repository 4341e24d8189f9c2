"""An image of a prompt, from the processor that prepares it to the vision tower that computes its rows.

`node.engine.vision` reads images and computes their rows. What texts need of it is a `Sight`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sealring.mesh.ring.limits import MAX_PREFILL_CHUNK
from sealring.node.engine.staging.grid import Grid
from sealring.node.engine.text.showing import Shown
from sealring.v1 import inference_pb2 as inference

_NO_TOKEN = 1 << 31
"""No vocabulary has as many tokens."""


Arrays = Mapping[str, npt.NDArray[Any]]
"""What the tower of a model's family takes: `pixel_values`, `image_grid_thw` and others."""

_PATCHES = "image_grid_thw"
"""The name that processors give to frames, height and width of an image in patches, int [1, 3]."""


class Source(Protocol):
    """Makes the arrays of one image, or has them."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds now."""

    def take(self) -> Arrays:
        """The arrays, which it holds no longer. Raises SealringError if they cannot be made."""


@dataclass(slots=True)
class Made:
    """A source that has the arrays, and keeps them."""

    arrays: Arrays

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def take(self) -> Arrays:
        return self.arrays


def patches_in(arrays: Arrays) -> tuple[int, ...]:
    """Frames, height and width of an image in patches; empty if the processor does not report them."""
    found = arrays.get(_PATCHES)
    return () if found is None else tuple(int(size) for size in found.reshape(-1)[:3])


@dataclass(frozen=True, slots=True)
class Picture:
    """One image of a prompt."""

    start: int
    """Index in the prompt of the first token that stands for it, special tokens around its rows included."""
    end: int
    """Index behind the last of them."""
    places: npt.NDArray[Any]
    """int64, (rows,): indices in the prompt, from start to end, whose embeddings the image's rows replace."""
    digest: bytes
    """SHA-256 over the file's bytes and whatever else changes the rows."""
    source: Source
    """Its arrays, which are needed only if its rows are computed: not in a kept prefix."""
    patches: tuple[int, ...] = ()
    """As `patches_in`."""
    tokens: npt.NDArray[Any] | None = None
    """uint32, (rows,): the tokens at its places; None where all are the one that stands for rows."""

    @classmethod
    def of(
        cls,
        start: int,
        end: int,
        places: npt.NDArray[Any],
        digest: bytes,
        arrays: Arrays,
        tokens: npt.NDArray[Any] | None = None,
    ) -> Picture:
        """An image whose arrays are there."""
        return cls(start, end, places, digest, Made(arrays), patches_in(arrays), tokens)

    @property
    def nbytes(self) -> int:
        """Bytes that are held for it until its rows are computed."""
        return self.places.nbytes + self.source.nbytes


class Reading(Protocol):
    """The images of one prompt, while it is read.

    An iterator reads an image with each step. It raises InvalidInput, whose `param` names the image, and
    Unavailable.
    """

    @property
    def nbytes(self) -> int:
        """Bytes that its images hold now."""

    @property
    def shown(self) -> Shown:
        """What the chat's template writes for each image, and what stands for it in the prompt."""

    def add_all(self) -> Iterator[None]:
        """Finds out what becomes of each image."""

    def pictures_in(self, ids: Sequence[int]) -> list[Picture]:
        """The images with their places in a prompt of these tokens. Raises InvalidInput."""

    def make_ready(self, first: int) -> Iterator[None]:
        """Decodes the images from index `first` on, since their rows are going to be computed."""

    def close(self) -> None:
        """Ends what was started for these images."""


class Names(Protocol):
    """What a `Sight` needs of a tokenizer, as node.engine.text.tokenizer has it."""

    special: Mapping[int, str]

    def placeholder(self, known: Sequence[str]) -> str: ...


class Sight(Protocol):
    """Reads the images of prompts for one model. Any thread."""

    @property
    def sees(self) -> bool:
        """Whether prompts may have images: since `open`, and until `close`."""

    @property
    def not_installed(self) -> bool:
        """Whether the model would see if `sealring[vision]` were installed here."""

    def open(self, names: Names) -> None:
        """Starts what reads images, if the model can see."""

    def read(
        self, messages: Iterable[inference.ChatMessage], scope: bytes = b"", longest: int = MAX_PREFILL_CHUNK
    ) -> Reading:
        """Begins to read the images of a chat, in the order in which they stand there.

        In a `scope`, that of prefixes, images that were shown there before are not decoded. An image of more
        than `longest` tokens is made smaller. Raises FailedPrecondition and InvalidInput where it `sees`
        nothing.
        """

    def close(self) -> None:
        """Refuses images from now on. Idempotent."""


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


def grids_of(pictures: Iterable[Picture]) -> tuple[Grid, ...]:
    """The grids of a prompt's images; a line of tokens where the processor reports no patches."""
    found = []
    for picture in pictures:
        if not picture.patches:
            found.append(Grid(int(picture.places[0]), 1, 1, len(picture.places)))
        else:
            frames, height, width = picture.patches
            merged = math.isqrt(
                frames * height * width // len(picture.places)
            )  # patches of a token, each way
            found.append(Grid(int(picture.places[0]), frames, height // merged, width // merged))
    return tuple(found)
