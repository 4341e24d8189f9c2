"""The note beside a model's files: its manifest, and the parts that are here.

A folder may hold only the parts of one stage: each file then has its whole length, with holes. The loader of
weights reads the note first (`node/engine/ranges.py`).
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
from sealring.node.models.folders import NOTE, FolderState, files_in
from sealring.node.models.json_files import parse_json
from sealring.node.models.manifest import PART, Manifest, ModelFile, belongs
from sealring.v1 import models_pb2

_MAX_NOTE = 64 << 20
_MAX_NOTE_VALUES = 1 << 17
_MAX_HEADER = 100 << 20
"""Bytes. safetensors itself accepts no longer headers."""

Parts = Sequence[frozenset[int]]
"""The parts of each file of a manifest."""


def every_part(manifest: Manifest) -> Parts:
    return [frozenset(range(file.parts)) for file in manifest.files]


def to_message(manifest: Manifest, have: Parts) -> models_pb2.ModelManifest:
    """The manifest and the parts that are here as a message."""
    message = manifest.message()
    for sent, file, here in zip(message.files, manifest.files, have, strict=True):
        if len(here) < file.parts:
            bits = bytearray(-(-file.parts // 8))
            for part in here:
                bits[part // 8] |= 1 << part % 8
            sent.have = bytes(bits)
    return message


def parts_of(message: models_pb2.ModelManifest, manifest: Manifest) -> Parts:
    """The parts that the sender has. Raises ModelError (BAD_MANIFEST)."""
    have = []
    for sent, file in zip(message.files, manifest.files, strict=True):
        if sent.have and len(sent.have) != -(-file.parts // 8):
            raise ModelError("a list of parts has another length than its file", reason="BAD_MANIFEST")
        bits = sent.have
        have.append(
            frozenset(part for part in range(file.parts) if not bits or bits[part // 8] >> part % 8 & 1)
        )
    return have


@dataclass(frozen=True)
class Note:
    """A manifest, the parts that are here, and the folder's `state` when the note was written.

    With a `commit` the parts came from the hub at that commit. `checked` is set once all parts are here and
    the hub's hashes confirm them; before that the hashes of missing parts are unknown.
    """

    manifest: Manifest
    have: Parts
    state: FolderState
    commit: str = ""
    checked: bool = False
    hub_files: str = ""

    @property
    def hashed(self) -> bool:
        """Whether all hashes are known: from a member, or confirmed by the hub's hashes."""
        return self.checked or not self.commit

    @property
    def is_part(self) -> bool:
        """Whether parts are missing, or parts from the hub are not confirmed yet."""
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
        """Whether the files are the same in all parts that are here."""
        pairs = list(zip(self.manifest.files, manifest.files, strict=False))
        return [(one.name, one.size) for one in self.manifest.files] == [
            (one.name, one.size) for one in manifest.files
        ] and all(
            own.hash_of(part) == other.hash_of(part)
            for (own, other), here in zip(pairs, self.have, strict=True)
            for part in here
        )

    def is_of(self, other: Note) -> bool:
        """Whether it notes parts of the same model, and only parts that `other` notes too."""
        return self.manifest.digest == other.manifest.digest and all(
            mine <= theirs for mine, theirs in zip(self.have, other.have, strict=True)
        )

    def write(self, file: Path) -> None:
        """Writes the note durably. Raises OSError."""
        message = to_message(self.manifest, self.have)
        files = [
            {"name": one.name, "size": one.size, "parts": one.parts.hex(), "have": one.have.hex()}
            for one in message.files
        ]
        content: dict[str, object] = {
            "digest": self.manifest.digest.hex(),
            "files": files,
            "state": self.state.files,
        }
        content |= {"commit": self.commit, "checked": self.checked} if self.commit else {}
        content |= {"hub_files": self.hub_files} if self.hub_files else {}
        write_atomic(file, json.dumps(content, indent=1).encode())

    @classmethod
    def read(cls, file: Path, folder: Path) -> Note | None:
        """The note of a folder in `file`; None without such a file.

        Raises ModelError (BAD_MODEL_NOTE) if it cannot be read: the parts in the folder are unknown then.
        """
        try:
            if file.stat().st_size > _MAX_NOTE:
                raise ValueError
            content = parse_json(file.read_bytes(), _MAX_NOTE_VALUES)
            message = models_pb2.ModelManifest(
                files=[
                    models_pb2.ModelFile(
                        name=one["name"],
                        size=one["size"],
                        parts=bytes.fromhex(one["parts"]),
                        have=bytes.fromhex(one["have"]),
                    )
                    for one in content["files"]
                ]
            )
            manifest = Manifest.from_message(message)
            if manifest.digest.hex() != content["digest"]:
                raise ValueError
            state = FolderState(folder, tuple((name, size, time) for name, size, time in content["state"]))
            commit, checked = content.get("commit", ""), content.get("checked", False)
            if (commit and not is_commit(commit)) or not isinstance(checked, bool):
                raise ValueError
            hub_files = content.get("hub_files", "")
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
    """The note in a folder. Raises ModelError (BAD_MODEL_NOTE)."""
    return Note.read(folder / NOTE, folder)


