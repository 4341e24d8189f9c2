"""Images at the head: from files to what stands for them in a prompt, and to what the tower takes.

Files may come from anybody, so each prompt has a process for itself that decodes them
(node/engine/vision/decoding.py). Another process prepares the pixels of all prompts
(node/engine/vision/processor.py). This module imports neither mlx-vlm nor Pillow.

An agent shows all its images again with each turn. What stands for an image follows from its size, and sizes
are remembered. So only those images are decoded that are new, or whose rows are going to be computed.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import structlog

from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.errors import FailedPrecondition, InvalidInput, Unavailable
from sealring.mesh.prompt.images import cannot_see, vision_not_installed
from sealring.mesh.ring.limits import MAX_PREFILL_CHUNK
from sealring.node.engine.answers import list_in, text_in, whole
from sealring.node.engine.helper import Helpers, OverLimitsError
from sealring.node.engine.text.picture import Arrays, Names, Picture
from sealring.node.engine.text.showing import Shown
from sealring.node.engine.vision.sizes import (
    DECODER_BYTES,
    HIGH_SIDE,
    MAX_ARRAY_BYTES,
    PROCESSOR_BYTES,
    lacks_vision,
)
from sealring.node.engine.vision.waiting import Shape, Size, Waiting, answered, arrays_of
from sealring.v1 import inference_pb2 as inference

log = structlog.get_logger()

K = TypeVar("K")
V = TypeVar("V")

SECONDS = 10
"""Processor time to decode an image, to prepare one, and to start a process."""

PROMPT_SECONDS = 30.0
"""For all images of a prompt but the last, however busy the machine is. Prompts of other clients are read
between two of them, and are not counted."""

ADDRESS_BYTES = 4 << 30
"""Address space, where the system holds a process to it."""

MAX_PROMPT_BYTES = 256 << 20
"""The images of a prompt while they wait: 85 megapixels, as large as they are shown."""

READY_BYTES = 128 << 20
"""Arrays of a prompt's images that are made before it begins: those of five screenshots for Qwen's towers,
which take 24 bytes for each pixel. Those of further images are made when their chunk is computed."""

_SIZES, _SHAPES = 4096, 256
"""Images whose sizes are remembered, and sizes of which it is remembered what becomes of them."""

_WORD, _MANY, _NO_TOKEN = 256, 64, 1 << 31

_TRIES = 6
"""Sizes in which an image is tried that has too many tokens. Four are too few where the processor makes a
large image smaller by itself, and then rounds twice to a size just above."""

_LESS, _MUCH_LESS = 0.97, 0.75
"""Parts of the size at which tokens would fit in proportion: a processor rounds sizes to patches or tiles. It
may make large images smaller by itself, and then they have as many tokens as before."""


class Seen(NamedTuple):
    """An image of a prompt, before its place there is known."""

    shape: Shape
    digest: bytes
    """As Picture has it."""
    source: Waiting


class Viewer:
    """Prepares images for one model. Any thread; the images of one prompt are read at a time.

    Raises ViewerError where the family's processor cannot be made of the folder, and as `Helpers.prepare`.
    """

    def __init__(
        self,
        folder: Path,
        special: Mapping[int, str],
        clock: Clock = monotonic_clock,
        *,
        memory: int | None = None,
        most: int = MAX_PROMPT_BYTES,
        ready: int = READY_BYTES,
    ) -> None:
        """`special`: the names of the model's special tokens. The rest are the bounds above; `memory` is that
        of each process."""
        self.clock = clock
        self.most, self.ready = most, ready
        self.memory = memory
        self._described: Mapping[str, Any] = {}
        names = {name: number for number, name in special.items()}
        self._processes = Helpers(
            "sealring.node.engine.vision.processor",
            str(SECONDS),
            str(ADDRESS_BYTES),
            first={"folder": str(folder), "special": names},
            most=1,
            begun=self._begun,
            memory=memory or PROCESSOR_BYTES,
            data=MAX_ARRAY_BYTES,
        )
        try:
            self._processes.prepare()
        except OverLimitsError:
            raise ViewerError("the process takes too long to start, or too much memory") from None
        if self.row_tokens[0] not in special:
            raise ViewerError("no special token stands for images")
        self.placeholder = ""
        """The text that the chat template writes for an image. The owner of this object sets it."""
        self.sizes: OrderedDict[bytes, Size] = OrderedDict()
        """Sizes in which images are prepared that were shown before."""
        self.shapes: OrderedDict[Size, Shape] = OrderedDict()

    @property
    def placeholders(self) -> Sequence[str]:
        """What a chat template of the family may write for an image, likeliest first."""
        found: Sequence[str] = self._described["placeholders"]
        return found

    @property
    def row_tokens(self) -> Sequence[int]:
        """The tokens whose embeddings an image's rows replace."""
        found: Sequence[int] = self._described["row_tokens"]
        return found

    @property
    def identity(self) -> str:
        """A hash of libraries and settings: with its pixels it decides what becomes of an image."""
        return str(self._described["identity"])

    def read(
        self, messages: Iterable[inference.ChatMessage], scope: bytes = b"", longest: int = MAX_PREFILL_CHUNK
    ) -> Reading:
        """Begins to read the images of a chat, in the order in which they stand there. `Reading.add_all` goes
        on, and `close` has to follow.

        In a `scope`, that of prefixes, images that were shown there before are not decoded. An image of more
        than `longest` tokens is made smaller.
        """
        decoder = decoder_of(self.memory or DECODER_BYTES)
        images = [
            Waiting(image, f"messages[{number}].images[{index}]", decoder, self)
            for number, message in enumerate(messages)
            for index, image in enumerate(message.images)
        ]
        return Reading(self, decoder, images, scope, longest)

    def prepare(self, pixels: memoryview, size: Size, target: Size, param: str) -> tuple[Arrays, Shape]:
        """As `waiting.Preparing`."""
        asked = {"size": size, "target": target, "data": [pixels], "placeholder": self.placeholder}
        return answered(self._processes, asked, lambda answer: arrays_of(answer, target), param)

    def close(self) -> None:
        """Ends the process."""
        self._processes.close()

    def _begun(self, answer: Mapping[str, Any]) -> None:
        if "failed" in answer:
            raise ViewerError(text_in(answer, "failed", _WORD))
        placeholders = list_in(answer, "placeholders", _MANY, 1)
        self._described = {
            "placeholders": [text_in({"": one}, "", _WORD, 1) for one in placeholders],
            "row_tokens": [whole(one, _NO_TOKEN) for one in list_in(answer, "row_tokens", _NO_TOKEN, 1)],
            "identity": text_in(answer, "identity", _WORD),
        }


