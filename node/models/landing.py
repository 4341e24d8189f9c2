"""Where a model's folder is filled: out of sight, until it is whole."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sealring.mesh.errors import ModelError, ResourceExhausted
from sealring.mesh.system.files import unwritable
from sealring.node.models.manifest import PART, Manifest, hash_parts

PARTIAL = ".partial"
"""Beside the folders that are whole. No model's name begins with a dot."""

SPARE = 1 << 30
"""Bytes of the disk that stay free."""


class Landing:
    """One model on its way to `home/NAME`. What has come outlives the process, however it ends: the next one
    hashes it and goes on behind it. All of this blocks; one process and one thread at a time."""

    def __init__(self, home: Path, name: str) -> None:
        self.target = home / name
        self.path = home / PARTIAL / name.replace("/", "--")
        self._parts: list[int] = []
        self._manifest: Manifest | None = None

    def prepare(self) -> None:
        """Makes the folder. Raises ConfigError (STATE_UNWRITABLE)."""
        with _writing(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def begin(self, manifest: Manifest) -> None:
        """Keeps the beginning of each file as far as it is right, and drops the rest.

        Raises ResourceExhausted (DISK_FULL) where the rest would not fit, ConfigError (STATE_UNWRITABLE).
        """
        self.prepare()
        with _writing(self.path):
            names = {file.name for file in manifest.files}
            for entry in list(os.scandir(self.path)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                elif entry.name not in names or entry.is_symlink():
                    os.unlink(entry.path)
            self._parts = [self._kept(manifest, index) for index in range(len(manifest.files))]
        self._manifest = manifest
        check_disk(self.path, manifest.size - self.done)

    @property
    def done(self) -> int:
        """Bytes that are here and right."""
        files = self._manifest.files if self._manifest else ()
        return sum(min(file.size, parts * PART) for file, parts in zip(files, self._parts, strict=True))

    def parts(self, file: int) -> int:
        """How many parts of a file are here, from its beginning."""
        return self._parts[file]

    def add(self, file: int, data: bytes | bytearray) -> None:
        """The next part of a file.

        Raises ModelError (MODEL_PART_DAMAGED), ResourceExhausted (DISK_FULL), ConfigError (STATE_UNWRITABLE).
        """
        assert self._manifest is not None
        one, part = self._manifest.files[file], self._parts[file]
        if not one.fits(part, hashlib.sha256(data).digest()):
            raise ModelError(
                f"part {part} of {one.name} is not what its manifest says", reason="MODEL_PART_DAMAGED"
            )
        with _writing(self.path), (self.path / one.name).open("r+b") as stream:
            stream.seek(part * PART)
            stream.write(data)
        self._parts[file] += 1

    def publish(self) -> Path:
        """The folder under its own name, once all of it is on the disk.

        A folder that has come there by another way meanwhile stays. Raises ConfigError (STATE_UNWRITABLE).
        """
        with _writing(self.target):
            for entry in list(os.scandir(self.path)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)  # what huggingface_hub notes down
                    continue
                with open(entry.path, "rb") as stream:
                    os.fsync(stream.fileno())
            self.target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.target.is_dir():
                shutil.rmtree(self.path)
            else:
                self.path.rename(self.target)
        return self.target

    def _kept(self, manifest: Manifest, index: int) -> int:
        """How many parts of a file are right already; its end is cut off after them."""
        file = manifest.files[index]
        descriptor = os.open(self.path / file.name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            whole = min(file.size, os.fstat(descriptor).st_size)
            if whole < file.size:
                whole -= whole % PART
            right = 0
            for digest in hash_parts(descriptor, whole):
                if not file.fits(right, digest):
                    break
                right += 1
            os.ftruncate(descriptor, min(file.size, right * PART))
            return right
        finally:
            os.close(descriptor)


def check_disk(folder: Path, needed: int) -> None:
    """Raises ResourceExhausted (DISK_FULL) unless so many bytes fit, and some stay free."""
    free = shutil.disk_usage(folder).free
    if needed and free < needed + SPARE:
        raise ResourceExhausted(
            f"the model needs {needed >> 20} MiB more on the disk of {folder.parent.parent} and "
            f"{free >> 20} MiB are free, of which {SPARE >> 20} stay so",
            hint="make room, or remove a model: sealring model remove",
            reason="DISK_FULL",
        )


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from None
