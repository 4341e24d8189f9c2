"""What `openai` takes for its connection: requests end in this process, and leave it sealed.

It is the HTTP edge of `sealring proxy` without a socket, as ASGI (https://asgi.readthedocs.io).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2

from sealring.client.asynchronous import AsyncClient
from sealring.client.portal import Portal
from sealring.client.sealing import SealingBackend
from sealring.edge.http.app import create_app
from sealring.edge.metrics import Metrics


class _Exchange(httpx2.AsyncByteStream):
    """One request and its answer, whose parts wait here until they are read; none outgrows a context."""

    def __init__(self, app: Any, request: httpx2.Request, body: bytes) -> None:
        self._body: bytes | None = body
        self._parts: asyncio.Queue[bytes] = asyncio.Queue()
        self._start: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._wait: float | None = request.extensions.get("timeout", {}).get("read")
        self._request = request
        scope = {
            "type": "http",
            "method": request.method,
            "path": request.url.path,
            "raw_path": request.url.raw_path,
            "query_string": request.url.query,
            "headers": [(b"host", b"localhost"), *_headers(request)],
        }
        self._task = asyncio.ensure_future(app(scope, self._receive, self._send))
        self._task.add_done_callback(self._ended)

    async def _receive(self) -> dict[str, Any]:
        if self._body is None:
            await asyncio.Event().wait()  # whoever goes away cancels the task
        body, self._body = self._body, None
        return {"type": "http.request", "body": body}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._start.set_result(message)
        elif message.get("body"):
            self._parts.put_nowait(message["body"])

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._parts.put_nowait(b"")
        if not self._start.done() and not task.cancelled():
            self._start.set_exception(httpx2.RemoteProtocolError("there is no answer", request=self._request))

    async def response(self) -> httpx2.Response:
        """Raises ReadTimeout, RemoteProtocolError."""
        try:
            start = await self._in_time(self._start)
        except BaseException:
            await self.aclose()
            raise
        return httpx2.Response(start["status"], headers=start["headers"], stream=self, request=self._request)

    async def _in_time(self, awaited: Any) -> Any:
        try:
            async with asyncio.timeout(self._wait):
                return await awaited
        except TimeoutError:
            raise httpx2.ReadTimeout("nothing came in time", request=self._request) from None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while part := await self._in_time(self._parts.get()):
            yield part

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))


def _headers(request: httpx2.Request) -> list[tuple[bytes, bytes]]:
    """Headers without the address, which is a placeholder, and without keys: the connection has the
    gateway's."""
    dropped = (b"host", b"authorization")
    return [(name.lower(), value) for name, value in request.headers.raw if name.lower() not in dropped]


class AsyncSealingTransport(httpx2.AsyncBaseTransport):
    """A transport for httpx2 that seals requests; it belongs to one event loop."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        metrics = Metrics()
        self._app = create_app(SealingBackend(client, metrics), exposition=metrics.exposition)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return await self.exchange(request, await request.aread())

    async def exchange(self, request: httpx2.Request, body: bytes) -> httpx2.Response:
        """Raises ReadTimeout, RemoteProtocolError."""
        return await _Exchange(self._app, request, body).response()

    async def aclose(self) -> None:
        await self._client.close()


class SealingTransport(httpx2.BaseTransport):
    """An AsyncSealingTransport for callers that wait, in an event loop of its own."""

    def __init__(self, client: Callable[[], AsyncClient]) -> None:
        """`client` is called in that loop."""

        async def made() -> AsyncSealingTransport:
            return AsyncSealingTransport(client())

        self._portal = Portal()
        try:
            self._inner = self._portal.run(made())
        except BaseException:
            self._portal.close()
            raise

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        body = request.read()
        start = self._portal.run(self._inner.exchange(request, body))
        assert isinstance(start.stream, httpx2.AsyncByteStream)
        waiting = _Waiting(start.stream, self._portal)
        return httpx2.Response(start.status_code, headers=start.headers, stream=waiting, request=request)

    def close(self) -> None:
        self._portal.finish(self._inner.aclose())
        self._portal.close()


class _Waiting(httpx2.SyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, portal: Portal) -> None:
        self._stream = stream
        self._portal = portal

    def __iter__(self) -> Iterator[bytes]:
        return self._portal.pieces(aiter(self._stream), self._stream.aclose)

    def close(self) -> None:
        self._portal.finish(self._stream.aclose())
