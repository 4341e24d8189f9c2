"""Answers on the wire: whole or as server-sent events; a client that goes away cancels its request."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sealring.api.answers import Asked, Choice
from sealring.api.errors import error_of, error_status
from sealring.api.fields import renamed
from sealring.edge.access.quota import QUOTA_USED
from sealring.edge.inference.answer import EVENT_BYTES, weight
from sealring.edge.inference.timers import SendWatch
from sealring.mesh.errors import Cancelled, Internal, InvalidInput, SealringError, Unavailable, forget_frames
from sealring.mesh.prompt.tools import parse_json_object
from sealring.v1 import inference_pb2 as inference

PING_SECONDS = 8.0
"""How long a stream tells nothing, at most; also before the answer's start, so that errors have a status."""

PIECE_BYTES = 64 << 10
"""Bytes of a whole answer that are written at once, about as many as a connection's buffer takes."""

_REPEATED = frozenset({429, 503})
"""Statuses after which the same request succeeds later."""

_LEFT_TO_CLIENTS = frozenset({408, 409})
"""Statuses after which the client decides whether to ask again."""

T = TypeVar("T")
Events = AsyncGenerator[inference.GenerateResponse, None]


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
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


async def started(
    events: Events, hear: Callable[[inference.Prefilling], None] = lambda told: None
) -> inference.Started:
    """The first event; until it is there, errors still have an HTTP status. `hear` gets those of a long
    prompt, which come before it."""
    while (first := await anext(events, None)) is not None and first.HasField("prefilling"):
        hear(first.prefilling)
    if first is None or first.WhichOneof("event") != "started":
        raise Internal("the answer does not begin with its start")
    return first.started


async def count_prompt(events: Events) -> int:
    """The tokens of a prompt: the answer's first event has the number, or else its last one."""
    tokens = (await started(events)).prompt_tokens
    while not tokens:
        if (event := await anext(events, None)) is None:
            raise Internal("the answer does not tell the number of the prompt's tokens")
        tokens = event.finished.prompt_tokens
    return tokens


async def collect(
    events: Events, choices: int, hold: Callable[[int], None] = lambda size: None
) -> tuple[inference.Started, list[Choice], inference.Finished]:
    """The whole answer: its start, each choice, its end. `hold` counts the bytes of memory that it takes, and
    may raise an error, which ends it."""
    async with contextlib.aclosing(events):
        begin = await started(events)
        found = [Choice() for _ in range(choices)]
        async for event in events:
            if event.WhichOneof("event") == "finished":
                return begin, found, event.finished
            check_calls(event.delta)
            hold(weight(event) - EVENT_BYTES)  # texts are joined
            found[event.delta.choice].add(event.delta)
    raise Internal("the answer does not end")


def check_calls(delta: inference.Delta) -> None:
    """Every API takes a call's arguments for an object, which a head that is not honest need not send.

    Raises Unavailable (BAD_TOOL_CALL).
    """
    if delta.HasField("parsed"):
        try:
            for call in delta.parsed.tool_calls:
                parse_json_object(call.arguments, "arguments")
        except InvalidInput:
            raise Unavailable(
                "the arguments of a call are no JSON object of a size that is taken",
                hint="send the request again",
                reason="BAD_TOOL_CALL",
            ) from None


async def together(parts: Sequence[Events], choices: int, at_once: int = 0) -> Events:
    """The answers to several prompts, `choices` to each, as those to one; `at_once` of them at the same time,
    0: all.

    Raises what any of them fails with; the others are ended then.
    """
    queue: asyncio.Queue[tuple[int, inference.GenerateResponse | Exception]] = asyncio.Queue(len(parts))

    turns = asyncio.Semaphore(at_once or len(parts))

    async def read(number: int, events: Events) -> None:
        try:
            async with turns, contextlib.aclosing(events):
                async for event in events:
                    await queue.put((number, event))
        except Exception as error:
            await queue.put((number, error))

    tasks = [asyncio.create_task(read(number, events)) for number, events in enumerate(parts)]
    begun, ends = False, dict[int, inference.Finished]()
    try:
        while len(ends) < len(parts):
            number, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            kind = event.WhichOneof("event")
            if kind == "finished":
                ends[number] = event.finished
            elif kind == "delta":
                event.delta.choice += number * choices
            if kind == "delta" or (kind == "started" and not begun):
                begun = True
                yield event
        yield inference.GenerateResponse(finished=_all([ends[number] for number in range(len(parts))]))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _all(ends: list[inference.Finished]) -> inference.Finished:
    whole = inference.Finished(
        reason=ends[0].reason,
        prompt_tokens=sum(end.prompt_tokens for end in ends),
        completion_tokens=sum(end.completion_tokens for end in ends),
        cached_tokens=sum(end.cached_tokens for end in ends),
        drafted_tokens=sum(end.drafted_tokens for end in ends),
        accepted_tokens=sum(end.accepted_tokens for end in ends),
    )
    for end in ends:
        one = inference.FinishedChoice(reason=end.reason, completion_tokens=end.completion_tokens)
        whole.choices.extend(end.choices or [one])
        whole.receipts.extend(end.receipts)
    return whole


