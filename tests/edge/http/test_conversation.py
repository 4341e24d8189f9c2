"""`/v1/responses` over WebSocket, by the client of the `websockets` package on the real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import until
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from sealring.edge.access.gate import Caller, Gate, Limits
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope
from sealring.edge.http import app
from sealring.edge.http.body import MAX_BODY, BodyTurns
from sealring.edge.http.conversation import Conversation
from sealring.mesh.errors import EpochEnded
from sealring.mesh.rpc import Crowd, Holding, Share
from sealring.testing import serve_edge
from sealring.v1 import inference_pb2 as inference

ASK = {"type": "response.create", "model": "demo", "store": False}
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


def opened(port: int, path: str = "/v1/responses", **options: Any) -> connect:
    return connect(f"ws://127.0.0.1:{port}{path}", proxy=None, **options)


async def turn(socket: ClientConnection, **fields: Any) -> list[dict[str, Any]]:
    """The events of one answer."""
    await socket.send(json.dumps({**ASK, **fields}))
    found: list[dict[str, Any]] = []
    while not found or found[-1]["type"] not in ENDS:
        found.append(json.loads(await socket.recv()))
    return found


async def last(socket: ClientConnection, **fields: Any) -> dict[str, Any]:
    return (await turn(socket, **fields))[-1]


def code(event: dict[str, Any]) -> tuple[int, str, str | None]:
    assert event["type"] == "error", event
    return event["status"], event["error"]["code"], event["error"]["param"]


def said(backend: Any) -> list[tuple[str, str]]:
    """The newest prompt."""
    return [(one.role, one.content) for one in backend.requests[-1].envelope.clear.chat.messages]


async def test_the_events_are_those_of_a_stream(port: int, calling: Any) -> None:
    async with httpx.AsyncClient() as http, opened(port) as socket:
        body = {"model": "demo", "input": "hello", "stream": True}
        streamed = await http.post(f"http://127.0.0.1:{port}/v1/responses", json=body)
        for _ in range(2):
            events = await turn(socket, input="hello")
            names = [line.removeprefix("event: ") for line in streamed.text.splitlines() if "event: " in line]
            assert [event["type"] for event in events] == names
            assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_a_response_is_continued_with_new_items_alone(port: int, calling: Any) -> None:
    async with opened(port) as socket:
        first = (await last(socket, input="hello", instructions="Be kind."))["response"]
        call = first["output"][2]["call_id"]
        result = {"type": "function_call_output", "call_id": call, "output": "a door"}
        second = (await last(socket, previous_response_id=first["id"], input=[result]))["response"]
        assert (first["previous_response_id"], second["previous_response_id"]) == (None, first["id"])
        assert said(calling) == [("user", "hello"), ("assistant", "Let me see."), ("tool", "a door")]
        assert [one.name for one in calling.requests[-1].envelope.clear.chat.messages[1].tool_calls] == [
            "look",
            "look",
        ]
        await last(socket, previous_response_id=second["id"], input="And now?")
        assert said(calling)[-1] == ("user", "And now?")
        assert len(said(calling)) == 5
        # no more than the newest is kept
        assert code(await last(socket, previous_response_id=first["id"], input="hm"))[1] == (
            "previous_response_not_found"
        )


async def test_what_failed_or_was_said_elsewhere_is_not_continued(port: int, backend: Any) -> None:
    unknown = (400, "previous_response_not_found", "previous_response_id")
    async with opened(port) as socket, opened(port) as other:
        for wrong in (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            {"input": 5},
            {"input": "hm", "model": "none"},
        ):
            name = (await last(socket, input="hello"))["response"]["id"]
            assert code(await last(other, previous_response_id=name, input="hm")) == unknown
            assert (await last(socket, previous_response_id=name, **wrong))["type"] == "error"
            assert code(await last(socket, previous_response_id=name, input="hm")) == unknown
        name = (await last(socket, input="hello"))["response"]["id"]
        backend.error, backend.error_after = EpochEnded("gone"), 1
        assert (await last(socket, previous_response_id=name, input="hm"))["type"] == "response.failed"
        backend.error = None
        assert code(await last(socket, previous_response_id=name, input="hm")) == unknown
        # a new conversation that fails takes nothing from the one that stands
        name = (await last(socket, input="hello"))["response"]["id"]
        assert (await last(socket, input=5))["type"] == "error"
        assert (await last(socket, previous_response_id=name, input="hm"))["type"] == "response.completed"


async def test_a_response_without_output_can_be_continued(port: int, backend: Any) -> None:
    async with opened(port) as socket:
        empty = (await last(socket, input="hello", generate=False))["response"]
        assert (empty["output"], backend.requests, backend.loads) == ([], [], [("demo", None, "")])
        await socket.send(json.dumps({"type": "response.processed", "response_id": empty["id"]}))
        await last(socket, previous_response_id=empty["id"], input=[])
        assert said(backend) == [("user", "hello")]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("{", (400, "bad_json", None)),
        (b"{}", (400, "bad_json", None)),
        ('{"type": "response.steer"}', (400, "bad_field", "type")),
        (json.dumps({**ASK, "input": 5}), (400, "bad_field", "input")),
        (json.dumps({**ASK, "input": "x", "stream_id": "a"}), (400, "unknown_field", "stream_id")),
        (json.dumps({**ASK, "input": "x", "background": True}), (400, "unsupported_field", "background")),
        (json.dumps({**ASK, "input": "x", "model": "none"}), (404, "model_not_found", "model")),
    ],
)
async def test_a_refused_message_leaves_the_connection_open(port: int, message: Any, told: Any) -> None:
    async with opened(port) as socket:
        await socket.send(message)
        assert code(json.loads(await socket.recv())) == told
        assert (await last(socket, input="hello"))["type"] == "response.completed"


async def test_messages_wait_for_their_turn(port: int, backend: Any) -> None:
    backend.held = asyncio.Event()
    async with opened(port) as socket:
        for name in "abcd":
            await socket.send(json.dumps({**ASK, "input": name}))
        await until(lambda: len(backend.requests) == 1)
        backend.held.set()
        ended = 0
        while ended < 4:
            ended += json.loads(await socket.recv())["type"] == "response.completed"
    assert [one.envelope.clear.chat.messages[0].content for one in backend.requests] == list("abcd")


async def test_a_client_that_goes_away_cancels_its_request(port: int, backend: Any) -> None:
    backend.held = asyncio.Event()
    async with opened(port) as socket:
        await socket.send(json.dumps({**ASK, "input": "hello"}))
        await until(lambda: bool(backend.requests))
    await until(lambda: bool(backend.closed))


async def test_each_request_needs_the_key_of_the_connection(backend: Any, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "state")
    text, record = keys.create([Scope.INFERENCE])
    reading = keys.create([Scope.READ])[0]
    async with serve_edge(backend, gate=Gate(keys)) as port:
        for wrong, status in (("none", 401), (reading, 403)):
            with pytest.raises(InvalidStatus) as caught:
                async with opened(port, additional_headers={"authorization": f"Bearer {wrong}"}):
                    pass
            assert caught.value.response.status_code == status
            assert json.loads(caught.value.response.body)["error"]["code"] in (
                "invalid_api_key",
                "scope_denied",
            )
        async with opened(port, additional_headers={"authorization": f"Bearer {text}"}) as socket:
            await last(socket, input="hello")
            assert backend.keys == [record.id]
            keys.revoke(record.id)
            assert code(await last(socket, input="hello"))[:2] == (401, "invalid_api_key")


@pytest.mark.parametrize("message", ["", "{", '{"type": "other"}', '{"type": "response.processed"}', b"{}"])
async def test_messages_that_are_no_request_count_as_requests(
    backend: Any, tmp_path: Path, message: str | bytes
) -> None:
    """A connection whose key may send no more ends, and the next is refused."""
    keys = KeyFile(tmp_path / "state")
    headers = {"authorization": f"Bearer {keys.create([Scope.INFERENCE])[0]}"}
    gate = Gate(keys, Limits(key_per_second=2), clock=lambda: 0.0)
    async with serve_edge(backend, gate=gate) as port:
        async with opened(port, additional_headers=headers) as socket:
            for _ in range(8):
                await socket.send(message)
            said = []
            with pytest.raises(ConnectionClosed) as caught:
                while True:
                    said.append(code(json.loads(await socket.recv())))
        assert said[-1][:2] == (429, "rate_limited")
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1008
        with pytest.raises(InvalidStatus, match="429"):
            await opened(port, additional_headers=headers)
    assert not backend.requests


async def test_pages_and_paths_that_are_not_listed_open_no_socket(backend: Any) -> None:
    async with serve_edge(backend, cors_origins=["https://a.example"]) as port:
        for path, origin, status in (
            ("/v1/responses", "https://b.example", 403),
            ("/v1/responses", "http://[::1]", 403),
            ("/v1/responses", "http://localhost:8080", 403),
            ("/v1/chat/completions", None, 404),
            ("/v1/models", "https://a.example", 404),
        ):
            with pytest.raises(InvalidStatus) as caught:
                async with opened(port, path, origin=origin):
                    pass
            assert caught.value.response.status_code == status
        async with opened(port, origin="https://a.example") as socket:
            assert (await last(socket, input="hello"))["type"] == "response.completed"


async def test_long_messages_end_the_connection_and_frames_make_one(port: int) -> None:
    async with opened(port) as socket:
        with pytest.raises(ConnectionClosed) as caught:
            await socket.send("x" * (MAX_BODY + 1))
            await socket.recv()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1009
    async with opened(port) as socket:
        await socket.send(iter([json.dumps(ASK)[:-1], ', "input": "hello"}']))
        assert json.loads(await socket.recv())["type"] == "response.created"


async def test_each_request_has_a_nonce_of_its_own(port: int, backend: Any) -> None:
    with pytest.raises(InvalidStatus) as caught:
        async with opened(port, additional_headers={"sealring-receipt": "00" * 16}):
            pass
    assert (caught.value.response.status_code, b"bad_nonce" in caught.value.response.body) == (400, True)
    async with opened(port) as socket:
        for nonce in ("01" * 16, "02" * 16, None):
            fields = {"sealring-receipt": nonce} if nonce else {}
            assert (await last(socket, input="hello", **fields))["type"] == "response.completed"
            assert backend.requests[-1].receipt.nonce.hex() == (nonce or "")
        for wrong, told in (("x", "bad_nonce"), (5, "bad_field"), ("\u2603", "bad_nonce")):
            assert code(await last(socket, input="hello", **{"sealring-receipt": wrong}))[1] == told


class Scripted(WebSocket):
    """A connection whose client sends a list of messages; `app` answers each with one event."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.told: list[Any] = []
        self.bodies: list[Any] = []
        state = {"share": Share(Holding(1 << 20), ""), "caller": Caller(), "charged": "a"}
        state["admit"] = lambda: contextlib.nullcontext()
        scope = {"type": "websocket", "headers": [], "state": state, "app": self.answer, "scheme": "ws"}
        scope |= dict.fromkeys(("asgi", "http_version", "server", "client", "root_path", "path", "raw_path"))
        self.left = [json.dumps({**ASK, **one}) for one in messages]
        super().__init__(scope, self.next, self.tell)
        self.connected = False

    async def next(self) -> Any:
        if not self.connected:
            self.connected = True
            return {"type": "websocket.connect"}
        if self.left:
            return {"type": "websocket.receive", "text": self.left.pop(0)}
        await until(lambda: len(self.told) >= 2)
        return {"type": "websocket.disconnect"}

    async def tell(self, message: Any) -> None:
        if message["type"] == "websocket.send":
            self.told.append(json.loads(message["text"]))

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append(json.loads((await receive())["body"]))
        done = {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": ["o"]}}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = f": keep-alive\n\nevent: response.completed\ndata: {json.dumps(done)}\n\n"
        await send({"type": "http.response.body", "body": body.encode()})


@pytest.mark.parametrize(("room", "kept"), [(1000, True), (8, False)])
async def test_a_conversation_without_room_is_not_kept(room: int, kept: bool) -> None:
    holding, socket = Holding(room), Scripted({"input": "a"}, {"input": "b", "previous_response_id": "r"})
    await Conversation(socket, holding, Crowd(1), BodyTurns()).run()
    assert len(socket.bodies) == 1 + kept
    if kept:
        assert [one if one == "o" else one["content"] for one in socket.bodies[1]["input"]] == ["a", "o", "b"]
    else:
        assert code(socket.told[1])[1] == "previous_response_not_found"
    assert len(holding) == 0, "the room is given back with the connection"


async def test_of_sockets_that_ask_nothing_the_oldest_of_who_has_most_goes(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is being answered stays, and one that comes is let in."""
    monkeypatch.setattr(app, "MAX_SOCKETS", 2)
    backend.held = asyncio.Event()
    async with serve_edge(backend) as port, opened(port) as asking:
        await asking.send(json.dumps({**ASK, "input": "hello"}))
        await until(lambda: backend.requests)
        async with opened(port) as first, opened(port), opened(port):
            with pytest.raises(ConnectionClosed) as caught:
                await first.recv()
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 1013
            backend.held.set()
            while json.loads(await asking.recv())["type"] != "response.completed":
                pass


async def test_an_old_connection_begins_no_answers() -> None:
    socket = Scripted()
    await Conversation(socket, Holding(0), Crowd(1), BodyTurns()).run(seconds=0)
    assert code(socket.told[0])[:2] == (400, "websocket_connection_limit_reached")


async def test_an_end_by_length_can_be_continued(port: int, backend: Any) -> None:
    backend.reason = inference.FINISH_REASON_LENGTH
    async with opened(port) as socket:
        cut = await last(socket, input="hello")
        assert cut["type"] == "response.incomplete"
        await last(socket, previous_response_id=cut["response"]["id"], input="Go on.")
        assert len(said(backend)) == 3


async def test_a_client_that_has_left_before_it_is_accepted_is_no_error() -> None:
    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(_: Any) -> None:
        raise OSError

    room = Holding(1)
    scope = {"type": "websocket", "headers": [], "state": {"share": Share(room, "one"), "charged": "one"}}
    await Conversation(WebSocket(scope, receive, send), room, Crowd(1), BodyTurns()).run()
