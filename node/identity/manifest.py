"""The software of this node as one hash: the packages that it computes with, and their files as they are.

A package's RECORD (PEP 376, PEP 627) names each of its files with a hash. The hash covers that list and every
file that differs from it. It does not cover files without a hash in RECORD (compiled bytecode), files that no
RECORD names, and the interpreter. An attacker who can change files here can change this measurement too: it
finds accidents, incomplete upgrades and careless tampering.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import platform
import stat
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from sealring.mesh.crypto.encoding import pack_fields
from sealring.node.computing import COMPUTING

MEASURED = (
    "sealring",
    *COMPUTING,
    "cryptography",
    "grpcio",
    "protobuf",
    "pynacl",
    "numpy",
    "tokenizers",
    "transformers",
)
_MAX_FILES = 50_000
_MAX_BYTES = 8 << 30
_digests: dict[str, tuple[tuple[int, ...], bytes]] = {}
"""Digests of files that this process has read, each with the stat fields that change when the file does."""


def manifest_hash() -> bytes:
    """SHA-256 over Python's version and of each measured package: version, RECORD, files that differ from it.

    Equal for equal installations. Blocks: the first call of a process reads every file (a second or two),
    later ones read those that have changed since.
    """
    return hashlib.sha256(pack_fields(platform.python_version().encode(), *_packages())).digest()


def _packages() -> Iterator[bytes]:
    """The measured packages in the interpreter's own folders; the working directory does not count."""
    installed = list(dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib")))
    for name in MEASURED:
        package = next(iter(metadata.distributions(name=name, path=installed)), None)
        if package is None:
            yield pack_fields(name.encode(), b"absent")
            continue
        record = package.read_text("RECORD") or ""
        root = Path(str(package.locate_file("")))
        yield pack_fields(
            name.encode(),
            package.version.encode(),
            hashlib.sha256(record.encode()).digest(),
            *_differing(root, record),
        )


def _differing(root: Path, record: str) -> Iterator[bytes]:
    """Each file that is not what RECORD says: its name and its hash, empty if it is unreadable."""
    left = _MAX_BYTES
    for number, row in enumerate(csv.reader(record.splitlines())):
        if len(row) != 3 or number >= _MAX_FILES:
            yield pack_fields(b"malformed", str(number).encode())
            return
        name, stated, _ = row
        if not stated:
            continue
        digest, size = _digest(root / name, left)
        left -= size
        if stated != f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}":
            yield pack_fields(name.encode(), digest)


def _digest(file: Path, limit: int) -> tuple[bytes, int]:
    """SHA-256 and size of a regular file of at most `limit` bytes, else nothing."""
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            return b"", 0
        state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        known = _digests.get(str(file))
        if known is None or known[0] != state:
            with file.open("rb") as opened:
                known = state, hashlib.file_digest(opened, "sha256").digest()
            _digests[str(file)] = known
        return known[1], found.st_size
    except (OSError, ValueError):
        return b"", 0
