"""The folder of stored prefixes, as one engine uses it: files by keyed names, within a bound.

All failures of the disk are misses. An error while writing turns writing off for a while, with one warning; a
file that does not open as what it should be is removed. Engines of one node share the bound: each counts all
files below the root, and looks again now and then. Safe to use from several threads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import structlog

from sealring.mesh.clock import Clock, monotonic_clock, wall_clock
from sealring.mesh.crypto.encoding import pack_fields
from sealring.node.stored import codec, policy
from sealring.node.stored.keys import SEED, expand, mac
from sealring.node.stored.places import Place
from sealring.node.stored.policy import Entry, WriteBudget

log = structlog.get_logger()

RETRY_SECONDS = 600.0
"""How long nothing is written after an error of the disk."""

LOOK_SECONDS = 60.0
"""How old the knowledge of other engines' files may be when something is written."""

FIRST_SECONDS = 0.5
"""How long the first prompts of a store wait until its folder is read. That takes some ms, or a slow disk."""

_SPARE = 64
"""This part of the bound is freed beyond what is needed."""

_SUFFIX = ".block"
TABLE_SUFFIX = ".layers"
"""Tables beside the stages' folders (`node.stored.parts`), which count and stay, end with it."""
_ABANDONED_SECONDS = 3600.0
"""Age of a file that is still being written, and never will be whole."""

_UNCACHED: int | None = getattr(fcntl, "F_NOCACHE", None)
"""On a Mac: what is read once in hours does not push others out of memory."""


@dataclass(frozen=True)
class StoreFigures:
    """Bytes and blocks of all that the node stores. Damaged blocks are of this process.
    `oldest` is when the block was last used that waits longest, as of the last look at the folder, seconds of
    the wall clock."""

    bytes: int = 0
    blocks: int = 0
    damaged: int = 0
    oldest: float = 0.0
    writes: bool = True


