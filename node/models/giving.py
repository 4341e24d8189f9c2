"""The Models service: passes a folder's manifest, and its files part by part, to other members.

A caller names a model, never a path, and reads files by their number in the manifest, only while the roster
names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from sealring.mesh.errors import (
    InvalidInput,
    ModelError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SealringError,
    Unavailable,
)
from sealring.mesh.pki.certificates import Role
from sealring.mesh.roster.model import Roster
from sealring.mesh.rpc.limits import Buckets
from sealring.mesh.rpc.tls import peer_identity
from sealring.node.models.folders import FolderState, local_model, not_found
from sealring.node.models.kept import Note, Parts, commit_of, every_part, hub_files_of, note_of, to_message
from sealring.node.models.manifest import PART, Manifest, ModelFile, hash_part, open_inside
from sealring.v1 import models_pb2, models_pb2_grpc

MAX_PIECE = 4 << 20
"""Bytes. Each piece wakes both ends: at 1 MiB that takes a tenth of all CPU time."""

LEAST_PIECE = 1 << 20
"""Least bytes of a piece before the last one of its part: the release before sends pieces of this size."""

_TAG = 1 << 3 | 2
_MORE = 0x80
_MAX_VARINT = 4


def encode(data: bytes) -> bytes:
    """A `ModelPiece` with this data."""
    head, left = bytearray((_TAG,)), len(data)
    while left >= _MORE:
        head.append(left & _MORE - 1 | _MORE)
        left >>= 7
    head.append(left)
    return b"".join((head, data))


def decode(message: bytes) -> memoryview:
    """The data of a `ModelPiece`. Raises ModelError (BAD_MODEL_PIECE)."""
    length = shift = 0
    for at in range(1, min(len(message), 1 + _MAX_VARINT)):
        length |= (message[at] & _MORE - 1) << shift
        shift += 7
        if message[at] < _MORE:
            break
    else:
        raise _bad()
    data = memoryview(message)[at + 1 :]
    if message[0] != _TAG or length != len(data) or not 1 <= length <= MAX_PIECE:
        raise _bad()
    return data


def _bad() -> ModelError:
    return ModelError("a message is no piece of a model", reason="BAD_MODEL_PIECE")


log = structlog.get_logger()

SERVICE = models_pb2.DESCRIPTOR.services_by_name["Models"].full_name
MAX_PARTS = 128
"""Parts of one call: a stream ends after 1 GiB, so that others get a turn."""

_MAX_STREAMS = 4
_MAX_WAITING = 8
_MAX_MANIFESTS = 32
_WRITE_SECONDS = 30.0
_CALLS_PER_SECOND = 4.0
_CALLS_AT_ONCE = 32


@dataclass(frozen=True)
class Known:
    """A manifest, and the state of the folder when it was made."""

    state: FolderState
    manifest: Manifest
    have: Parts
    commit: str = ""
    hub_files: str = ""


class ModelGiver(models_pb2_grpc.ModelsServicer):
    """The Models service of one node."""

    def __init__(
        self,
        cluster: str,
        folders: Sequence[Path],
        notes: Path,
        roster: Callable[[], Roster | None],
        write: Callable[[Any, bytes], Awaitable[None]] | None = None,
    ) -> None:
        """`roster` returns the valid roster in use, or None. Manifests of models that sealring did not fetch
        go to the folder `notes`."""
        self._cluster = cluster
        self._folders = folders
        self._notes = notes
        self._roster = roster
        self._write = write or write_piece
        self._known: OrderedDict[bytes, Known] = OrderedDict()
        self._making: dict[FolderState, asyncio.Task[Known]] = {}
        self._turn = asyncio.Lock()
        self._streams = Streams(_busy)
        self._calls = Buckets(_CALLS_PER_SECOND, _CALLS_AT_ONCE)
        self._stop = threading.Event()

    async def stop(self) -> None:
        """Ends the reading of folders."""
        self._stop.set()
        if self._making:
            await asyncio.wait(self._making.values())

    async def Describe(  # noqa: N802
        self, request: models_pb2.DescribeModelRequest, context: Any
    ) -> models_pb2.ModelManifest:
        """Raises PermissionDenied (NOT_A_MEMBER), NotFound (MODEL_NOT_FOUND), ResourceExhausted
        (RATE_LIMITED, MODELS_BUSY), ModelError (MODEL_FOLDER_UNUSABLE)."""
        self._calls.check(self._member(context))
        folder = None if request.model.startswith("/") else await asyncio.to_thread(self._find, request.model)
        if folder is None:
            raise not_found(request.model, "this node does not have it")
        known = await self.known(folder)
        message = to_message(known.manifest, known.have)
        message.commit, message.hub_files = known.commit, known.hub_files
        return message

    async def Read(  # type: ignore[override]  # noqa: N802 - writes to the context, named by the rpc
        self, request: models_pb2.ReadModelRequest, context: Any
    ) -> None:
        """Raises PermissionDenied (NOT_A_MEMBER), NotFound (UNKNOWN_MANIFEST), InvalidInput
        (BAD_MODEL_RANGE), ResourceExhausted (RATE_LIMITED, MODELS_BUSY), ModelError (MODEL_CHANGED),
        Unavailable (SLOW_PEER)."""
        caller = self._member(context)
        self._calls.check(caller)
        known = self._known.get(request.manifest)
        if known is None:
            raise NotFound("no such manifest", hint="ask for the model again", reason="UNKNOWN_MANIFEST")
        if request.file >= len(known.manifest.files):
            raise _bad_range()
        file, end = known.manifest.files[request.file], request.first + request.parts
        if not 1 <= request.parts <= MAX_PARTS or end > file.parts:
            raise _bad_range()
        if not known.have[request.file].issuperset(range(request.first, end)):
            raise _bad_range()
        with self.slot(caller), self._open(known, file.name) as descriptor:
            reading = _read(descriptor, file, request.first)
            try:
                for part in range(request.first, end):
                    pieces = await asyncio.shield(reading)
                    if part + 1 < end:
                        reading = _read(descriptor, file, part + 1)  # read during the sending of this one
                    for piece in pieces:
                        self._member(context)  # ends the stream of a caller that the roster no longer names
                        await self._write(context, piece)
            except EOFError:
                raise _changed(known.state.path) from None
            finally:  # the descriptor must not be closed during a read
                await asyncio.gather(reading, return_exceptions=True)

    async def manifest(self, folder: Path) -> Manifest:
        """A folder's manifest. Folders are read one at a time, and again only after a change.

        Raises NotFound (MODEL_NOT_FOUND), ResourceExhausted (MODELS_BUSY), ModelError (MODEL_CHANGED,
        MODEL_FOLDER_UNUSABLE, BAD_MODEL_NOTE).
        """
        return (await self.known(folder)).manifest

    async def known(self, folder: Path) -> Known:
        """A folder's manifest and the parts that are here. Raises as `manifest`."""
        state = await asyncio.to_thread(FolderState.read, folder)
        for known in self._known.values():
            if known.state == state:
                return known
        if state not in self._making:
            if len(self._making) >= _MAX_WAITING:
                raise _busy()
            task = asyncio.get_running_loop().create_task(self._make(state))
            self._making[state] = task
            task.add_done_callback(partial(self._made, state))
        return await asyncio.shield(self._making[state])

    async def _make(self, state: FolderState) -> Known:
        async with self._turn:
            known = await asyncio.to_thread(self._noted, state)
        self._known[known.manifest.digest] = known
        if len(self._known) > _MAX_MANIFESTS:
            self._known.popitem(last=False)
        return known

    def _noted(self, state: FolderState) -> Known:
        """The manifest from the note of an earlier process, if nothing has changed since, or from all
        files."""
        apart = self._notes / f"{hashlib.sha256(bytes(state.path.resolve())).hexdigest()}.json"
        own = note_of(state.path)
        if own is not None and not own.hashed:
            raise not_found(state.path.name, "this node has only parts of it, and no hashes of the others")
        commit = hub_files = ""
        if own is None or own.state == state:
            commit, hub_files = commit_of(state.path, own), hub_files_of(state.path, own)
        part = own if own is not None and not own.whole else None
        beside = Note.read(apart, state.path)
        if beside is not None and part is not None and not beside.is_of(part):
            beside = None  # a note of the folder's earlier content
        for note in (own, beside):
            if note is not None and note.state == state:
                return Known(state, note.manifest, note.have, commit, hub_files)
        if part is not None:  # the folder was copied, perhaps not all of it
            manifest, have = part.manifest, self._still_there(state.path, part)
        else:
            manifest = Manifest.of(state.path, self._stop)
            have = every_part(manifest)
        if FolderState.read(state.path) != state:
            raise _changed(state.path)
        note = Note(manifest, have, state)
        try:
            note.write(apart)
        except OSError as error:
            log.warning("manifest_not_noted", model=state.path.name, error=error.strerror)
        return Known(state, manifest, note.have, commit, hub_files)

    def _still_there(self, folder: Path, note: Note) -> Parts:
        """The noted parts whose hashes are right. Raises ModelError (MODEL_CHANGED)."""
        found = []
        try:
            for file, have in zip(note.manifest.files, note.have, strict=True):
                descriptor = open_inside(folder, file.name)
                try:
                    if os.fstat(descriptor).st_size != file.size:
                        raise _changed(folder)
                    hashes = {part: hash_part(descriptor, file.size, part, self._stop) for part in have}
                finally:
                    os.close(descriptor)
                found.append(frozenset(part for part, digest in hashes.items() if file.fits(part, digest)))
        except OSError:
            raise _changed(folder) from None
        return found

    def _made(self, state: FolderState, task: asyncio.Task[Known]) -> None:
        del self._making[state]
        if not task.cancelled():
            task.exception()  # marks it as read: the caller may have been cancelled

    def _find(self, name: str) -> Path | None:
        return local_model(name, self._folders)

    def _member(self, context: Any) -> str:
        return member_of(context, self._cluster, self._roster())

    def slot(self, caller: str) -> contextlib.AbstractContextManager[None]:
        """As Streams.slot."""
        return self._streams.slot(caller)

    @contextlib.contextmanager
    def _open(self, known: Known, name: str) -> Iterator[int]:
        try:
            descriptor = open_inside(known.state.path, name)
        except (OSError, SealringError):
            raise _changed(known.state.path) from None
        try:
            found = os.fstat(descriptor)
            if (name, found.st_size, found.st_mtime_ns) not in known.state.files:
                raise _changed(known.state.path)
            yield descriptor
        finally:
            os.close(descriptor)