class EventStream(Response):
    """The events of one answer as they come. Slow clients slow the reading, no more."""

    def __init__(self, events: Events, asked: Asked, headers: Callable[[inference.Started], Any]) -> None:
        """`headers` tells those of an answer that has begun when the response does."""
        asking = asked.request
        self._renderer = asked.render(
            inference.Started(request_id=asking.request_id, model=asking.model)
        )  # until it is known who answers
        super().__init__(media_type=self._renderer.media_type, headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._events = events
        self._asked = asked
        self._told = headers
        # not of `self`, which holds the task, whose error holds its frames
        self._prefilling = deque[inference.Prefilling](maxlen=1)
        asking.tell_prefill = True
        self._start = asyncio.ensure_future(started(events, self._prefilling.append))

    async def begin(self, receive: Receive) -> None:
        """Waits for the answer's start, for a while. Raises what the request failed with, or Cancelled."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_SECONDS):
                    await unless_disconnected(receive, asyncio.shield(self._start))
                    self.headers.update(self._told(self._start.result()))
        except BaseException:
            await self._close()
            raise

    def _ping(self) -> bytes:
        told = self._prefilling
        return self._renderer.prefilling(told.pop()) if told else self._renderer.ping

    async def _close(self) -> None:
        self._start.cancel()
        await asyncio.wait((self._start,))
        if not self._start.cancelled():
            self._start.exception()
        await self._events.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._close)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # what lies between here and the connection only cares for the start
            writer = _Writer(scope["state"]["send"], self._ping)
            with contextlib.suppress(Cancelled):
                await unless_disconnected(receive, self._stream(writer))

    async def _stream(self, writer: _Writer) -> None:
        with writer:
            try:
                renderer = self._renderer = self._asked.render(await self._start)
                render = renderer.delta
                await writer.write(renderer.first())
                async for event in self._events:
                    if event.HasField("delta"):
                        check_calls(event.delta)
                        await writer.write(render(event.delta))
                    elif event.HasField("prefilling"):
                        self._prefilling.append(event.prefilling)
                    else:
                        await writer.write(renderer.last(event.finished))
            except SealringError as error:
                if isinstance(error, Cancelled):
                    raise
                forget_frames(error)
                await writer.write(self._renderer.error(renamed(error, self._asked.names)))
            await writer.write(b"", more=False)


class _Writer:
    """Sends parts of a body; raises Cancelled where the client does not take one for `SEND_SECONDS`.

    A timer sends `ping` whenever nothing was sent for `PING_SECONDS`.
    """

    def __init__(self, send: Send, ping: Callable[[], bytes]) -> None:
        self._send = send
        self._ping = ping
        self._pinging: asyncio.Task[None] | None = None
        self.loop = asyncio.get_running_loop()
        self.watch = SendWatch()

    def __enter__(self) -> None:
        self.watch.__enter__()
        self._last = self.loop.time()
        self.beat = self.loop.call_later(PING_SECONDS, self.keep_alive)

    def __exit__(self, *error: object) -> None:
        self.watch.__exit__(*error)
        self.beat.cancel()
        if self._pinging is not None:
            self._pinging.cancel()

    async def write(self, part: bytes, *, more: bool = True) -> None:
        self._last = self.loop.time()
        self.watch.begin()
        try:
            await self._send({"type": "http.response.body", "body": part, "more_body": more})
        except OSError:
            raise Cancelled("the client went away") from None
        except asyncio.CancelledError:
            if not self.watch.stuck:
                raise
            raise Cancelled("the client does not read") from None
        self.watch.end()

    def keep_alive(self) -> None:
        now = self.loop.time()
        left = self._last + PING_SECONDS - now
        if left <= 0:
            left, self._last = PING_SECONDS, now
            if not self.watch.sending:
                self._pinging = self.loop.create_task(self.send_ping())
        self.beat = self.loop.call_later(left, self.keep_alive)

    async def send_ping(self) -> None:
        with contextlib.suppress(OSError):  # the next part will tell
            await self._send({"type": "http.response.body", "body": self._ping(), "more_body": True})


class Whole(Response):
    """A whole answer, which is under way until the connection's buffers have room for the end of it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises Cancelled where the client does not read."""
        body = memoryview(self.body)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        writer = _Writer(scope["state"]["send"], bytes)
        with writer:
            for begin in range(0, len(body), PIECE_BYTES):
                await writer.write(bytes(body[begin : begin + PIECE_BYTES]))
            await writer.write(b"", more=False)


def error_response(error: SealringError, path: str = "") -> Response:
    """The error in the form of the API that `path` belongs to.

    `x-should-retry` is the word that OpenAI's and Anthropic's SDKs obey before any rule of their own.
    """
    status = error_status(error)
    headers = {}
    if status in _REPEATED and error.reason != QUOTA_USED:  # which is over at midnight
        headers["x-should-retry"] = "true"
    elif 400 <= status < 500 and status not in _LEFT_TO_CLIENTS:
        headers["x-should-retry"] = "false"
    if "retry_after" in error.metadata:
        headers["retry-after"] = error.metadata["retry_after"]
    elif status == 503:
        headers["retry-after"] = "1"
    if error.code == "UNAUTHENTICATED":
        headers["www-authenticate"] = "Bearer"
    if "allow" in error.metadata:
        headers["allow"] = error.metadata["allow"]
    return Response(json.dumps(error_of(path, error)), status, headers, media_type="application/json")