def commit_of(folder: Path, note: Note | None) -> str:
    """The hub's commit of a folder, from its note or its path in the Hugging Face cache; empty if unknown.

    Two commits may differ only in the values of weights, which no digest of a model covers.
    """
    if note is not None:
        return note.commit
    return folder.name if folder.parent.name == "snapshots" and is_commit(folder.name) else ""


def hash_of_files(files: Iterable[tuple[str, int, str]]) -> str:
    """SHA-256 in hex over names, sizes and the hub's hashes of a model's files. Commits of the same model
    have the same value. The hub's hash is SHA-256; that of a small file is its git blob's.
    """
    return hashlib.sha256(json.dumps(sorted(files)).encode()).hexdigest()


def hub_files_of(folder: Path, note: Note | None) -> str:
    """`hash_of_files` of a folder, from its note or, in the Hugging Face cache, from the names of its blobs;
    empty if unknown."""
    if note is not None or not commit_of(folder, None):
        return note.hub_files if note is not None else ""
    try:
        links = [(name, one) for name, one in files_in(folder) if belongs(name)]
        return hash_of_files(
            (name, one.stat().st_size, Path(os.readlink(one.path)).name) for name, one in links
        )
    except OSError:  # a copy of a snapshot has no links
        return ""


def check_commit(name: str, here: str, commit: str) -> None:
    """Raises ModelError (OTHER_MODEL_VERSION) if both commits are known and differ."""
    if here and commit and here != commit:
        raise ModelError(
            f"the files of {name} here are of the hub's commit {here[:8]}, and {commit[:8]} is deployed",
            hint="remove it here, and this node fetches the other: sealring model remove, or by hand from "
            "the Hugging Face cache",
            reason="OTHER_MODEL_VERSION",
        )


def is_part(folder: Path) -> bool:
    """Whether a folder holds only some parts, or unconfirmed ones. Raises ModelError (BAD_MODEL_NOTE)."""
    note = note_of(folder)
    return note is not None and note.is_part


def beginnings(manifest: Manifest) -> Parts:
    """All parts of files other than weights, and the first part of each file of weights."""
    return [
        frozenset(range(min(1, file.parts) if file.is_weights else file.parts)) for file in manifest.files
    ]


def headers(manifest: Manifest, wanted: Parts, folder: Path) -> Parts:
    """`wanted` with all parts of the headers of weight files, whose first 8 bytes are the length.

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
    """The parts of the bytes [first, end) of a file."""
    return range(first // PART, -(-end // PART))


def with_ranges(manifest: Manifest, wanted: Parts, ranges: Iterable[tuple[str, int, int]]) -> Parts:
    """`wanted` with the parts of these bytes [first, end) of files."""
    more = {file.name: set(parts) for file, parts in zip(manifest.files, wanted, strict=True)}
    for name, first, end in ranges:
        more[name].update(parts_between(first, end))
    return [frozenset(more[file.name]) for file in manifest.files]


def length_of(files: Sequence[ModelFile], parts: Parts) -> int:
    """Bytes of these parts."""
    return sum(file.length(part) for file, here in zip(files, parts, strict=True) for part in here)


def runs(parts: Iterable[int]) -> list[range]:
    """Ranges of consecutive parts."""
    found: list[range] = []
    for part in sorted(parts):
        if found and found[-1].stop == part:
            found[-1] = range(found[-1].start, part + 1)
        else:
            found.append(range(part, part + 1))
    return found


def is_hole(descriptor: int, start: int, end: int) -> bool:
    """Whether a file has a hole from `start` to `end`, which need not be hashed."""
    try:
        return os.lseek(descriptor, start, os.SEEK_DATA) >= end
    except OSError as error:  # ENXIO: only holes up to the end; disks without holes refuse otherwise
        return error.errno == errno.ENXIO