class Streams:
    """The streams under way of a service that reads from disk for other members."""

    def __init__(self, busy: Callable[[], ResourceExhausted]) -> None:
        self._busy = busy
        self._readers: list[str] = []

    @contextlib.contextmanager
    def slot(self, caller: str) -> Iterator[None]:
        """Counts a stream within the block: a few in all, one for each caller. Raises ResourceExhausted."""
        if len(self._readers) >= _MAX_STREAMS or caller in self._readers:
            raise self._busy()
        self._readers.append(caller)
        try:
            yield
        finally:
            self._readers.remove(caller)


def member_of(context: Any, cluster: str, roster: Roster | None) -> str:
    """The caller's id. Raises PermissionDenied (NOT_A_MEMBER) unless the roster names it now."""
    caller = peer_identity(context)
    if (
        roster is None
        or (caller.cluster, caller.role) != (cluster, Role.MEMBER)
        or all(caller.id != one.id for one in roster.members)
    ):
        raise PermissionDenied("the caller is no member of this cluster", reason="NOT_A_MEMBER")
    return caller.id


def _read(descriptor: int, file: ModelFile, part: int) -> asyncio.Future[list[bytes]]:
    """The encoded pieces of a part. Raises EOFError if the file has become shorter."""

    def read() -> list[bytes]:
        first, length = part * PART, file.length(part)
        pieces = []
        for start in range(first, first + length, MAX_PIECE):
            size = min(MAX_PIECE, first + length - start)
            data = os.pread(descriptor, size, start)
            if len(data) < size:
                raise EOFError
            pieces.append(encode(data))
        return pieces

    return asyncio.get_running_loop().run_in_executor(None, read)


async def write_piece(context: Any, piece: Any) -> None:
    """Sends a piece, a message or an encoded one. Raises Unavailable (SLOW_PEER)."""
    try:
        async with asyncio.timeout(_WRITE_SECONDS):
            await context.write(piece)
    except TimeoutError:
        raise Unavailable("the caller does not read what it asked for", reason="SLOW_PEER") from None


def _busy() -> ResourceExhausted:
    return ResourceExhausted(
        "this node already passes on as many models as it may", hint="try again", reason="MODELS_BUSY"
    )


def _bad_range() -> InvalidInput:
    return InvalidInput("the manifest has no such parts", reason="BAD_MODEL_RANGE")


def _changed(folder: Path) -> ModelError:
    return ModelError(
        f"the folder {folder.name} has changed meanwhile", hint="try again", reason="MODEL_CHANGED"
    )
