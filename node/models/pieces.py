"""Encodes and decodes `ModelPiece` without the copies that protobuf makes.

The message has one field, so its encoding is that field's number and type, the length as a varint, and the
bytes (protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from sealring.mesh.errors import ModelError

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
