"""An image between its file and its rows: it waits as a file, as pixels, or as the arrays of its tower.

Pixels take 3 bytes each, arrays up to 24. So few images wait as arrays, and one that a kept prefix covers
waits as its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from sealring.mesh.errors import Internal, InvalidInput
from sealring.mesh.prompt.images import bad_image
from sealring.node.engine.helper import Helpers
from sealring.node.engine.vision.picture import Arrays, patches_in
from sealring.node.engine.vision.sizes import HIGH_SIDE, LOW_SIDE
from sealring.v1 import inference_pb2 as inference

Size = tuple[int, int]
"""Width and height in pixels."""


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
    """As node.engine.vision.picture.patches_in."""

    nbytes: int
    """Bytes of the arrays."""


class Preparing(Protocol):
    """The processor of a model."""

    def prepare(self, pixels: memoryview, size: Size, target: Size, param: str) -> Mapping[str, Any]:
        """What it makes of an image of `size` that is scaled to `target` first. Raises InvalidInput."""


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
            answer = answered(self._decoder.ask(asked), self.param)
            width, height = answer["size"]
            self._size, self._pixels, self.file = (width, height), answer["data"], b""
        return self._size

    def prepare(self, size: Size) -> Shape:
        """Has the arrays as well, of the image in this size. Raises as `decode`."""
        whole = self.decode()
        assert self._pixels is not None
        answer = self._processor.prepare(self._pixels, whole, size, self.param)
        arrays, at = {}, 0
        for name, kind, shape in answer["arrays"]:
            dtype, count = np.dtype(kind), int(np.prod(shape, dtype=np.int64))
            arrays[name] = np.frombuffer(answer["data"], dtype, count, at).reshape(shape)
            at += count * dtype.itemsize
        self._arrays = arrays
        rows, before, behind, tokens = (answer[name] for name in ("rows", "before", "behind", "tokens"))
        return Shape(size, answer["text"], rows, before, behind, tokens, patches_in(arrays), self.made)

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


def answered(answer: Mapping[str, Any] | None, param: str) -> Mapping[str, Any]:
    """The answer of a process about an image. Raises InvalidInput (BAD_IMAGE, IMAGE_TOO_LARGE)."""
    if answer is None:
        raise bad_image(param, "to read it takes too long or too much memory")
    if "large" in answer:
        pixels, limit = answer["large"]
        raise InvalidInput(
            f"{param} has {pixels} pixels",
            hint=f"make it smaller: an image has at most {limit}",
            reason="IMAGE_TOO_LARGE",
            param=param,
            limit=limit,
        )
    if "bad" in answer or "failed" in answer:
        raise bad_image(param, answer.get("bad") or f"it cannot be prepared ({answer['failed']})")
    return answer
