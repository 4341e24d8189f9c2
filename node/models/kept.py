"""What is noted beside a model's files: its manifest, and which parts of it are here.

A folder may hold only the parts that one stage needs: each file then has its whole length and the rest of it
is a hole. The note says so, and whoever loads weights asks it first (`node/engine/ranges.py`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sealring.mesh.errors import ModelError
from sealring.mesh.names import is_commit, is_sha256
from sealring.mesh.system.files import write_atomic
from sealring.node.models.folders import NOTE, FolderState
from sealring.node.models.manifest import PART, Manifest, ModelFile, belongs
from sealring.v1 import models_pb2

_MAX_NOTE = 64 << 20
_MAX_HEADER = 100 << 20
"""Bytes; safetensors itself takes no longer ones."""

Parts = Sequence[frozenset[int]]
"""The parts of each file of a manifest."""


def every_part(manifest: Manifest) -> Parts:
    return [frozenset(range(file.parts)) for file in manifest.files]


def to_message(manifest: Manifest, have: Parts) -> models_pb2.ModelManifest:
    """As it is sent."""
    message = manifest.message()
    for told, file, here in zip(message.files, manifest.files, have, strict=True):
        if len(here) < file.parts:
            bits = bytearray(-(-file.parts // 8))
            for part in here:
                bits[part // 8] |= 1 << part % 8
            told.have = bytes(bits)
    return message


def parts_of(message: models_pb2.ModelManifest, manifest: Manifest) -> Parts:
    """Which parts whoever sent it has. Raises ModelError (BAD_MANIFEST)."""
    have = []
    for told, file in zip(message.files, manifest.files, strict=True):
        if told.have and len(told.have) != -(-file.parts // 8):
            raise ModelError("a list of parts has another length than its file", reason="BAD_MANIFEST")
        bits = told.have
        have.append(
            frozenset(part for part in range(file.parts) if not bits or bits[part // 8] >> part % 8 & 1)
        )
    return have


@dataclass(frozen=True)
class Note:
    """`state` is the folder as it was when the note was written.

    With a `commit` its parts came from the hub as it was then. `checked` is true once all of it has come and
    the hub's hashes have confirmed it; before that the hashes of the parts that are missing are not known.
    """

    manifest: Manifest
    have: Parts
    state: FolderState
    commit: str = ""
    checked: bool = False
    hub_files: str = ""

    @property
    def hashed(self) -> bool:
        """Whether the hash of every part is known: a member told them, or the hub has confirmed all of it."""
        return self.checked or not self.commit

    @property
    def is_part(self) -> bool:
        """Whether something is missing, or nothing has confirmed yet what came from the hub."""
        return not self.whole or not self.hashed

    @property
    def whole(self) -> bool:
        return all(len(here) == file.parts for file, here in zip(self.manifest.files, self.have, strict=True))

    @property
    def done(self) -> int:
        """Bytes that are here."""
        return length_of(self.manifest.files, self.have)

    def holds(self, ranges: Iterable[tuple[str, int, int]]) -> bool:
        """Whether these bytes [first, end) of files are here."""
        here = {file.name: have for file, have in zip(self.manifest.files, self.have, strict=True)}
        return all(
            name in here and here[name].issuperset(parts_between(first, end)) for name, first, end in ranges
        )

    def agrees(self, manifest: Manifest) -> bool:
        """Whether the files are the same, as far as the parts go that are here."""
        pairs = list(zip(self.manifest.files, manifest.files, strict=False))
        return [(one.name, one.size) for one in self.manifest.files] == [
            (one.name, one.size) for one in manifest.files
        ] and all(
            own.hash_of(part) == other.hash_of(part)
            for (own, other), here in zip(pairs, self.have, strict=True)
            for part in here
        )

    def is_of(self, other: Note) -> bool:
        """Whether it tells of parts of the same model, and of none that the other does not."""
        return self.manifest.digest == other.manifest.digest and all(
            mine <= theirs for mine, theirs in zip(self.have, other.have, strict=True)
        )

    def write(self, file: Path) -> None:
        """Durably. Raises OSError."""
        message = to_message(self.manifest, self.have)
        files = [
            {"name": one.name, "size": one.size, "parts": one.parts.hex(), "have": one.have.hex()}
            for one in message.files
        ]
        told: dict[str, object] = {
            "digest": self.manifest.digest.hex(),
            "files": files,
            "state": self.state.files,
        }
        told |= {"commit": self.commit, "checked": self.checked} if self.commit else {}
        told |= {"hub_files": self.hub_files} if self.hub_files else {}
        write_atomic(file, json.dumps(told, indent=1).encode())

    @classmethod
    def read(cls, file: Path, folder: Path) -> Note | None:
        """The note in a file about a folder; None where there is none.

        Raises ModelError (BAD_MODEL_NOTE) for one that cannot be read: what is in the folder is not known.
        """
        try:
            if file.stat().st_size > _MAX_NOTE:
                raise ValueError
            told = json.loads(file.read_bytes())
            message = models_pb2.ModelManifest(
                files=[
                    models_pb2.ModelFile(
                        name=one["name"],
                        size=one["size"],
                        parts=bytes.fromhex(one["parts"]),
                        have=bytes.fromhex(one["have"]),
                    )
                    for one in told["files"]
                ]
            )
            manifest = Manifest.from_message(message)
            if manifest.digest.hex() != told["digest"]:
                raise ValueError
            state = FolderState(folder, tuple((name, size, time) for name, size, time in told["state"]))
            commit, checked = told.get("commit", ""), told.get("checked", False)
            if (commit and not is_commit(commit)) or not isinstance(checked, bool):
                raise ValueError
            hub_files = told.get("hub_files", "")
            if hub_files and not is_sha256(hub_files):
                raise ValueError
            return cls(manifest, parts_of(message, manifest), state, commit, checked, hub_files)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ModelError):
            raise ModelError(
                f"the note {file.name} beside the model {folder.name} is unusable",
                hint="remove the model and fetch it again",
                reason="BAD_MODEL_NOTE",
            ) from None


def note_of(folder: Path) -> Note | None:
    """What a folder says of itself. Raises ModelError (BAD_MODEL_NOTE)."""
    return Note.read(folder / NOTE, folder)


def commit_of(folder: Path, note: Note | None) -> str:
    """The hub's commit that a folder is of, by its note or its path in the Hugging Face cache; empty where it
    is not known. Files of two commits may differ in nothing but the values of weights, which no digest of a
    model covers."""
    if note is not None:
        return note.commit
    return folder.name if folder.parent.name == "snapshots" and is_commit(folder.name) else ""


def hash_of_files(files: Iterable[tuple[str, int, str]]) -> str:
    """SHA-256 in hex over names, sizes and the hub's hashes (SHA-256, or of small files the git blob's) of a
    model's files: what two commits have in common that differ in nothing that belongs to a model."""
    return hashlib.sha256(json.dumps(sorted(files)).encode()).hexdigest()


