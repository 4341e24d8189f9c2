"""`/v1/responses` over WebSocket: each `response.create` is a request of its own to the same path by HTTP.

It passes the same checks of key, limits and body there, and its events come back as messages. A conversation
goes on by `previous_response_id`: the items of the last response are kept, in memory, for as long as the
connection is open. (Open Responses, 2026-04-24, "WebSocket Transport".)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Message, Scope
from starlette.websockets import WebSocket, WebSocketDisconnect

from sealring.api.errors import error_body, error_status
from sealring.api.fields import bad
from sealring.edge.http.body import BodyTurns, parse_object
from sealring.edge.inference.timers import SEND_SECONDS
from sealring.mesh.errors import InvalidInput, ResourceExhausted, SealringError
from sealring.mesh.rpc.crowd import Crowd
from sealring.mesh.rpc.holding import Holding, Share

MAX_KEPT = 64 << 20
"""Bytes of the conversations of all connections together. One that finds no room is not kept, and its client
sends it whole again."""

MAX_SOCKETS = 1024
"""Connections that ask for nothing. One too many ends the oldest of the key (without keys: address) that has
most of them."""

CONNECTION_SECONDS = 3600.0
"""How long a connection takes requests, as with OpenAI."""

RECEIPT = "sealring-receipt"
"""The header that asks for receipts, and the member of a message that does. Its value is the client's nonce
in hexadecimal digits."""

_OF_HANDSHAKE = frozenset(
    {b"connection", b"expect", b"idempotency-key", b"origin", b"te", b"trailer", b"upgrade"}
)
_OF_HANDSHAKE_BEGIN = (b"content-", b"sec-websocket-", b"transfer-")
"""Headers of the handshake that its requests do not have."""

_TERMINAL = (b"response.completed", b"response.incomplete", b"response.failed")


@dataclass
class _Kept:
    """A response that can be continued."""

    response_id: str
    items: bytes
    """All items of the conversation, as the inside of a JSON array."""

    calls: set[str] = field(default_factory=set)
    """The ids of the model's calls among them."""