def decoder_of(memory: int = DECODER_BYTES) -> Helpers:
    """A process for the images of one prompt, which is started with the first of them."""
    return Helpers(
        "sealring.node.engine.vision.decoding",
        str(SECONDS),
        str(ADDRESS_BYTES),
        first={},
        most=1,
        memory=memory,
        data=3 * HIGH_SIDE**2,
    )


class Reading:
    """The images of one prompt, while it is read. What they take is bounded.

    Its methods read an image for each step of their iterator, and raise InvalidInput (BAD_IMAGE,
    IMAGE_TOO_LARGE, TOO_MANY_IMAGES), whose `param` names the image, and Unavailable (NO_PROCESS, NO_ANSWER).
    """

    def __init__(
        self, viewer: Viewer, decoder: Helpers, images: Sequence[Waiting], scope: bytes, longest: int
    ) -> None:
        self.seen: list[Seen] = []
        self._viewer, self._decoder, self._images = viewer, decoder, images
        self._scope, self._longest = scope, longest
        self._left = PROMPT_SECONDS

    @property
    def nbytes(self) -> int:
        """Bytes that its images hold now."""
        return sum(seen.source.nbytes for seen in self.seen)

    def add_all(self) -> Iterator[None]:
        """Finds out what becomes of each image, which is decoded unless that is known."""
        for image in self._images:
            with self._timed(image):
                self._add(image)
            yield

    def _add(self, image: Waiting) -> None:
        viewer, file = self._viewer, hashlib.sha256(image.file).digest()
        key = hashlib.sha256(b"%d %d " % (image.side, self._longest) + file + self._scope).digest()
        size = viewer.sizes.get(key) if self._scope else None
        image.shape = viewer.shapes.get(size) if size is not None else None
        if image.shape is None:
            image.shape = self._fitting(image)
            image.settle(self._room)
        if self._scope:
            _remember(viewer.sizes, key, image.shape.size, _SIZES)
        width, height = image.shape.size
        digest = hashlib.sha256(f"{viewer.identity} {image.side} {width}x{height} ".encode() + file).digest()
        self.seen.append(Seen(image.shape, digest, image))
        self._check_bytes(image)

    def make_ready(self, first: int) -> Iterator[None]:
        """Decodes the images from index `first` on, and has arrays made for the first of them: their rows are
        going to be computed."""
        self._left = PROMPT_SECONDS
        for shape, _, image in self.seen[first:]:
            with self._timed(image):
                image.decode()
                if not image.made and shape.nbytes <= self._room:
                    image.prepare(shape.size)
                    image.settle(shape.nbytes)
                self._check_bytes(image)
            yield

    @property
    def shown(self) -> Shown:
        """What the chat's template writes for each image, and what stands for it in the prompt."""
        return Shown(self._viewer.placeholder, [seen.shape.text for seen in self.seen])

    def pictures_in(self, ids: Sequence[int]) -> list[Picture]:
        """The images with their places in a prompt of these tokens.

        Raises InvalidInput (PROMPT_UNUSABLE) if its tokens are not those of the images.
        """
        tokens = np.array(ids, np.uint32)
        places = np.flatnonzero(np.isin(tokens, self._viewer.row_tokens))
        if len(places) != sum(seen.shape.rows for seen in self.seen):
            raise InvalidInput(
                "the prompt's tokens are not those of its images",
                hint="leave names of control tokens out of the messages",
                reason="PROMPT_UNUSABLE",
                param="messages",
            )
        found, at = [], 0
        for shape, digest, source in self.seen:
            own = places[at : at + shape.rows]
            at += shape.rows
            start, end = int(own[0]) - shape.before, int(own[-1]) + 1 + shape.behind
            found.append(Picture(start, end, own, digest, source, shape.patches, tokens[own]))
        return found

    def close(self) -> None:
        """Ends the process that decodes. Images that it has not decoded have one each."""
        self._decoder.close()

    @property
    def _room(self) -> int:
        """Bytes that arrays may take besides."""
        return self._viewer.ready - sum(seen.source.made for seen in self.seen)

    def _fitting(self, image: Waiting) -> Shape:
        """The shape of an image in the largest size that is tried and has no more tokens than it may."""
        shapes, size, tokens = self._viewer.shapes, image.decode(), 0
        for _ in range(_TRIES):
            shape = shapes.get(size) or image.prepare(size)
            _remember(shapes, size, shape, _SHAPES)
            if shape.tokens <= self._longest:
                return shape
            image.settle(0)  # arrays of another size
            part = _MUCH_LESS if shape.tokens == tokens else _LESS
            part, tokens = part * math.sqrt(self._longest / shape.tokens), shape.tokens
            size = max(1, int(part * size[0])), max(1, int(part * size[1]))
        raise InvalidInput(
            f"{image.param} has {tokens} tokens in the smallest size that was tried, and this ring "
            f"computes {self._longest} at a time",
            hint="ask the operator for a longer --prefill-chunk",
            reason="IMAGE_TOO_LARGE",
            param=image.param,
        )

    @contextlib.contextmanager
    def _timed(self, image: Waiting) -> Iterator[None]:
        begun = self._viewer.clock()
        if self._left < 0:
            raise _too_many(f"to read them takes more than {PROMPT_SECONDS:g} s", image.param)
        yield
        self._left -= self._viewer.clock() - begun

    def _check_bytes(self, image: Waiting) -> None:
        if self.nbytes > self._viewer.most:
            raise _too_many(f"with this one they take more than {self._viewer.most >> 20} MiB", image.param)


