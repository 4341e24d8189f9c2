"""The manifest of a model folder: its files with the hash of each part, by which members pass it on."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

from sealring.mesh.errors import Cancelled, ModelError
from sealring.node.models.folders import CONFIGURATIONS, INNER, NOTE, files_in
from sealring.v1 import models_pb2

PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Files that belong to a model. Python files are not among them: no code comes with a model."""

PART = 8 << 20
"""Bytes of a part, which is hashed as a whole and sent again if it arrives damaged."""

ADAPTER_CONFIG, ADAPTERS = CONFIGURATIONS[1], ("adapters.safetensors", "adapter_model.safetensors")
"""An adapter's files, as mlx-lm and PEFT call them. They are small, so that each member has them whole."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_DIGEST = hashlib.sha256().digest_size
MAX_FILES = 1024
MAX_BYTES = 3 << 40
"""Most bytes of all files: their hashes then fit into one message."""

_BLOCK = 1 << 20
_LOOK = 4096
"""First bytes to read of a part: in nearly every part that is no hole they are not all zero."""


@dataclass(frozen=True)
class ModelFile:
    """One file: its size in bytes and the SHA-256 of every part, one after the other."""

    name: str
    size: int
    hashes: bytes

    @property
    def parts(self) -> int:
        return -(-self.size // PART)

    @property
    def is_weights(self) -> bool:
        return self.name.endswith(".safetensors") and self.name not in ADAPTERS

    def length(self, part: int) -> int:
        """Bytes of a part; the last one is shorter."""
        return min(PART, self.size - part * PART)

    def knows(self, part: int) -> bool:
        """Whether the hash of a part is known. That of a part from the hub is unknown before it arrives."""
        return not self.fits(part, bytes(_DIGEST))

    def with_hash(self, part: int, digest: bytes) -> ModelFile:
        """This file with `digest` as the hash of a part."""
        at = part * _DIGEST
        return replace(self, hashes=self.hashes[:at] + digest + self.hashes[at + _DIGEST :])

    def fits(self, part: int, digest: bytes) -> bool:
        """Whether a part's SHA-256 is the right one."""
        return self.hash_of(part) == digest

    def hash_of(self, part: int) -> bytes:
        return self.hashes[part * _DIGEST : (part + 1) * _DIGEST]