class Conversation:
    """One connection. Its requests are answered one after another."""

    def __init__(self, socket: WebSocket, holding: Holding, sockets: Crowd, turns: BodyTurns) -> None:
        """`holding` counts what is kept for all connections, `sockets` are those that ask for nothing."""
        self._socket = socket
        self._turns = turns
        self._sockets = sockets
        self._share: Share = socket.state.share
        self._charged: str = socket.state.charged
        self._room = Share(holding, self._charged)
        self._kept: _Kept | None = None
        self._messages: asyncio.Queue[str | None] = asyncio.Queue(1)
        self._gone = asyncio.Event()

    async def run(self, seconds: float = CONNECTION_SECONDS) -> None:
        """Answers until the client goes away; after `seconds` it begins no more answers."""
        protocol = self._socket.scope["state"].get("protocol")
        if protocol is not None:
            protocol.share = self._share
        try:
            await self._socket.accept()
        except OSError:  # its client has gone already
            return
        reader = asyncio.create_task(self._read())
        try:
            leave = protocol.send_away if protocol is not None else self._gone.set
            with self._room, self._sockets.enter(self._charged, leave) as self._place:
                await self._answer_all(asyncio.get_running_loop().time() + seconds)
        except (ClientDisconnect, WebSocketDisconnect, OSError):
            if protocol is not None and not self._gone.is_set():
                protocol.transport.abort()  # to close it would wait until the client reads
        finally:
            if protocol is not None:
                protocol.share = None
            reader.cancel()
            await asyncio.wait((reader,))

    async def _read(self) -> None:
        """Takes messages; no further one while one waits, so that the connection stops the client."""
        with contextlib.suppress(ClientDisconnect, WebSocketDisconnect, OSError):
            while (message := await self._socket.receive())["type"] == "websocket.receive":
                text = message.get("text") or ""  # nothing binary is JSON
                try:
                    self._share.take(len(text))
                except ResourceExhausted as error:
                    await self._refuse(error)
                else:
                    await self._messages.put(text)
        self._gone.set()
        await self._messages.put(None)

    async def _answer_all(self, end: float) -> None:
        while True:
            try:
                async with asyncio.timeout_at(end):
                    text = await self._messages.get()
            except TimeoutError:
                await self._refuse(
                    InvalidInput(
                        "this connection has lasted as long as one may",
                        hint="open another, and send the whole conversation",
                        reason="WEBSOCKET_CONNECTION_LIMIT_REACHED",
                    )
                )
                await self._socket.close(1001)
                return
            if text is None:
                return
            try:
                with self._place.let_in(self._charged):
                    asks = await self._answer(text)
            except SealringError as error:
                asks = False
                await self._refuse(error)
            if not (asks or await self._counted()):
                return

    async def _counted(self) -> bool:
        """Counts a message that was no request as if it were one. Where that is more than its key may send,
        the connection ends, and this returns False."""
        try:
            async with self._socket.state.admit():
                return True
        except SealringError as error:
            await self._refuse(error)
            await self._socket.close(1008)
            return False

    async def _refuse(self, error: SealringError) -> None:
        await self._send_error(error_status(error), error_body(error)["error"], {})

    async def _send_error(self, status: int, error: Any, headers: dict[str, str]) -> None:
        event = {"type": "error", "status": status, "error": error}
        text = json.dumps({**event, **({"headers": headers} if headers else {})})
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._socket.send_text(text)
        except TimeoutError:
            raise ClientDisconnect from None

    async def _answer(self, text: str) -> bool:
        """Whether the message was a request, which the gate has counted then.

        Raises SealringError for what is none, and OSError where the client is gone.
        """
        size = len(text)
        try:
            asked = await self._asked(text.encode("utf-8", "surrogatepass"))
        finally:
            self._share.give_back(size)
        if asked is None:
            return False
        body, turn, nonce = asked
        relay = _Relay(self._socket, body, self._gone)
        await self._socket.app(self._scope(body, turn, nonce), relay.receive, relay.send)
        if relay.error is not None:
            await self._send_error(*relay.error)
        if relay.last is None and relay.error is None:
            raise ClientDisconnect
        response = relay.last or {}
        if response.get("status") in ("completed", "incomplete"):
            self._keep(response, turn)
        elif turn.response_id:
            self._forget()
        return True

    def _scope(self, body: bytes, turn: _Kept, nonce: str | None) -> Scope:
        """The request by HTTP that a message is."""
        opened = self._socket.scope
        headers = [
            (name, value)
            for name, value in opened["headers"]
            if name not in _OF_HANDSHAKE and not name.startswith(_OF_HANDSHAKE_BEGIN)
        ]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if nonce is not None:
            headers.append((RECEIPT.encode(), nonce.encode("latin-1", "replace")))
        kept = ("asgi", "http_version", "server", "client", "root_path", "path", "raw_path")
        return {
            **{name: opened[name] for name in kept},
            "type": "http",
            "method": "POST",
            "scheme": {"ws": "http", "wss": "https"}[opened["scheme"]],
            "query_string": b"",
            "headers": headers,
            "state": {"continued": turn.response_id or None},
        }

    async def _asked(self, message: bytes) -> tuple[bytes, _Kept, str | None] | None:
        """The body of the request that a message is, the conversation that it goes on with, and the nonce of
        its receipt.

        None for a message that asks for nothing. Raises InvalidInput.
        """
        async with self._turns.turn_of(message, self._charged):
            event = parse_object(message)
            kind = event.pop("type", None)
            if kind == "response.processed":  # Codex has got the answer
                return None
            if kind != "response.create":
                raise bad("type", "it is not response.create")
            nonce = event.pop(RECEIPT, None)
            if not isinstance(nonce, str | None):
                raise bad(RECEIPT, "it is not a text")
            before = self._before(event.pop("previous_response_id", None))
            try:
                return *_joined(before, event), nonce
            except SealringError:
                if before.response_id:
                    self._forget()
                raise

    def _before(self, previous: Any) -> _Kept:
        """The conversation that a request goes on with: an empty one, or the one that is kept."""
        if previous is None:
            return _Kept("", b"")
        if self._kept is None or previous != self._kept.response_id:
            raise InvalidInput(
                "the previous response is not known on this connection",
                hint="send the whole conversation in input: only the last response is kept, until the "
                "connection ends or a request that continues it fails",
                reason="PREVIOUS_RESPONSE_NOT_FOUND",
                param="previous_response_id",
            )
        return self._kept

    def _keep(self, response: dict[str, Any], turn: _Kept) -> None:
        """Keeps the conversation with its newest response, if there is room, and no other."""
        self._forget()
        output = response.get("output") or []
        items = b", ".join(filter(None, (turn.items, json.dumps(output)[1:-1].encode())))
        with contextlib.suppress(ResourceExhausted):
            self._room.take(len(items))
            self._kept = _Kept(response["id"], items, turn.calls | _calls(output))

    def _forget(self) -> None:
        if self._kept is not None:
            self._room.give_back(len(self._kept.items))
            self._kept = None


