"""One block of a stored prefix as a file on disk: its head in clear, its content sealed.

AES-256-GCM (NIST SP 800-38D) under a key of its stage and scope, with a random nonce: a key seals far fewer
than 2^32 blocks. All that says which block it is goes into the associated data, so a block in another's place
does not open. The head has what eviction needs, and no more than a file's size and times tell: where in its
prompt the block lies, and how often it was used. That count is not authenticated.

Content passes through the cipher in pieces: Python's lock is held for each, and steps must not wait for it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from sealring.mesh.crypto.encoding import pack_fields
from sealring.node.stored.places import Place

MAGIC = b"srprefx1"
PIECE = 64 << 10
"""Bytes that pass at once: 15 us at 4 GB/s."""

_NONCE_BYTES, _TAG_BYTES = 12, 16
_HEAD = struct.Struct(">8sIII")  # magic, first token, end, uses
USES_AT = 16
"""The offset of the head's count of uses, 4 bytes, big endian."""

HEAD_BYTES = _HEAD.size
_OVERHEAD = HEAD_BYTES + _NONCE_BYTES + _TAG_BYTES


class BlockHead(tuple[int, int, int]):
    """First token, end and uses of a block, by its first HEAD_BYTES."""

    @classmethod
    def parse(cls, data: bytes) -> BlockHead | None:
        """The head of a block; None for data of any other format."""
        if len(data) != HEAD_BYTES:
            return None
        magic, first, end, uses = _HEAD.unpack(data)
        return cls((first, end, uses)) if magic == MAGIC and first < end else None


def sealed(key: bytes, place: Place, content: memoryview) -> Iterator[bytes]:
    """The file of a block, in pieces."""
    nonce = os.urandom(_NONCE_BYTES)
    cipher = Cipher(algorithms.AES(key), modes.GCM(nonce)).encryptor()
    cipher.authenticate_additional_data(_associated(place, len(content)))
    yield _HEAD.pack(MAGIC, place.first, place.end, 0) + nonce
    for start in range(0, len(content), PIECE):
        yield cipher.update(content[start : start + PIECE])
    yield cipher.finalize() + cipher.tag


def buffer(size: int) -> memoryview:
    """Memory of `size` bytes. A bytearray is filled with zeros under Python's lock: that takes some ms for
    the block of a large stage."""
    return memoryview(mmap.mmap(-1, max(1, size)))[:size]


def opened(key: bytes, place: Place, file: memoryview, size: int) -> memoryview | None:
    """The content of a block, `size` bytes; None unless this is that very block, unchanged."""
    head = BlockHead.parse(bytes(file[:HEAD_BYTES]))
    if head is None or head[:2] != (place.first, place.end) or len(file) != size + _OVERHEAD:
        return None
    nonce, tag = bytes(file[HEAD_BYTES:][:_NONCE_BYTES]), bytes(file[-_TAG_BYTES:])
    cipher = Cipher(algorithms.AES(key), modes.GCM(nonce, tag)).decryptor()
    cipher.authenticate_additional_data(_associated(place, size))
    content = buffer(size + 15)  # the cipher asks for that much room behind what it writes
    body = file[HEAD_BYTES + _NONCE_BYTES : -_TAG_BYTES]
    for start in range(0, size, PIECE):
        cipher.update_into(body[start : start + PIECE], content[start:])
    try:
        cipher.finalize()
    except InvalidTag:
        return None
    return content[:size]


def file_size(size: int) -> int:
    """Bytes of the file of a block with `size` bytes of content."""
    return size + _OVERHEAD


def _associated(place: Place, size: int) -> bytes:
    numbers = (place.first, place.end, size)
    return pack_fields(MAGIC, place.name, *(number.to_bytes(8, "big") for number in numbers))
