"""Answers on the wire: whole or as server-sent events; a client that goes away cancels its request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.http.errors import error_event
from gateway.http.render import Renderer
from mesh.errors import Cancelled, Internal, SealringError
from sealring.v1 import inference_pb2 as inference

SEND_SECONDS = 60.0
"""How long a client may leave its connection's buffers full."""

T = TypeVar("T")
Events = AsyncGenerator[inference.GenerateResponse, None]


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises Cancelled then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client went away")
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.wait((task, watcher))


async def _disconnected(receive: Receive) -> None:
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass


async def started(events: Events) -> inference.Started:
    """The first event; until it is there, errors still have an HTTP status."""
    first = await anext(events)
    if first.WhichOneof("event") != "started":
        raise Internal("the answer does not begin with its start")
    return first.started


async def collect(events: Events) -> tuple[inference.Started, str, inference.Finished]:
    """The whole answer."""
    async with contextlib.aclosing(events):
        begin = await started(events)
        texts: list[str] = []
        async for event in events:
            if event.WhichOneof("event") == "finished":
                return begin, "".join(texts), event.finished
            texts.append(event.delta.text)
    raise Internal("the answer does not end")


class EventStream(Response):
    """Server-sent events of one answer whose start has been read. Slow clients slow the reading, no more."""

    def __init__(self, events: Events, renderer: Renderer, headers: dict[str, str]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store", **headers})
        del self.headers["content-length"]
        self._events = events
        self._renderer = renderer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with contextlib.suppress(Cancelled):
                await unless_disconnected(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        try:
            async for part in self._parts():
                await _send(send, {"type": "http.response.body", "body": part, "more_body": True})
        except SealringError as error:
            await _send(send, {"type": "http.response.body", "body": error_event(error), "more_body": True})
        await _send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self) -> AsyncIterator[bytes]:
        yield self._renderer.first()
        async for event in self._events:
            if event.WhichOneof("event") == "delta":
                yield self._renderer.delta(event.delta.text)
            else:
                yield self._renderer.last(event.finished)


async def _send(send: Send, message: Message) -> None:
    try:
        async with asyncio.timeout(SEND_SECONDS):
            await send(message)
    except (TimeoutError, OSError):
        raise Cancelled("the client does not read") from None
