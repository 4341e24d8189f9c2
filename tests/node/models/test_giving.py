"""Pieces of models are what protobuf makes of them."""

from __future__ import annotations

import pytest

from sealring.mesh.errors import ModelError
from sealring.node.models.giving import MAX_PIECE, decode, encode
from sealring.v1 import models_pb2


@pytest.mark.parametrize("size", [1, 127, 128, 16383, 16384, MAX_PIECE - 1, MAX_PIECE])
def test_a_piece_is_protobufs(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    message = models_pb2.ModelPiece(data=data).SerializeToString()
    assert encode(data) == message
    assert decode(message) == data


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x0a",
        b"\x0a\x00",
        b"\x0a\x02a",
        b"\x0a\x01ab",
        b"\x12\x01a",
        b"\x0a\x80\x80\x80\x80\x01a",
        b"\x0a" + b"\xff" * 9,
        encode(b"a") + encode(b"b"),
        models_pb2.ModelPiece(data=bytes(MAX_PIECE + 1)).SerializeToString(),
    ],
)
def test_what_is_no_piece_is_refused(message: bytes) -> None:
    with pytest.raises(ModelError) as raised:
        decode(message)
    assert raised.value.reason == "BAD_MODEL_PIECE"