def hub_files_of(folder: Path, note: Note | None) -> str:
    """`hash_of_files` of a folder by its note, or in the Hugging Face cache by the blobs that its links name,
    which are called by those hashes; empty where it is not known."""
    if note is not None or not commit_of(folder, None):
        return note.hub_files if note is not None else ""
    try:
        links = [entry for entry in os.scandir(folder) if belongs(entry.name)]
        return hash_of_files(
            (one.name, one.stat().st_size, Path(os.readlink(one.path)).name) for one in links
        )
    except OSError:  # a copy of a snapshot has no links
        return ""


def check_commit(name: str, here: str, commit: str) -> None:
    """Raises ModelError (OTHER_MODEL_VERSION) where what is here is of another commit than is asked for."""
    if here and commit and here != commit:
        raise ModelError(
            f"what is here of {name} is of the hub's commit {here[:8]}, and {commit[:8]} is deployed",
            hint="remove it here, and this node fetches the other: sealring model remove, or by hand from "
            "the Hugging Face cache",
            reason="OTHER_MODEL_VERSION",
        )


def is_part(folder: Path) -> bool:
    """Whether a folder holds only parts of its model, or nothing has confirmed it yet.

    Raises ModelError (BAD_MODEL_NOTE)."""
    note = note_of(folder)
    return note is not None and note.is_part


def beginnings(manifest: Manifest) -> Parts:
    """What is not weights, and the first part of what is."""
    return [
        frozenset(range(min(1, file.parts) if file.is_weights else file.parts)) for file in manifest.files
    ]


def headers(manifest: Manifest, wanted: Parts, folder: Path) -> Parts:
    """With all parts that the header of a weight file reaches into: its first 8 bytes say how long it is.

    `folder` has the first parts. Raises ModelError (WEIGHTS_CORRUPT), OSError.
    """
    more = []
    for file, parts in zip(manifest.files, wanted, strict=True):
        if file.is_weights:
            with (folder / file.name).open("rb") as stream:
                end = 8 + int.from_bytes(stream.read(8), "little")
            if end > _MAX_HEADER:
                raise ModelError(
                    f"the header of {file.name} is too long",
                    hint="fetch the model by other means",
                    reason="WEIGHTS_CORRUPT",
                )
            parts |= frozenset(parts_between(0, min(file.size, end)))
        more.append(parts)
    return more


def parts_between(first: int, end: int) -> range:
    """The parts that the bytes [first, end) of a file lie in."""
    return range(first // PART, -(-end // PART))


def with_ranges(manifest: Manifest, wanted: Parts, ranges: Iterable[tuple[str, int, int]]) -> Parts:
    """With the parts that these bytes [first, end) of files lie in."""
    more = {file.name: set(parts) for file, parts in zip(manifest.files, wanted, strict=True)}
    for name, first, end in ranges:
        more[name].update(parts_between(first, end))
    return [frozenset(more[file.name]) for file in manifest.files]


def length_of(files: Sequence[ModelFile], parts: Parts) -> int:
    """Bytes of these parts."""
    return sum(file.length(part) for file, here in zip(files, parts, strict=True) for part in here)


def runs(parts: Iterable[int]) -> list[range]:
    """Parts as ranges of consecutive ones."""
    found: list[range] = []
    for part in sorted(parts):
        if found and found[-1].stop == part:
            found[-1] = range(found[-1].start, part + 1)
        else:
            found.append(range(part, part + 1))
    return found


def is_hole(descriptor: int, start: int, end: int) -> bool:
    """Whether nothing was ever written between two places of a file, so that it need not be hashed."""
    try:
        return os.lseek(descriptor, start, os.SEEK_DATA) >= end
    except OSError as error:  # ENXIO: only holes up to the end; disks without holes refuse otherwise
        return error.errno == errno.ENXIO
