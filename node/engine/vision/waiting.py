"""An image between its file and its rows: it waits as a file, as pixels, or as the arrays of its tower.

Pixels take 3 bytes each, arrays up to 24. So few images wait as arrays, and one that a kept prefix covers
waits as its file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sealring.mesh.errors import Internal, InvalidInput
from sealring.mesh.prompt.images import bad_image
from sealring.node.engine.answers import list_in, number_in, text_in, whole
from sealring.node.engine.helper import LINE_BYTES, Helpers, OverLimitsError
from sealring.node.engine.text.picture import Arrays, patches_in
from sealring.node.engine.vision.sizes import HIGH_SIDE, LOW_SIDE
from sealring.v1 import inference_pb2 as inference

Size = tuple[int, int]
"""Width and height in pixels."""


T = TypeVar("T")

_MOST_WORDS, _MOST_ARRAYS, _MOST_DIMENSIONS, _MOST_TOKENS = 200, 32, 8, 1 << 20
_KINDS = frozenset(("|b1", "|u1", "|i1", "<f2", "<f4", "<f8", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8"))
"""Bounds of what processes answer: characters of a name, arrays, dimensions, tokens, and NumPy's dtypes."""


class Shape(NamedTuple):
    """What a model's processor makes of all images of one size. Only the values of their arrays differ."""

    size: Size
    text: str
    """Stands for the image in the prompt, where the template writes the placeholder."""

    rows: int
    before: int
    behind: int
    tokens: int
    """As node.engine.vision.processor.Prepared."""

    patches: tuple[int, ...]
    """As node.engine.text.picture.patches_in."""

    nbytes: int
    """Bytes of the arrays."""


class Preparing(Protocol):
    """The processor of a model."""

    def prepare(self, pixels: memoryview, size: Size, target: Size, param: str) -> tuple[Arrays, Shape]:
        """What it makes of an image of `size` that is scaled to `target` first. Raises InvalidInput, and
        Unavailable (NO_PROCESS, NO_ANSWER)."""


class Waiting:
    """One image of a prompt: a `picture.Source`. One thread at a time."""

    def __init__(self, image: inference.Image, param: str, decoder: Helpers, processor: Preparing) -> None:
        """`decoder` has processes for the images of this prompt and no other. `param` names the image in
        errors."""
        self.file = image.data
        self.side = side_of(image)
        self.param = param
        self.shape: Shape | None = None
        self._decoder, self._processor = decoder, processor
        self._size: Size | None = None
        self._pixels: memoryview | None = None
        self._arrays: Arrays = {}

    @property
    def nbytes(self) -> int:
        pixels = self._pixels.nbytes if self._pixels is not None else 0
        return len(self.file) + pixels + self.made

    @property
    def made(self) -> int:
        """Bytes of its arrays; 0 until they are made."""
        return sum(array.nbytes for array in self._arrays.values())

    def decode(self) -> Size:
        """Has the pixels from now on, in place of the file. Raises InvalidInput (BAD_IMAGE, IMAGE_TOO_LARGE),
        Unavailable (NO_PROCESS)."""
        if self._size is None:
            asked = {"side": self.side, "data": self.file}
            self._size, self._pixels = answered(self._decoder, asked, self._read_pixels, self.param)
            self.file = b""
        return self._size

    def _read_pixels(self, answer: Mapping[str, Any]) -> tuple[Size, memoryview]:
        width, height = (whole(size, self.side, 1) for size in answer["size"])
        if len(answer["data"]) != 3 * width * height:
            raise ValueError
        return (width, height), answer["data"]

    def prepare(self, size: Size) -> Shape:
        """Has the arrays as well, of the image in this size. Raises as `decode`."""
        own = self.decode()
        assert self._pixels is not None
        self._arrays, shape = self._processor.prepare(self._pixels, own, size, self.param)
        return shape

    def settle(self, most: int) -> None:
        """Keeps either the arrays, if they have `most` bytes at most, or the pixels."""
        if 0 < self.made <= most:
            self._pixels = None
        else:
            self._arrays = {}

    def take(self) -> Arrays:
        assert self.shape is not None
        if not self._arrays and self.prepare(self.shape.size) != self.shape:
            raise Internal(
                f"the model's processor made something else of {self.param} than of others of its size",
                hint="report it, with the model's name",
                reason="TOWER_FAILED",
            )
        arrays, self._arrays, self._pixels = self._arrays, {}, None
        return arrays


def side_of(image: inference.Image) -> int:
    """Pixels of the longer side at most."""
    return LOW_SIDE if image.low_detail else HIGH_SIDE


def answered(
    helpers: Helpers, question: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T], param: str
) -> T:
    """What `read` makes of the answer of a process about an image. Raises InvalidInput (BAD_IMAGE,
    IMAGE_TOO_LARGE), Unavailable (NO_PROCESS, NO_ANSWER)."""

    def sound(answer: Mapping[str, Any]) -> T:
        if "large" in answer:
            pixels, limit = (whole(number) for number in answer["large"])
            raise InvalidInput(
                f"{param} has {pixels} pixels",
                hint=f"make it smaller: an image has at most {limit}",
                reason="IMAGE_TOO_LARGE",
                param=param,
                limit=limit,
            )
        for kind, why in (("bad", "{}"), ("failed", "it cannot be prepared ({})")):
            if kind in answer:
                raise bad_image(param, why.format(text_in(answer, kind, _MOST_WORDS)))
        return read(answer)

    try:
        return helpers.ask(question, sound)
    except OverLimitsError:
        raise bad_image(param, "to read it takes too long or too much memory") from None


def arrays_of(answer: Mapping[str, Any], size: Size) -> tuple[Arrays, Shape]:
    """What a processor made of an image. Raises ValueError, TypeError and KeyError for what is no answer."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    at, data = 0, answer["data"]
    for name, kind, shape in list_in(answer, "arrays", _MOST_ARRAYS, 1):
        if not isinstance(name, str) or name in arrays or len(name) > _MOST_WORDS or kind not in _KINDS:
            raise ValueError
        dtype = np.dtype(kind)
        if len(shape) > _MOST_DIMENSIONS:
            raise ValueError
        count = math.prod(whole(number) for number in shape)
        if not 0 < count * dtype.itemsize <= len(data) - at:
            raise ValueError
        arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
    rows = number_in(answer, "rows", _MOST_TOKENS, 1)
    before, behind, tokens = (
        number_in(answer, name, _MOST_TOKENS) for name in ("before", "behind", "tokens")
    )
    if at != len(data) or tokens < before + rows + behind:
        raise ValueError
    text = text_in(answer, "text", LINE_BYTES, 1)
    return arrays, Shape(size, text, rows, before, behind, tokens, patches_in(arrays), len(data))