@dataclass(frozen=True)
class Manifest:
    """The files of a model by name."""

    files: tuple[ModelFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over the names, sizes and hashes."""
        total = hashlib.sha256()
        for file in self.files:
            for field in (file.name.encode(), file.size.to_bytes(8, "big"), file.hashes):
                total.update(len(field).to_bytes(8, "big") + field)
        return total.digest()

    def message(self) -> models_pb2.ModelManifest:
        """The manifest as a message."""
        files = [
            models_pb2.ModelFile(name=file.name, size=file.size, parts=file.hashes) for file in self.files
        ]
        return models_pb2.ModelManifest(files=files)

    @classmethod
    def from_message(cls, message: models_pb2.ModelManifest) -> Manifest:
        """A manifest that another member sent. Raises ModelError (BAD_MANIFEST)."""
        if not 1 <= len(message.files) <= MAX_FILES or sum(one.size for one in message.files) > MAX_BYTES:
            raise _bad("it is empty or too large")
        files = tuple(ModelFile(one.name, one.size, one.parts) for one in message.files)
        names = [file.name for file in files]
        folded = {name.lower() for name in names}  # a Mac's disk takes "A" and "a" for one file
        if names != sorted(names) or len(folded) < len(names) or not all(map(belongs, names)):
            raise _bad("its names are not those of a model's files, each once and in order")
        if not folded.intersection(CONFIGURATIONS) or any(
            len(one.hashes) != _DIGEST * one.parts for one in files
        ):
            raise _bad("it has no configuration, or not one hash for every part")
        return cls(files)

    @classmethod
    def unhashed(cls, files: Sequence[tuple[str, int]]) -> Manifest:
        """A manifest of names and sizes without hashes. Raises ModelError (BAD_MANIFEST)."""
        made = cls(tuple(ModelFile(name, size, bytes(_DIGEST * -(-size // PART))) for name, size in files))
        return cls.from_message(made.message())

    @classmethod
    def of(cls, folder: Path, stop: threading.Event | None = None) -> Manifest:
        """Reads every file of a model's folder; ends early with Cancelled once `stop` is set.

        Raises ModelError (MODEL_FOLDER_UNUSABLE) for a folder that cannot be passed on.
        """
        try:
            names = sorted(name for name, _ in files_in(folder) if belongs(name))
            files = tuple(_read(folder, name, stop) for name in names)
        except OSError as error:
            raise _unusable(folder, f"cannot be read: {error.strerror}") from None
        try:
            return cls.from_message(cls(files).message())
        except ModelError as error:
            raise _unusable(folder, f"cannot be passed on: {error.message}") from None


def belongs(name: str) -> bool:
    """Whether a file of this name belongs to a model."""
    if "/" in name:
        return INNER.fullmatch(name) is not None
    return (
        _NAME.fullmatch(name) is not None
        and name.lower() != NOTE
        and any(fnmatch(name, pattern) for pattern in PATTERNS)
    )


def open_inside(folder: Path, name: str) -> int:
    """A descriptor of a regular file of a model's folder.

    Links are followed within the folder, and from a snapshot of the Hugging Face cache to its model's blobs;
    never further. Raises ModelError (MODEL_FOLDER_UNUSABLE), OSError.
    """
    home = folder.resolve()
    path = (home / name).resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if path.parent not in ((home / name).parent, blobs):
        raise _unusable(folder, f"has a link that leads elsewhere, {name}")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _unusable(folder, f"holds {name}, which is no file")
    return descriptor


def hash_part(descriptor: int, size: int, part: int, stop: threading.Event | None = None) -> bytes:
    """The SHA-256 of a part of a file of `size` bytes. Raises OSError, Cancelled."""
    total = hashlib.sha256()
    for block in read_part(descriptor, size, part):
        if stop is not None and stop.is_set():
            raise Cancelled("the node stops")
        total.update(block)
    return total.digest()


def read_part(descriptor: int, size: int, part: int) -> Iterator[bytes]:
    """A part of a file of `size` bytes, in blocks of 1 MiB at most. Raises OSError."""
    at, end = part * PART, min((part + 1) * PART, size)
    while at < end:
        block = os.pread(descriptor, min(_BLOCK, end - at), at)
        if not block:
            raise OSError(0, "a file has become shorter")
        yield block
        at += len(block)


def blank_parts(descriptor: int, size: int) -> set[int]:
    """The parts of a weight file of `size` bytes that are all zeros, as in holes. Raises OSError."""
    return {part for part in range(-(-size // PART)) if _is_blank(descriptor, size, part)}


def _is_blank(descriptor: int, size: int, part: int) -> bool:
    at, end, length = part * PART, min((part + 1) * PART, size), _LOOK
    while at < end:
        block = os.pread(descriptor, min(length, end - at), at)
        if not block or block.count(0) < len(block):
            return False
        at, length = at + len(block), _BLOCK
    return True


def _read(folder: Path, name: str, stop: threading.Event | None) -> ModelFile:
    descriptor = open_inside(folder, name)
    try:
        size = os.fstat(descriptor).st_size
        if name.endswith(".safetensors") and blank_parts(descriptor, size):
            raise _unusable(folder, f"holds only a part of {name}: the rest is zeros")
        parts = range(-(-size // PART))
        return ModelFile(name, size, b"".join(hash_part(descriptor, size, part, stop) for part in parts))
    finally:
        os.close(descriptor)


def _bad(why: str) -> ModelError:
    return ModelError(f"a model's manifest is unusable: {why}", reason="BAD_MANIFEST")


def _unusable(folder: Path, why: str) -> ModelError:
    return ModelError(
        f"the folder {folder.name} {why}",
        reason="MODEL_FOLDER_UNUSABLE",
        hint="copy the model itself into the folder",
    )