class Store:
    """Blocks of one stage. `key` is that of the stage and of the layout of its caches."""

    def __init__(
        self,
        root: Path,
        model: Path,
        key: bytes,
        setting: int | None = None,
        clock: Clock = wall_clock,
        steady: Clock = monotonic_clock,
    ) -> None:
        """`setting` bounds the bytes below `root`; None leaves that to the free disk. `model` is the model's
        folder in it. Nothing is known to be there before `look`."""
        self._root = root
        self.key = key
        self._names_key = expand(key, b"sealring/v1 names of blocks")
        self._folder = model / mac(self._names_key, b"folder").hex()[:16]
        self._setting = setting
        self._seed = model / SEED
        self._seed_mark = _mark(self._seed)
        self._clock, self._steady = clock, steady
        self._budget = WriteBudget(steady)
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._held = 0  # their bytes
        self._oldest = 0.0
        self._damaged = 0
        self._off_until = 0.0
        self._destroyed = False
        self._warned: set[str] = set()
        self._looked = -LOOK_SECONDS
        self._known = threading.Event()
        self._patient_until = steady() + FIRST_SECONDS

    # What is there

    def held(self, scope: bytes, places: Sequence[Place]) -> int:
        """How many of the places, from the first on, are stored as far as is known. May wait until that is
        known for the first time."""
        self._known.wait(max(0.0, self._patient_until - self._steady()))
        for count, place in enumerate(places):
            path = self._path(scope, place)
            with self._lock:
                if path not in self._entries:
                    return count
        return len(places)

    def exists(self, scope: bytes, place: Place) -> bool:
        """Whether a block's file is there, by any process."""
        return os.path.exists(self._path(scope, place))

    def figures(self) -> StoreFigures:
        with self._lock:
            return StoreFigures(
                bytes=self._held,
                blocks=len(self._entries),
                damaged=self._damaged,
                oldest=self._oldest,
                writes=self._steady() >= self._off_until,
            )

    # Reading

    def read(self, scope: bytes, place: Place, size: int) -> memoryview | None:
        """The content of a block, `size` bytes; None for a miss."""
        path = self._path(scope, place)
        try:
            file = _read(path, codec.file_size(size))
        except FileNotFoundError:
            self._forget([path])
            return None
        except OSError as error:
            self._warn("reading", error)
            return None
        content = codec.opened(self._key_of(scope), place, file, size)
        if content is None:
            log.warning("stored_prefix_damaged", bytes=len(file))
            with self._lock:
                self._damaged += 1
            self._remove([path])
            return None
        return content

    def used(self, scope: bytes, places: Sequence[Place]) -> None:
        """Counts a use of each of these blocks."""
        for place in places:
            path = self._path(scope, place)
            with self._lock:
                entry = self._entries.get(path)
                if entry is None:
                    continue
                uses = min(entry.uses + 1, (1 << 32) - 1)
                self._entries[path] = entry._replace(uses=uses, used=self._clock())
            with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), uses.to_bytes(4, "big"), codec.USES_AT)  # and the time, with it

    # Writing

    def wants(self, scope: bytes, place: Place) -> bool:
        """Whether a block is to be written: it is not stored, and the disk takes writes."""
        if self._destroyed or self._steady() < self._off_until:
            return False
        path = self._path(scope, place)
        with self._lock:
            return path not in self._entries

    def write(self, scope: bytes, place: Place, content: memoryview) -> bool:
        """Stores a block; False where there is no room for it, or the disk fails."""
        size = codec.file_size(len(content))
        if self._steady() < self._off_until:
            return False
        if _mark(self._seed) != self._seed_mark:
            self._destroyed = True  # what the key comes from was: nobody could read it
            return False
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._steady() - self._looked >= LOOK_SECONDS:
                self.look()
            if not self._make_room(size) or not self._budget.take(size):
                return False
            path = self._path(scope, place)
            _write(path, codec.sealed(self._key_of(scope), place, content))
        except FileNotFoundError:
            return False  # the folder was removed meanwhile
        except OSError as error:
            self._off_until = self._steady() + RETRY_SECONDS
            self._warn("writing", error)
            return False
        with self._lock:
            before = self._entries.get(path)
            self._entries[path] = Entry(size, place.first, place.end, 0, self._clock())
            self._held += size - (before.size if before is not None else 0)
        return True

    def unused(self, scope: bytes, place: Place) -> bool:
        """Whether a block is stored that was never used, as far as is known."""
        with self._lock:
            entry = self._entries.get(self._path(scope, place))
        return entry is not None and not entry.uses

    def remove(self, scope: bytes, places: Sequence[Place]) -> None:
        """Removes blocks."""
        self._remove([self._path(scope, place) for place in places])

    def _make_room(self, size: int) -> bool:
        """Removes what is worth least; False where even that is not enough. Raises OSError for a disk that
        others have filled."""
        free, freed = shutil.disk_usage(self._root).free, 0
        with self._lock:
            held = self._held
        bound = policy.bound(self._setting, held, free)
        excess = held + size - bound
        gone: list[str] = []
        if excess > 0:  # and some more, for it takes a look at every block
            with self._lock:
                entries = dict(self._entries)  # the compute thread takes this lock, too
            gone = policy.victims(entries, excess + bound // _SPARE, self._clock())
            freed = sum(entries[name].size for name in gone)
        if size > bound:
            return False
        if free + freed - size < policy.LEAST_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._remove(gone)
        return True

    # The folder

    def look(self) -> None:
        """Counts what is there, of all engines. As slow as the disk is."""
        self._looked = self._steady()
        found: dict[str, Entry] = {}
        tables = 0
        try:
            for path in _blocks(self._root):
                entry = _entry(path)
                if entry is not None:
                    found[path] = entry
        except OSError as error:
            self._warn("reading", error)
        with contextlib.suppress(OSError):  # one may go meanwhile
            tables = sum(path.stat().st_size for path in self._root.glob(f"*/*{TABLE_SUFFIX}"))
        old = policy.victims(found, 0, self._clock())
        with self._lock:
            self._entries = found
            self._held = policy.total(found.values()) + tables
            self._oldest = min((entry.used for entry in found.values()), default=0.0)
        self._known.set()
        self._remove(old)

    def _remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._forget(paths)

    def _forget(self, paths: Sequence[str]) -> None:
        with self._lock:
            for path in paths:
                entry = self._entries.pop(path, None)
                self._held -= entry.size if entry is not None else 0

    def _path(self, scope: bytes, place: Place) -> str:
        numbers = (place.first, place.end)
        name = mac(self._names_key, scope, place.name, *(each.to_bytes(8, "big") for each in numbers))
        return f"{self._folder}/{name[:16].hex()}{_SUFFIX}"

    def _key_of(self, scope: bytes) -> bytes:
        return _scope_key(self.key, scope)

    def _warn(self, doing: str, error: OSError) -> None:
        """One warning for each kind of trouble: a disk that fails once fails often."""
        if doing not in self._warned:
            self._warned.add(doing)
            log.warning("prefix_disk_failed", doing=doing, folder=str(self._root), why=error.strerror)


@lru_cache(maxsize=64)
def _scope_key(key: bytes, scope: bytes) -> bytes:
    return expand(key, pack_fields(b"sealring/v1 blocks of a scope", scope))


@dataclass(frozen=True)
class Stored:
    """What a model's folder holds, for people: bytes, blocks, and when one was last used."""

    folder: str
    bytes: int
    blocks: int
    used: float


def listed(root: Path) -> list[Stored]:
    """What is stored below a root, by model. Raises OSError."""
    models: dict[str, list[Entry]] = {}
    for path in _blocks(root):
        entry = _entry(path)
        if entry is not None:
            models.setdefault(Path(path).parents[1].name, []).append(entry)
    return [
        Stored(name, policy.total(entries), len(entries), max(entry.used for entry in entries))
        for name, entries in sorted(models.items())
    ]


def _blocks(root: Path) -> Iterator[str]:
    """Paths of all blocks: two folders below the root. Raises OSError."""
    for model in _folders(str(root)):
        for stage in _folders(model):
            with contextlib.suppress(FileNotFoundError), os.scandir(stage) as files:
                for file in files:
                    if file.name.endswith(_SUFFIX):
                        yield file.path
                    else:
                        _remove_abandoned(file)


def _remove_abandoned(file: os.DirEntry[str]) -> None:
    """Another engine may be writing the file, or be done with it by now."""
    with contextlib.suppress(OSError):
        if time.time() - file.stat(follow_symlinks=False).st_mtime > _ABANDONED_SECONDS:
            os.unlink(file.path)


def _mark(path: Path) -> tuple[int, int] | None:
    """A mark that another file of this name does not have; None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _folders(path: str) -> list[str]:
    try:
        with os.scandir(path) as found:
            return [each.path for each in found if each.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _entry(path: str) -> Entry | None:
    """The entry of a file by its head; a file that is no block is removed and gives None."""
    try:
        with open(path, "rb", buffering=0) as file:
            head = codec.BlockHead.parse(file.read(codec.HEAD_BYTES))
            status = os.fstat(file.fileno())
    except OSError:
        return None
    if head is None:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    first, end, uses = head
    return Entry(status.st_size, first, end, uses, status.st_mtime)


def _read(path: str, size: int) -> memoryview:
    """A file of at most `size` bytes; more are left out, and no block ends there. Raises OSError."""
    data = codec.buffer(size + 1)
    with open(path, "rb", buffering=0) as file:
        _uncached(file.fileno())
        got = 0
        while got < len(data) and (part := file.readinto(data[got : got + (4 << 20)])):
            got += part
    return data[:got]


def _write(path: str, pieces: Iterator[bytes]) -> None:
    """Replaces a file. Not synced: what a loss of power leaves half written does not open. Raises OSError."""
    temporary = f"{path}.{secrets.token_hex(4)}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb", buffering=1 << 20) as file:
            _uncached(file.fileno())
            file.writelines(pieces)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _uncached(descriptor: int) -> None:
    if _UNCACHED is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, _UNCACHED, 1)
