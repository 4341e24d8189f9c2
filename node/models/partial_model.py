"""A model folder that is being filled, hidden until it holds the whole model or a stage's part of it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path

from sealring.mesh.errors import ModelError, ResourceExhausted
from sealring.mesh.system.files import sync, sync_folder, unwritable
from sealring.node.models.folders import INNER_FOLDER, NOTE, FolderState
from sealring.node.models.kept import (
    Note,
    Parts,
    beginnings,
    every_part,
    headers,
    is_hole,
    is_part,
    length_of,
    note_of,
    with_ranges,
)
from sealring.node.models.manifest import PART, Manifest, open_inside, read_part

PARTIAL = ".partial"
"""Folder of partial models, beside the whole ones. No model's name begins with a dot."""

SPARE = 1 << 30
"""Bytes of the disk that stay free."""


class PartialModel:
    """One model on its way to `home/NAME`. Parts outlive the process: the next one hashes them and goes on.

    A published folder with some parts is filled in place; its note (`node/models/kept.py`) names only parts
    that it holds. All methods block. Use it from one process and one thread at a time.
    """

    def __init__(self, home: Path, name: str) -> None:
        """Raises ModelError (BAD_MODEL_NOTE)."""
        partial, self.target = places(home, name)
        self.path = self.target if is_part(self.target) else partial
        self._have: list[set[int]] = []
        self._wanted: Parts = ()
        self._whole: list[_FileHash | None] = []
        self._tell: Callable[[], None] = lambda: None
        self.size = 0
        """Bytes that are wanted, and those that have to be read again for the hash of their file; 0 until
        `begin` has read what is here."""
        self.done = 0
        """Bytes of them that are here and have the right hash, and those that were read again."""
        self._manifest = Manifest(())
        self._commit = self._hub_files = ""
        self._checked = False

    def prepare(self) -> None:
        """Makes the folder. Raises ConfigError (STATE_UNWRITABLE)."""
        with _writing(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def begin(
        self,
        manifest: Manifest,
        wanted: Parts | None = None,
        commit: str = "",
        *,
        checked: bool = False,
        hub_files: str = "",
        whole: bool = False,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """Keeps parts with the right hash, and deletes files that do not belong to the model.

        `wanted` are the parts to add; None means all. With the hub's `commit`, a part without a hash in the
        manifest gets the hash of the bytes that arrive. `checked` says that the manifest has all hashes and
        the hub has confirmed them. `hub_files` is as in ModelProfile. `tell` is called again and again while
        parts are read, now and later. With `whole`, parts are added in order, for `sha256`.

        Raises ResourceExhausted (DISK_FULL), ModelError (OTHER_MODEL_VERSION), ConfigError
        (STATE_UNWRITABLE).
        """
        self.prepare()
        note = note_of(self.path)
        self._commit, self._checked, self._hub_files = commit, checked, hub_files
        if note is not None and self.path == self.target and not note.agrees(manifest):
            raise ModelError(
                f"the part of {self.path.name} that is here is of another version",
                hint="remove it first: sealring model remove",
                reason="OTHER_MODEL_VERSION",
            )
        self._manifest, self._tell, self.size, self.done = manifest, tell, 0, 0
        self._have = [set() for _ in manifest.files]
        self._whole = [_FileHash() if whole else None for _ in manifest.files]
        self._wanted = every_part(manifest) if wanted is None else wanted
        with _writing(self.path):
            _clear(self.path, {NOTE, *(file.name for file in manifest.files)})
            for index in range(len(manifest.files)):
                self._keep_parts(index)
        self.want(self._wanted)

    def want(self, wanted: Parts) -> None:
        """Changes which parts are wanted. Raises ResourceExhausted (DISK_FULL)."""
        self._wanted = wanted
        self._count()
        check_disk(self.path, length_of(self._manifest.files, self.missing()))

    def _count(self) -> None:
        """Counts all parts. That is slow, so `add` only adds to the count."""
        files = self._manifest.files
        here = [wanted & have for wanted, have in zip(self._wanted, self._have, strict=True)]
        again = [
            frozenset(_read_again(wanted | have, have, whole.parts) if whole is not None else ())
            for wanted, have, whole in zip(self._wanted, self._have, self._whole, strict=True)
        ]
        self.done = length_of(files, here)
        self.size = length_of(files, self._wanted) + length_of(files, again)

    def missing(self) -> Parts:
        """The wanted parts of each file that are not here."""
        return [wanted - have for wanted, have in zip(self._wanted, self._have, strict=True)]

    def complete(self, file: int) -> bool:
        """Whether all of a file is here."""
        return len(self._have[file]) == self._manifest.files[file].parts

    def add(self, file: int, part: int, pieces: Sequence[bytes | memoryview]) -> None:
        """Checks and writes a part of a file, given in pieces.

        Raises ModelError (MODEL_PART_DAMAGED), ResourceExhausted (DISK_FULL), ConfigError (STATE_UNWRITABLE).
        """
        one = self._manifest.files[file]
        if not self._fits(file, part, pieces, learn=bool(self._commit)):
            raise ModelError(
                f"part {part} of {one.name} is not what its manifest says", reason="MODEL_PART_DAMAGED"
            )
        with _writing(self.path), (self.path / one.name).open("r+b", buffering=0) as stream:
            stream.seek(part * PART)
            for piece in pieces:
                written = 0
                while written < len(piece):
                    written += stream.write(memoryview(piece)[written:])
            self._hold(file, part)
            self._go_on(file, stream.fileno())

    def _hold(self, file: int, part: int) -> None:
        if part in self._wanted[file] and part not in self._have[file]:
            self.done += self._manifest.files[file].length(part)
        self._have[file].add(part)

    def _go_on(self, file: int, descriptor: int) -> None:
        """Takes the file's hash over the parts behind one that came, which were here before it."""
        while (whole := self._whole[file]) is not None and whole.parts in self._have[file]:
            if not self._fits(file, whole.parts, self._read(file, whole.parts, descriptor)):
                self._whole[file] = _FileHash(whole.total, _CHANGED)
                return
            self.done += self._manifest.files[file].length(whole.parts)

    def _read(self, file: int, part: int, descriptor: int) -> Iterator[bytes]:
        for block in read_part(descriptor, self._manifest.files[file].size, part):
            yield block
            self._tell()

    def _fits(
        self, file: int, part: int, pieces: Iterable[bytes | memoryview], *, learn: bool = False
    ) -> bool:
        """Whether a part has the right hash, which is learnt from it if it is not known. If it is the next
        part, the hash of its file goes on with it."""
        one, total = self._manifest.files[file], hashlib.sha256()
        before = self._whole[file]
        whole = before and before.before(part)
        for piece in pieces:
            total.update(piece)
            if whole is not None:
                whole.total.update(piece)
        if learn and not one.knows(part):
            self._learn(file, part, total.digest())
        elif not one.fits(part, total.digest()):
            return False
        self._whole[file] = whole or before
        return True

    def sha256(self, file: int) -> str:
        """The SHA-256 of a complete file in hex, taken while its parts came and not by reading it again; ""
        unless `begin` was called with `whole`, or if somebody has changed the file."""
        whole = self._whole[file] or _FileHash(parts=_CHANGED)
        return whole.total.hexdigest() if whole.parts == self._manifest.files[file].parts else ""

    def keep(self, *, checked: bool = False) -> None:
        """Writes a durable note of the parts that are here, so that another process can go on.

        `checked` says that all parts are here and the hub's hashes confirm them; it stays set.
        Raises ConfigError (STATE_UNWRITABLE).
        """
        with _writing(self.path):
            for file in self._manifest.files:
                with (self.path / file.name).open("rb") as stream:
                    sync(stream.fileno())
            have = [frozenset(here) for here in self._have]
            self._checked |= checked
            state = FolderState.read(self.path)
            note = Note(self._manifest, have, state, self._commit, self._checked, self._hub_files)
            note.write(self.path / NOTE)

    def forget(self, file: int) -> None:
        """Deletes the content of a file whose hash as a whole is wrong. Raises ConfigError
        (STATE_UNWRITABLE)."""
        one = self._manifest.files[file]
        for part in self._have[file]:
            self._learn(file, part, bytes(hashlib.sha256().digest_size))
        self._have[file].clear()
        self._whole[file] = self._whole[file] and _FileHash()
        self._count()
        self._checked = False
        with _writing(self.path):
            os.truncate(self.path / one.name, 0)
            os.truncate(self.path / one.name, one.size)
        self.keep()

    def _learn(self, file: int, part: int, digest: bytes) -> None:
        files = list(self._manifest.files)
        files[file] = files[file].with_hash(part, digest)
        self._manifest = Manifest(tuple(files))

    def publish(self, *, keep: bool = True) -> Path:
        """Writes all of it to the disk with its note, and moves it to its own name, which is returned.
        Without `keep` the note stays of another process that has filled it.

        A folder that somebody put there meanwhile stays. Raises ConfigError (STATE_UNWRITABLE).
        """
        with _writing(self.target):
            for entry in list(os.scandir(self.path)):
                if entry.is_dir(follow_symlinks=False) and not INNER_FOLDER.fullmatch(entry.name):
                    shutil.rmtree(entry.path)
            if keep and self._manifest.files:
                self.keep()
            _sync(self.path)
            if self.path == self.target:
                return self.target
            self.target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.target.is_dir():
                shutil.rmtree(self.path)
            else:
                self.path.rename(self.target)
                sync_folder(self.target.parent)
        return self.target

    def _keep_parts(self, index: int) -> None:
        """Keeps the parts of a file with the right hash; the file gets its whole length, with holes."""
        file = self._manifest.files[index]
        descriptor = os.open(self.path / file.name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(descriptor).st_size != file.size:
                os.ftruncate(descriptor, file.size)
            for part in range(file.parts):
                if (
                    file.knows(part)
                    and not is_hole(descriptor, part * PART, part * PART + file.length(part))
                    and self._fits(index, part, self._read(index, part, descriptor))
                ):
                    self._hold(index, part)
        finally:
            os.close(descriptor)


_CHANGED = -1


@dataclass(frozen=True)
class _FileHash:
    """The SHA-256 of the first parts of a file; `_CHANGED` parts of one that somebody changes meanwhile."""

    total: hashlib._Hash = field(default_factory=hashlib.sha256)
    parts: int = 0

    def before(self, part: int) -> _FileHash | None:
        """A copy that goes on with `part`, if that is the next part."""
        return _FileHash(self.total.copy(), part + 1) if part == self.parts else None


def _read_again(there: frozenset[int], have: set[int], first: int) -> list[int]:
    """The parts that have come before the missing part `first`, and that the hash of their file takes up once
    all parts before them are `there`."""
    return [part for part in takewhile(there.__contains__, count(first)) if part in have]


def places(home: Path, name: str) -> tuple[Path, Path]:
    """The folder in which a model is filled, and the folder in which it is published."""
    return home / PARTIAL / name.replace("/", "--"), home / name


def check_disk(folder: Path, needed: int) -> None:
    """Raises ResourceExhausted (DISK_FULL) unless `needed` bytes fit and `SPARE` bytes stay free."""
    free = shutil.disk_usage(folder).free
    if needed and free < needed + SPARE:
        raise ResourceExhausted(
            f"the model needs {needed >> 20} MiB more on the disk of {folder.parent.parent} and "
            f"{free >> 20} MiB are free, of which {SPARE >> 20} stay so",
            hint="make room, or remove a model: sealring model remove",
            reason="DISK_FULL",
        )


def _clear(path: Path, names: set[str]) -> None:
    """Deletes all but the files of these names, and makes the folders in which they lie."""
    folders = {name.rpartition("/")[0] for name in names}
    for folder in sorted(folders):  # "" first, which is `path` itself
        (path / folder).mkdir(mode=0o700, exist_ok=True)
        for entry in list(os.scandir(path / folder)):
            name = str(Path(entry.path).relative_to(path))
            if entry.is_dir(follow_symlinks=False):
                if name not in folders:
                    shutil.rmtree(entry.path)
            elif name not in names or entry.is_symlink():
                os.unlink(entry.path)


def _sync(folder: Path) -> None:
    """Writes a folder and all in it to the disk. Raises OSError."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            _sync(Path(entry.path))
            continue
        with open(entry.path, "rb") as stream:
            sync(stream.fileno())
    sync_folder(folder)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from None


def split(
    folder: Path, into: Path, stages: Sequence[Sequence[tuple[str, int, int]]], tell: Callable[[str], None]
) -> list[tuple[Path, int]]:
    """For each stage its folder `into/stage-K/NAME`, filled with the parts of its ranges, and their bytes.

    Parts from an earlier call stay. `tell` receives lines of progress. Raises ModelError
    (MODEL_FOLDER_UNUSABLE, MODEL_PART_DAMAGED), ResourceExhausted (DISK_FULL), ConfigError
    (STATE_UNWRITABLE), OSError.
    """
    tell(f"reading {folder.name}")
    manifest = Manifest.of(folder)
    common = headers(manifest, beginnings(manifest), folder)
    made = []
    for number, ranges in enumerate(stages):
        partial = PartialModel(into / f"stage-{number}", folder.name)
        partial.begin(manifest, with_ranges(manifest, common, ranges))
        for index, (file, parts) in enumerate(zip(manifest.files, partial.missing(), strict=True)):
            descriptor = open_inside(folder, file.name)
            try:
                for part in sorted(parts):
                    partial.add(index, part, [os.pread(descriptor, file.length(part), part * PART)])
                    tell(f"stage {number}: {partial.done / max(1, partial.size):.0%}")
            finally:
                os.close(descriptor)
        made.append((partial.publish(), partial.size))
    return made
