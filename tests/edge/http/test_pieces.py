"""How much of a connection a turn of the event loop takes, with and without TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
from edgecert import write_edge_certificate

from sealring.edge.access.edge_tls import EdgeTls
from sealring.edge.http.pieces import TURN_BYTES, InPieces
from sealring.edge.http.protocol import EdgeProtocol
from sealring.edge.http.websocket import WebSocketProtocol


class Noting(InPieces):
    """Notes what it gets, and in which turn."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.turns = [0]
        self.most = 0
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        if not self.turns[-1]:
            asyncio.get_running_loop().call_soon(self.turns.append, 0)
        self.turns[-1] += len(data)
        self.most = max(self.most, len(data))
        self.got += data

    def eof_received(self) -> None:
        self.ended.set()


@pytest.mark.parametrize("secret", [False, True])
async def test_a_piece_has_so_many_bytes_and_none_is_lost(tmp_path: Path, secret: bool) -> None:
    noting, sent = Noting(), bytes(range(256)) * 4000
    certificate, key = write_edge_certificate(tmp_path)
    tls: Any = {"ssl": EdgeTls(certificate, key).context} if secret else {}
    loop = asyncio.get_running_loop()
    async with (
        asyncio.timeout(200),
        await loop.create_server(lambda: noting, "127.0.0.1", 0, **tls) as server,
    ):
        if secret:
            context = ssl.create_default_context(cafile=str(certificate))
            tls = {"ssl": context, "server_hostname": "localhost"}
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port, **tls)
        writer.write(sent)
        await writer.drain()
        writer.close()
        await noting.ended.wait()
    assert bytes(noting.got) == sent
    assert noting.most == TURN_BYTES
    if not secret:  # with TLS asyncio takes a few pieces in a turn, each in a callback of its own
        assert max(noting.turns) == TURN_BYTES


def test_both_protocols_of_the_edge_take_pieces() -> None:
    assert issubclass(EdgeProtocol, InPieces)
    assert issubclass(WebSocketProtocol, InPieces)
