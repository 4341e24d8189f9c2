"""Anti-rollback memory: the newest roster that this machine has used, stored across restarts and crashes.

The file is made once, when the machine joins. A reader without it refuses all rosters: an attacker who
deletes the file must not make the machine start again from zero. A client that names no file has the memory
of its own process alone (`RosterMemory`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from sealring.mesh.crypto.encoding import (
    Fields,
    FormatError,
    canonical_json,
    field_names,
    parse_json_object,
)
from sealring.mesh.errors import ConfigError, InvalidInput, RosterError
from sealring.mesh.system.files import UNWRITABLE_HINT, create_exclusive, read_secret, write_atomic

HASH_BYTES = 32
_MAX_BYTES = 4096


@dataclass(frozen=True)
class RosterState:
    """The newest roster accepted; `version` 0 and a zero hash before the first."""

    cluster: str
    root_version: int = 0
    version: int = 0
    hash: bytes = bytes(HASH_BYTES)
    issued: int = 0


class RosterStateFile:
    """The state of one machine in one file. Every save is durable before it returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, cluster: str) -> None:
        """Make the file on joining `cluster`; a file of the same cluster is kept as it is.

        Raises RosterError (ROSTER_STATE_CLUSTER, ROSTER_STATE_CORRUPT).
        """
        if not create_exclusive(self.path, _encode(RosterState(cluster))) and self.load().cluster != cluster:
            raise RosterError(
                "roster state is of another cluster",
                reason="ROSTER_STATE_CLUSTER",
                hint="use another state folder for another cluster",
            )

    def load(self) -> RosterState:
        """The stored state. Raises RosterError (ROSTER_STATE_MISSING, ROSTER_STATE_CORRUPT)."""
        try:
            return _decode(read_secret(self.path, max_bytes=_MAX_BYTES))
        except FileNotFoundError:
            raise RosterError(
                f"roster state is missing: {self.path}",
                reason="ROSTER_STATE_MISSING",
                hint="restore it from a backup, or join again after: sealring node leave",
            ) from None
        except ConfigError as error:  # other accounts can read it, or it is a link
            raise RosterError(
                f"roster state cannot be used: {error.message}",
                reason="ROSTER_STATE_CORRUPT",
                hint=error.hint,
            ) from None
        except (FormatError, InvalidInput):
            raise RosterError(
                f"roster state is corrupt: {self.path}",
                reason="ROSTER_STATE_CORRUPT",
                hint="restore it from a backup, or join again after: sealring node leave",
            ) from None

    def save(self, state: RosterState) -> None:
        """Store `state` durably. Raises RosterError (ROSTER_STATE_UNWRITABLE)."""
        try:
            write_atomic(self.path, _encode(state))
        except OSError as error:
            raise RosterError(
                f"the roster is not used: {self.path} cannot be written: {error.strerror}",
                reason="ROSTER_STATE_UNWRITABLE",
                hint=UNWRITABLE_HINT,
            ) from error


class RosterMemory:
    """The state of one process, which never reaches the disk."""

    def __init__(self, cluster: str) -> None:
        self._state = RosterState(cluster)

    def load(self) -> RosterState:
        """The newest state of this process."""
        return self._state

    def save(self, state: RosterState) -> None:
        """Keep `state`."""
        self._state = state


def _encode(state: RosterState) -> bytes:
    return canonical_json({**vars(state), "sum": _sum(state)})


def _sum(state: RosterState) -> str:
    """A checksum, so that a flipped bit on the disk does not look like a second history."""
    return hashlib.sha256(canonical_json(state)).hexdigest()


def _decode(data: bytes) -> RosterState:
    content = parse_json_object(data, max_bytes=_MAX_BYTES)
    fields = Fields(content, (*field_names(RosterState), "sum"))
    state = RosterState(
        cluster=fields.text("cluster"),
        root_version=fields.integer("root_version"),
        version=fields.integer("version"),
        hash=fields.binary("hash", sizes=(HASH_BYTES,)),
        issued=fields.integer("issued"),
    )
    if fields.text("sum") != _sum(state):
        raise FormatError("checksum does not match")
    return state
