"""Images at the head: from files to what stands for them in a prompt, and to what the tower takes.

Files may come from anybody, so each prompt has a process for itself that decodes them
(node/engine/vision/decoding.py). Another process prepares the pixels of all prompts
(node/engine/vision/processor.py). This module imports neither mlx-vlm nor Pillow.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.errors import InvalidInput, SealringError, Unavailable
from sealring.mesh.prompt.images import bad_image, cannot_see
from sealring.node.engine.helper import Helpers
from sealring.node.engine.vision import mlx_vlm_import
from sealring.node.engine.vision.picture import Picture
from sealring.node.engine.vision.sizes import HIGH_SIDE, LOW_SIDE
from sealring.node.engine.weights import read_config
from sealring.v1 import inference_pb2 as inference

log = structlog.get_logger()

SECONDS = 10
"""Processor time to decode an image, to prepare one, and to start a process."""

PROMPT_SECONDS = 30.0
"""For all images of a prompt but the last, however busy the machine is. Others with images wait meanwhile."""

MEMORY_BYTES = 640 << 20
"""Resident, of a process: 50 megapixels with transparency take 500 MiB, a screenshot less than 200."""

ADDRESS_BYTES = 4 << 30
"""Address space, where the system holds a process to it."""

MAX_ARRAY_BYTES = 384 << 20
"""What the images of a prompt may become together. Qwen's towers take 24 bytes for each pixel, others 12 for
each pixel of a size of their own: 15 screenshots of a megapixel, or 39 images for Gemma 3."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An image that was prepared, before its place in the prompt is known."""

    text: str
    """Stands for it in the prompt, where the template writes the placeholder."""

    rows: int
    before: int
    behind: int
    """As node.engine.vision.processor.Prepared."""

    digest: bytes
    arrays: Mapping[str, npt.NDArray[Any]]
    """As Picture has them."""


class Viewer:
    """Prepares images for one model. Any thread; one image is prepared at a time.

    Raises ViewerError where the family's processor cannot be made of the folder.
    """

    def __init__(
        self,
        folder: Path,
        special: Mapping[int, str],
        clock: Clock = monotonic_clock,
        *,
        seconds: int = SECONDS,
        memory: int = MEMORY_BYTES,
        most: int = MAX_ARRAY_BYTES,
    ) -> None:
        """`special`: the names of the model's special tokens. The rest are the bounds above."""
        self._clock = clock
        self._seconds, self._most = seconds, most
        self._described: Mapping[str, Any] = {}
        self._memory = memory
        names = {name: number for number, name in special.items()}
        self._processes = Helpers(
            "sealring.node.engine.vision.processor",
            str(seconds),
            str(ADDRESS_BYTES),
            first={"folder": str(folder), "special": names},
            most=1,
            begun=self._begun,
            memory=memory,
            data=most,
        )
        self._processes.prepare()
        if not self._described:
            raise ViewerError("the process ended")
        if self.row_token not in special:
            raise ViewerError("no special token stands for images")
        self.placeholder = ""
        """The text that the chat template writes for an image. The owner of this object sets it."""

    @property
    def placeholders(self) -> Sequence[str]:
        """What a chat template of the family may write for an image, likeliest first."""
        found: Sequence[str] = self._described["placeholders"]
        return found

    @property
    def row_token(self) -> int:
        """The token whose embeddings an image's rows replace."""
        return int(self._described["row_token"])

    def view(self, messages: Iterable[inference.ChatMessage]) -> list[Seen]:
        """The images of a chat, in the order in which they stand there.

        Raises InvalidInput (BAD_IMAGE, IMAGE_TOO_LARGE, TOO_MANY_IMAGES), whose `param` names the image, and
        Unavailable (NO_PROCESS).
        """
        decoder = Helpers(
            "sealring.node.engine.vision.decoding",
            str(self._seconds),
            str(ADDRESS_BYTES),
            first={},
            most=1,
            memory=self._memory,
            data=3 * HIGH_SIDE**2,
        )
        with contextlib.closing(decoder):
            return self._view_all(messages, decoder)

    def _view_all(self, messages: Iterable[inference.ChatMessage], decoder: Helpers) -> list[Seen]:
        found: list[Seen] = []
        until, size = self._clock() + PROMPT_SECONDS, 0
        for number, message in enumerate(messages):
            for index, image in enumerate(message.images):
                param = f"messages[{number}].images[{index}]"
                if self._clock() > until:
                    raise _too_many(f"to read them takes more than {PROMPT_SECONDS:g} s", param)
                found.append(self._view(image, param, decoder))
                size += sum(array.nbytes for array in found[-1].arrays.values())
                if size > self._most:
                    raise _too_many(f"with this one they take more than {self._most >> 20} MiB", param)
        return found

    def close(self) -> None:
        """Ends the process."""
        self._processes.close()

    def _view(self, image: inference.Image, param: str, decoder: Helpers) -> Seen:
        side = LOW_SIDE if image.low_detail else HIGH_SIDE
        decoded = self._asked(decoder, {"side": side, "data": image.data}, param)
        pixels = {"size": decoded["size"], "data": [decoded["data"]], "placeholder": self.placeholder}
        answer = self._asked(self._processes, pixels, param)
        digest = hashlib.sha256(f"{self._described['identity']} {side} ".encode() + image.data).digest()
        arrays, at = {}, 0
        for name, kind, shape in answer["arrays"]:
            dtype, count = np.dtype(kind), int(np.prod(shape, dtype=np.int64))
            arrays[name] = np.frombuffer(answer["data"], dtype, count, at).reshape(shape)
            at += count * dtype.itemsize
        return Seen(answer["text"], answer["rows"], answer["before"], answer["behind"], digest, arrays)

    def _asked(self, process: Helpers, question: Mapping[str, Any], param: str) -> Mapping[str, Any]:
        """Raises InvalidInput (BAD_IMAGE, IMAGE_TOO_LARGE)."""
        answer = process.ask(question)
        if answer is None:
            raise bad_image(param, f"to read it takes more than {self._seconds} s or more than its memory")
        if "large" in answer:
            raise _too_large(param, *answer["large"])
        if "bad" in answer or "failed" in answer:
            raise bad_image(param, answer.get("bad") or f"it cannot be prepared ({answer['failed']})")
        return answer

    def _begun(self, answer: Mapping[str, Any]) -> None:
        if "failed" in answer:
            raise ViewerError(answer["failed"])
        self._described = answer