def _joined(before: _Kept, event: dict[str, Any]) -> tuple[bytes, _Kept]:
    """The body of a request that goes on with a conversation, and the conversation with what it adds.

    Raises InvalidInput: BAD_FIELD, BAD_JSON, NO_SUCH_CALL.
    """
    items = event.pop("input", [])
    if isinstance(items, str):
        items = [{"type": "message", "role": "user", "content": items}]
    if not isinstance(items, list):
        raise bad("input", "it is neither text nor a list of items")
    calls = before.calls | _calls(items)
    for index, item in enumerate(items if before.response_id else []):
        called = item.get("call_id") if isinstance(item, dict) else None
        if isinstance(called, str) and called not in calls:
            raise InvalidInput(
                "there is no such call in the conversation",
                hint="send the call before what it has returned",
                reason="NO_SUCH_CALL",
                param=f"input[{index}].call_id",
            )
    event.pop("stream_options", None)
    try:
        added, rest = json.dumps(items)[1:-1].encode(), json.dumps({**event, "stream": True}).encode()
    except RecursionError:
        raise InvalidInput("the body is not valid JSON", reason="BAD_JSON") from None
    joined = b", ".join(filter(None, (before.items, added)))
    return b'{"input": [' + joined + b"], " + rest[1:], _Kept(before.response_id, joined, calls)


def _calls(items: list[Any]) -> set[str]:
    """The ids of calls among items."""
    called = (
        item.get("call_id")
        for item in items
        if isinstance(item, dict) and str(item.get("type")).endswith("_call")
    )
    return {one for one in called if isinstance(one, str)}


class _Relay:
    """The client's side of one request: events go out as messages, an error comes back."""

    def __init__(self, socket: WebSocket, body: bytes, gone: asyncio.Event) -> None:
        self.last: dict[str, Any] | None = None
        """The response of the last event."""

        self.error: tuple[int, Any, dict[str, str]] | None = None
        """Status, error and headers of a refusal."""

        self._socket = socket
        self._body: bytes | None = body
        self._gone = gone
        self._status = 0
        self._headers: dict[str, str] = {}

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        if self._status in (0, 200):
            await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Raises OSError where the client is gone."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            given = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
            self._headers = {name: given[name] for name in ("retry-after", "x-request-id") if name in given}
        elif self._status != 200:
            if message.get("body"):
                self.error = self._status, json.loads(message["body"])["error"], self._headers
        else:
            for event in message.get("body", b"").split(b"\n\n"):
                await self._pass_on(event)

    async def _pass_on(self, event: bytes) -> None:
        """Sends the data of a server-sent event; a comment has none."""
        head, found, data = event.partition(b"data: ")
        if found:
            if head.removeprefix(b"event: ").startswith(_TERMINAL):
                self.last = json.loads(data)["response"]
            await self._socket.send_text(data.decode())
