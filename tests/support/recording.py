"""A relay in front of an HTTP edge that keeps the bodies of requests: what programs really send."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import h11


class Relay:
    """Passes bytes on as they are. `url` is its own address."""

    def __init__(self, to: str) -> None:
        self._to = urlsplit(to)
        self._sent: list[bytearray] = []
        self._server: asyncio.Server
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()

    def keep(self, file: Path) -> list[dict[str, Any]]:
        """Writes the requests since the last call, a line each, and returns them as `requests` has them."""
        sent, self._sent = self._sent, []
        kept = [one for connection in sent for one in requests(bytes(connection))]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{json.dumps(one)}\n" for one in kept))
        return kept

    def first_lines(self) -> list[str]:
        """The first line of each connection since the last call."""
        sent, self._sent = self._sent, []
        return [bytes(one).partition(b"\r\n")[0].decode() for one in sent]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept = bytearray()
        self._sent.append(kept)
        to_reader, to_writer = await asyncio.open_connection(self._to.hostname, self._to.port)

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, seen: bytearray) -> None:
            try:
                while data := await source.read(1 << 16):
                    seen += data
                    target.write(data)
                    await target.drain()
            except ConnectionError:
                pass
            finally:
                target.close()

        await asyncio.gather(copy(reader, to_writer, kept), copy(to_reader, writer, bytearray()))


def requests(sent: bytes) -> list[dict[str, Any]]:
    """The requests with a JSON body among a connection's bytes: path, headers and body."""
    found = []
    server = h11.Connection(h11.SERVER)
    server.receive_data(sent)
    while True:
        request, body = server.next_event(), bytearray()
        if not isinstance(request, h11.Request) or (b"upgrade", b"websocket") in request.headers:
            return found
        while isinstance(part := server.next_event(), h11.Data):
            body += part.data
        if not isinstance(part, h11.EndOfMessage):
            return found
        if body:
            headers = {name.decode(): value.decode() for name, value in request.headers}
            path = request.target.decode()
            found.append({"path": path, "headers": headers, "body": json.loads(body)})
        server.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        server.send(h11.EndOfMessage())
        server.start_next_cycle()