class ViewerError(Exception):
    """No processor can be made of a model's folder. Its text says why."""


class Names(Protocol):
    """What a viewer needs of a tokenizer, as node.engine.text.tokenizer has it."""

    special: Mapping[int, str]

    def placeholder(self, known: Sequence[str]) -> str: ...


def viewer_of(folder: Path, tokenizer: Names) -> Viewer | None:
    """The viewer of a model; None if no processor can be made of its folder, or if its chat template knows no
    images, so that prompts without images are served all the same."""
    try:
        viewer = Viewer(folder, tokenizer.special)
    except (ViewerError, Unavailable) as error:
        log.warning("images_unreadable", model=folder.name, why=str(error))
        return None
    viewer.placeholder = tokenizer.placeholder(viewer.placeholders)
    if viewer.placeholder:
        return viewer
    viewer.close()
    log.warning("images_unreadable", model=folder.name, why="the chat template knows no images")
    return None


def no_viewer(folder: Path, *, sees: bool) -> SealringError:
    """The error for an image where there is no viewer. `sees`: the model's tower was to be loaded."""
    config = read_config(folder)
    if config.get("vision_config") and not all(map(importlib.util.find_spec, ("mlx_vlm", "PIL"))):
        return mlx_vlm_import.not_installed()
    return cannot_see("", why="the log of the ring's head says why" if sees else "")


def pictures_in(ids: Sequence[int], row_token: int, seen: Sequence[Seen]) -> list[Picture]:
    """The images of a prompt of these tokens, with their places.

    Raises InvalidInput (PROMPT_UNUSABLE) if its tokens are not those of the images.
    """
    if not seen:
        return []
    places = np.flatnonzero(np.array(ids, np.int64) == row_token)
    if len(places) != sum(one.rows for one in seen):
        raise InvalidInput(
            "the prompt's tokens are not those of its images",
            hint="leave names of control tokens out of the messages",
            reason="PROMPT_UNUSABLE",
            param="messages",
        )
    found, at = [], 0
    for one in seen:
        own = places[at : at + one.rows]
        at += one.rows
        start, end = int(own[0]) - one.before, int(own[-1]) + 1 + one.behind
        found.append(Picture(start, end, own, one.digest, one.arrays))
    return found


def _too_large(param: str, pixels: int, limit: int) -> InvalidInput:
    return InvalidInput(
        f"{param} has {pixels} pixels",
        hint=f"make it smaller: an image has at most {limit}",
        reason="IMAGE_TOO_LARGE",
        param=param,
        limit=limit,
    )


def _too_many(why: str, param: str) -> InvalidInput:
    return InvalidInput(
        f"the prompt has too many images: {why}",
        hint="leave out the oldest ones, or make them smaller",
        reason="TOO_MANY_IMAGES",
        param=param,
    )
