"""The seal of parameter records between a ring's head and its tail, past the members in between.

The key is of the epoch's session on the closing edge, whose ends are head and tail. It is for the one way
from head to tail. The nonce is the number of records before, which both ends count. The associated data is
the step's number and digest, the row, and the part of the record that every member reads.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from sealring.mesh.crypto.encoding import pack_fields
from sealring.mesh.crypto.keys import NONCE_BYTES, TAG_BYTES, Uncopyable
from sealring.mesh.errors import RecordError
from sealring.mesh.ring.composition import Chunk, ResolvedStep
from sealring.node.engine import params

if TYPE_CHECKING:
    from sealring.mesh.crypto.suites import Aead

_DOMAIN = b"sealring/v1 row parameters"
_PLACE = struct.Struct(">QQ")
_MOST = 1 << 32
"""Records of an epoch: the rows that it may begin."""


class RowSeal(Uncopyable):
    """One end of an epoch: the head, which `seals`, or the tail. Nothing crosses until it has its key."""

    def __init__(self, *, seals: bool) -> None:
        self._seals = seals
        self._aead: Aead | None = None
        self._count = 0

    def take(self, key: bytes) -> None:
        """Takes the key, a suite's code before it (`node.link.keys`), once; any thread."""
        from sealring.mesh.crypto.suites import Suite  # other engines load no cryptography

        if self._aead is None:
            self._aead = Suite.from_code(key[0]).aead(key[1:])

    def cross(self, step: ResolvedStep, chunk: Chunk, record: bytes) -> bytes:
        """Seals a row's record, or opens one; the next in either case. Both are as long.

        Raises RecordError (RECORD_REFUSED, SESSION_USED_UP, NO_ROW_KEY), InvalidInput (BAD_PARAMETERS).
        """
        from cryptography.exceptions import InvalidTag

        if self._aead is None:
            raise RecordError("parameters of a row came before their key", reason="NO_ROW_KEY")
        nonce, self._count = self._count.to_bytes(NONCE_BYTES, "big"), self._count + 1
        if self._count > _MOST:
            raise RecordError("the key for rows is used up", reason="SESSION_USED_UP")
        shared, rest = params.parts(record)
        place = _PLACE.pack(step.number, chunk.row)
        bound = pack_fields(_DOMAIN, place, step.digest, shared)
        if self._seals:
            return shared + self._aead.encrypt(nonce, rest[:-TAG_BYTES], bound)
        try:
            return shared + self._aead.decrypt(nonce, rest, bound) + bytes(TAG_BYTES)
        except InvalidTag:
            raise RecordError(
                f"the parameters of row {chunk.row} are not those that the head has sealed for the tail",
                hint="a member between them has changed them; the ring is formed anew",
            ) from None
