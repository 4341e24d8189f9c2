"""Answers on the wire: whole or as server-sent events; a client that goes away cancels its request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sealring.api.answers import Choice, Renderer
from sealring.mesh.errors import Cancelled, Internal, SealringError
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


async def collect(events: Events, choices: int) -> tuple[inference.Started, list[Choice], inference.Finished]:
    """The whole answer: its start, each choice, its end."""
    async with contextlib.aclosing(events):
        begin = await started(events)
        told = [Choice() for _ in range(choices)]
        async for event in events:
            if event.WhichOneof("event") == "finished":
                return begin, told, event.finished
            told[event.delta.choice].add(event.delta)
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
            # what lies between here and the connection only cares for the start
            writer = _Writer(scope["state"]["send"])
            with contextlib.suppress(Cancelled):
                await unless_disconnected(receive, self._stream(writer))

    async def _stream(self, writer: _Writer) -> None:
        render = self._renderer.delta
        with writer:
            try:
                await writer.write(self._renderer.first())
                async for event in self._events:
                    if event.HasField("delta"):
                        await writer.write(render(event.delta))
                    else:
                        await writer.write(self._renderer.last(event.finished))
            except SealringError as error:
                if isinstance(error, Cancelled):
                    raise
                await writer.write(self._renderer.error(error))
            await writer.write(b"", more=False)


class _Writer:
    """Sends parts of a body; raises Cancelled where the client does not take one for `SEND_SECONDS`.

    One timer watches all of a stream's sends: nearly all of them end at once.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._since = 0.0
        self._stuck = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._timer = self._loop.call_later(SEND_SECONDS, self._look)

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    async def write(self, part: bytes, *, more: bool = True) -> None:
        self._since = self._loop.time()
        try:
            await self._send({"type": "http.response.body", "body": part, "more_body": more})
        except OSError:
            raise Cancelled("the client went away") from None
        except asyncio.CancelledError:
            if not self._stuck:
                raise
            raise Cancelled("the client does not read") from None
        self._since = 0.0

    def _look(self) -> None:
        """Cancels the task, once, when its send began too long ago."""
        now = self._loop.time()
        left = self._since + SEND_SECONDS - now if self._since else SEND_SECONDS
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        elif self._task is not None:
            self._stuck = True
            self._task.cancel()