def _remember(known: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Forgets what was not needed for longest."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)


class ViewerError(Exception):
    """No processor can be made of a model's folder. Its text says why."""


def viewer_of(folder: Path, tokenizer: Names) -> Viewer | None:
    """The viewer of a model; None if no processor can be made of its folder, or if its chat template knows no
    images, so that prompts without images are served all the same."""
    try:
        viewer = Viewer(folder, tokenizer.special)
    except (ViewerError, Unavailable, FailedPrecondition) as error:
        log.warning("images_unreadable", model=folder.name, why=str(error))
        return None
    viewer.placeholder = tokenizer.placeholder(viewer.placeholders)
    if viewer.placeholder:
        return viewer
    viewer.close()
    log.warning("images_unreadable", model=folder.name, why="the chat template knows no images")
    return None


class FolderSight:
    """A `Sight` by the files of a model's folder. `sees`: the model's tower is going to be loaded."""

    def __init__(self, folder: Path, *, sees: bool) -> None:
        self._folder, self._may_see = folder, sees
        self._viewer: Viewer | None = None

    @property
    def sees(self) -> bool:
        return self._viewer is not None

    @property
    def not_installed(self) -> bool:
        return self._viewer is None and lacks_vision(self._folder)

    def open(self, names: Names) -> None:
        self._viewer = viewer_of(self._folder, names) if self._may_see else None

    def read(
        self, messages: Iterable[inference.ChatMessage], scope: bytes = b"", longest: int = MAX_PREFILL_CHUNK
    ) -> Reading:
        viewer = self._viewer
        if viewer is not None:
            return viewer.read(messages, scope, longest)
        if lacks_vision(self._folder):
            raise vision_not_installed()
        raise cannot_see("", why="the log of the ring's head says why" if self._may_see else "")

    def close(self) -> None:
        viewer, self._viewer = self._viewer, None
        if viewer is not None:
            viewer.close()


def _too_many(why: str, param: str) -> InvalidInput:
    return InvalidInput(
        f"the prompt has too many images: {why}",
        hint="leave out the oldest ones, or make them smaller",
        reason="TOO_MANY_IMAGES",
        param=param,
    )
