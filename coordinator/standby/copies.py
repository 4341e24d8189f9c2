"""What a standby gets: the database and the certificates around it, signed by the roster keys; never a key.

The signature is over the standby's own nonce: a certificate of the authority alone, or an answer of earlier,
makes no copy.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from pathlib import Path

from sealring.coordinator.keys import CA_CERTIFICATE, OPERATOR_DIR, ROOT_METADATA, ClusterKeys
from sealring.coordinator.store import Store
from sealring.mesh.crypto.dsse import check_threshold, parse_envelope, sign_envelope
from sealring.mesh.crypto.encoding import pack_fields
from sealring.mesh.errors import InvalidInput, ResourceExhausted, Unauthenticated
from sealring.mesh.pki.root import RootMetadata
from sealring.mesh.rpc.server import MAX_MESSAGE
from sealring.v1 import admin_pb2

PAYLOAD_TYPE = "application/vnd.sealring.state-copy"
NONCE_BYTES = 32
OPERATOR_CERTIFICATE = f"{OPERATOR_DIR}/tls.pem"
_MAX_BYTES = MAX_MESSAGE - (1 << 16)


class Copies:
    """Makes them, and makes one only where something has changed."""

    def __init__(self, store: Store, keys: ClusterKeys, folder: Path) -> None:
        self._store = store
        self._keys = keys
        self._folder = folder
        self._changes = -1
        self._making = asyncio.Lock()
        self._copy = self._digest = b""

    async def answer(self, request: admin_pb2.CopyStateRequest) -> admin_pb2.CopyStateResponse:
        """Raises InvalidInput (BAD_NONCE), ResourceExhausted (STATE_TOO_LARGE)."""
        if len(request.nonce) != NONCE_BYTES:
            raise InvalidInput("a nonce has 32 bytes", reason="BAD_NONCE")
        async with self._making:
            await self._renew()
        content = signed_content(self._keys.root.cluster, request.nonce, self._digest)
        return admin_pb2.CopyStateResponse(
            copy=b"" if request.known == self._digest else self._copy,
            signature=sign_envelope(PAYLOAD_TYPE, content, self._keys.rosters),
        )

    async def _renew(self) -> None:
        """Makes the copy anew if something has changed, in a thread: heartbeats do not wait for it."""
        changes = self._store.changes
        if self._changes != changes:
            self._copy, self._digest = await asyncio.to_thread(self._made)
            self._changes = changes

    def _made(self) -> tuple[bytes, bytes]:
        """The packed copy, and its hash before that. Raises ResourceExhausted (STATE_TOO_LARGE)."""
        files = (ROOT_METADATA, CA_CERTIFICATE, OPERATOR_CERTIFICATE)
        root, authority, operator = ((self._folder / name).read_bytes() for name in files)
        copy = admin_pb2.StateCopy(
            database=self._store.image(),
            root_metadata=root,
            authority=authority,
            operator_certificate=operator,
        ).SerializeToString()
        packed = zlib.compress(copy, 1)
        if len(packed) > _MAX_BYTES:
            raise ResourceExhausted(
                f"the coordinator's state has {len(packed)} bytes, and a standby takes {_MAX_BYTES}",
                hint="make backups instead, and restore the newest",
                reason="STATE_TOO_LARGE",
            )
        return packed, hashlib.sha256(copy).digest()


def unpacked(
    response: admin_pb2.CopyStateResponse, nonce: bytes, known: bytes, root: RootMetadata
) -> tuple[bytes, admin_pb2.StateCopy | None]:
    """The copy in an answer and its hash, which is `known` where there is nothing new.

    Raises Unauthenticated (BAD_COPY), RosterError (THRESHOLD_NOT_MET, ENVELOPE_*).
    """
    digest, copy = known, None
    if response.copy:
        stream = zlib.decompressobj()
        try:
            data = stream.decompress(response.copy, _MAX_UNPACKED)
        except zlib.error:
            raise _bad_copy() from None
        if not stream.eof:
            raise _bad_copy()
        digest, copy = hashlib.sha256(data).digest(), admin_pb2.StateCopy.FromString(data)
    opened = parse_envelope(response.signature, payload_type=PAYLOAD_TYPE, max_payload=1024)
    check_threshold(opened, root.roster_keys, root.roster_threshold)
    if opened.payload != signed_content(root.cluster, nonce, digest):
        raise _bad_copy()
    return digest, copy


def signed_content(cluster: str, nonce: bytes, digest: bytes) -> bytes:
    """What the roster keys sign."""
    return pack_fields(cluster.encode(), nonce, digest)


_MAX_UNPACKED = 1 << 28


def _bad_copy() -> Unauthenticated:
    return Unauthenticated(
        "what came is not the coordinator's state",
        hint="check the address in the operator bundle of this folder",
        reason="BAD_COPY",
    )
