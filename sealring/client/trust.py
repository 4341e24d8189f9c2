"""The client's own reading of the roster: pinned root, signatures, times, and no way back to an older one."""

from __future__ import annotations

import threading
from pathlib import Path

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.crypto.encoding import FormatError, decode_base32
from sealring.mesh.errors import ConfigError, InvalidInput, RosterError
from sealring.mesh.pki.root import decode_chain, verify_root_chain
from sealring.mesh.roster.memory import RosterMemory, RosterStateFile
from sealring.mesh.roster.model import Roster
from sealring.mesh.roster.reader import RosterReader
from sealring.mesh.system.paths import default_state_root
from sealring.v1 import inference_pb2 as inference

_HASH_BYTES = 32


def parse_root_sha256(value: str | bytes) -> bytes:
    """A root fingerprint from its 32 bytes, 64 hexadecimal digits, or the 52 characters of a join token.

    Raises InvalidInput (BAD_ROOT_HASH).
    """
    try:
        if isinstance(value, bytes):
            parsed = value
        elif len(value) == 2 * _HASH_BYTES:
            parsed = bytes.fromhex(value)
        else:
            parsed = decode_base32(value, size=_HASH_BYTES)
        if len(parsed) != _HASH_BYTES:
            raise FormatError("it has another length")
    except ValueError:  # FormatError, and what is not hexadecimal
        raise InvalidInput(
            "the root hash is malformed",
            hint="give 64 hexadecimal digits, as the operator told you by a way that you trust",
            reason="BAD_ROOT_HASH",
            param="root_sha256",
        ) from None
    return parsed


def own_root_sha256(root: Path | None = None) -> bytes:
    """The hash of the root key of this machine's cluster, by what is enrolled below the state folder `root`
    (None: the user's own).

    Raises ConfigError (NO_ROOT_HASH, MEMBER_STATE_CORRUPT, SECRET_FILE_UNSAFE), RosterError (ROOT_*).
    """
    from sealring.mesh.member.state import load_machine_state

    root = root or default_state_root()
    for folder in (root / "coordinator" / "operator", root / "node", root / "gateway"):
        try:
            return load_machine_state(folder).root_sha256
        except PermissionError:
            continue
        except ConfigError as error:
            if error.reason != "NOT_ENROLLED":
                raise
    raise ConfigError(
        "this machine is in no cluster, so the root key to check the gateway against is unknown",
        hint="make one with `sealring up`, or join one with `sealring join`; for another cluster's gateway "
        "give the hash of its root key with --root-sha256: `sealring roster show` prints it there",
        reason="NO_ROOT_HASH",
    )


def default_state_file(pin: bytes) -> Path:
    """The file in which all programs of this user remember the cluster's newest roster."""
    return default_state_root() / "client" / f"{pin.hex()[:32]}.roster"


class RosterVerifier:
    """Believes rosters that the pinned root vouches for, and never one older than the newest it has seen.

    With `state_file` that memory outlives the process (RosterStateFile, made on first use); without, it is in
    memory alone and ends with this object. Safe to use from several threads; calls may wait for the disk.
    """

    def __init__(
        self, root_sha256: bytes, state_file: Path | None = None, *, clock: Clock = wall_clock
    ) -> None:
        self._pin = root_sha256
        self._clock = clock
        self._lock = threading.Lock()
        self._reader: RosterReader | None = None
        self._seen: tuple[bytes, bytes] | tuple[None, None] = (None, None)
        self._state_file = state_file

    def verify(self, response: inference.GetRosterResponse) -> Roster:
        """The verified roster of a gateway's answer.

        Raises RosterError (ROOT_*, ROSTER_*, THRESHOLD_NOT_MET, ...), FailedPrecondition (ROSTER_EXPIRED).
        """
        with self._lock:
            seen = (response.root_metadata, response.roster)
            if self._reader is not None and seen == self._seen:
                return self._reader.current
            reader = self._follow_root(response.root_metadata)
            roster = reader.accept(response.roster)
            self._seen = seen
            return roster

    def _follow_root(self, chain: bytes) -> RosterReader:
        if self._reader is not None and chain == self._seen[0]:
            return self._reader
        root = verify_root_chain(decode_chain(chain), self._pin, now=self._clock())
        if self._reader is None:
            self._reader = RosterReader(root, self._memory(root.cluster), clock=self._clock)
            return self._reader
        newer = root.version - self._reader.root.version
        if newer < 0:
            raise RosterError("root metadata is older than one used before", reason="ROOT_ROLLBACK")
        self._reader.update_root(*root.chain[len(root.chain) - newer :])
        return self._reader

    def _memory(self, cluster: str) -> Path | RosterMemory:
        if self._state_file is None:
            return RosterMemory(cluster)
        RosterStateFile(self._state_file).create(cluster)
        return self._state_file
