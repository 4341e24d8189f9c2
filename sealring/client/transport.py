"""What `openai` takes for its connection: requests end in this process, and leave it sealed.

It is the HTTP edge of `sealring proxy` without a socket, as ASGI (https://asgi.readthedocs.io).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import httpx2

from sealring.client.asynchronous import AsyncClient
from sealring.client.sealing import SealingBackend
from sealring.edge.http.app import create_app
from sealring.edge.metrics import Metrics

T = TypeVar("T")


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
    """Without the address, which is nobody's, and without keys: the gateway's is the connection's."""
    dropped = (b"host", b"authorization")
    return [(name.lower(), value) for name, value in request.headers.raw if name.lower() not in dropped]


class AsyncSealingTransport(httpx2.AsyncBaseTransport):
    """For one event loop."""

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
    """The same for whoever waits, over an event loop in a thread of its own."""

    _loop: asyncio.AbstractEventLoop
    _inner: AsyncSealingTransport
    _end: asyncio.Event

    def __init__(self, client: Callable[[], AsyncClient]) -> None:
        """`client` is called in that loop."""
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(client, ready)), name="sealring", daemon=True
        )
        self._thread.start()
        ready.result()

    async def _live(self, client: Callable[[], AsyncClient], ready: concurrent.futures.Future[None]) -> None:
        try:
            self._inner = AsyncSealingTransport(client())
        except Exception as error:
            ready.set_exception(error)
            return
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        ready.set_result(None)
        await self._end.wait()
        await self._inner.aclose()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise
        try:
            return future.result()
        except BaseException:
            future.cancel()  # as on Ctrl-C
            raise

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        body = request.read()
        start = self._run(self._inner.exchange(request, body))
        waiting = _Waiting(start.stream, self._run)  # type: ignore[arg-type]
        return httpx2.Response(start.status_code, headers=start.headers, stream=waiting, request=request)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._end.set)
        if threading.current_thread() is not self._thread:  # as when garbage is collected there
            self._thread.join()


class _Waiting(httpx2.SyncByteStream):
    def __init__(
        self, stream: httpx2.AsyncByteStream, run: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        self._stream = stream
        self._run = run

    def __iter__(self) -> Iterator[bytes]:
        parts = self._stream.__aiter__()

        async def part() -> bytes | None:
            return await anext(parts, None)

        while (told := self._run(part())) is not None:
            yield told

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the client was closed before its answer
            self._run(self._stream.aclose())
