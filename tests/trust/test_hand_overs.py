"""Walks the table of hand-overs in docs/trust.md: nobody is kept out by those who wait.

At each hand-over of the edge a stranger, bad keys and a greedy key take what they can. An honest key is
refused nothing meanwhile, and liveness answers. All come from one address, as behind a proxy, and strangers
come from others too where the machine has them. A row whose test is in another file needs no walk here.

The gateway's loopback and its LAN door are walked, the port for members, and a proxy: it has one key, so
nobody is greedy there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import json
import re
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from cheapkeys import Checks, checks
from grpc_health.v1 import health_pb2, health_pb2_grpc
from patience import until
from usagekit import nothing_used

from sealring.cli.proxy import OwnGate, digest_of
from sealring.edge.access import gate as gate_module
from sealring.edge.access.gate import Gate, Limits
from sealring.edge.access.interceptor import GateInterceptor, by_key
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope, new_key
from sealring.edge.http import app, guard, server
from sealring.edge.inference.service import SERVICE, InferenceService
from sealring.gateway.door import MEMBERS, MemberDoor
from sealring.gateway.lan.certificate import ROOT_FILE, LanTls
from sealring.gateway.settings import GatewaySettings
from sealring.mesh.pki import PeerIdentity, Role, TlsMaterial, role_server_name
from sealring.mesh.rpc import TlsStore, channel_options, secure_channel, server_credentials
from sealring.mesh.rpc import server as rpc
from sealring.testing import ScriptedBackend, serve_edge
from sealring.testing.authority import Authority, make_member, make_roster
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc as inference_grpc

__all__ = ["checks"]

ROOT = Path(__file__).parents[2]
UNITS = {"": 1, " KiB": 1 << 10, " MiB": 1 << 20}
ADDRESSES = [f"127.0.0.{number}" for number in ((1, 2, 3, 4, 5) if sys.platform == "linux" else (1,))]
"""macOS has the first alone."""

POST = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
SOCKET = (
    "GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
CHAT = json.dumps({"model": "demo", "stream": True, "messages": [{"role": "user", "content": "hello"}]})
ASK = inference.GenerateRequest(model="demo", envelope=inference.Envelope(clear=inference.Prompt(text="x")))
LIST, CHECK = inference.ListModelsRequest(), health_pb2.HealthCheckRequest()
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\0\4\1\0\0\0\0"
"""The preface of a client: its settings, and that it has the server's (RFC 9113 section 3.4)."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def get(path: str) -> str:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n"


def rows() -> list[dict[str, str]]:
    """The table's rows, by the names of its columns."""
    section = (ROOT / "docs/trust.md").read_text("utf-8").partition("\n## Who waits where\n")[2]
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], each, strict=True)) for each in cells[2:]]


class Stage:
    """A served edge, and those who come to it."""

    def __init__(
        self,
        port: int,
        backend: ScriptedBackend,
        keys: KeyFile,
        gate: Gate,
        folder: Path,
        tls: ssl.SSLContext | None = None,
        only: str = "",
    ) -> None:
        """`only` is the one key of a door that has no others."""
        self.port = port
        self._tls: Any = {} if tls is None else {"ssl": tls, "server_hostname": "localhost"}
        self._only = only
        self.folder = folder
        self.gate = gate
        self.backend = backend
        self.greedy, self.learnt, self.honest = (keys.create([Scope.INFERENCE])[0] for _ in range(3))
        if only:
            self.honest, self.greedy = only, new_key().text
        self._keys = keys
        self._opened = contextlib.ExitStack()

    async def open(self, said: str, key: str | None = None, address: str = "127.0.0.1") -> Connection:
        """A connection over which this was said, with a key. Who says nothing does not shake hands either."""
        tls = self._tls if said else {}
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0), **tls)
        self._opened.callback(writer.close)
        head, _, rest = said.partition("\r\n\r\n")
        authorization = f"authorization: Bearer {key}\r\n" if key else ""
        writer.write(f"{head.rstrip()}\r\n{authorization}\r\n{rest}".encode())
        return reader, writer

    async def status(self, said: str, key: str | None = None, address: str = "127.0.0.1") -> int:
        """The status of an answer; 0 where the connection ended before it."""
        reader, writer = await self.open(said, key, address)
        try:
            line = await reader.readline()
        except ConnectionError:
            line = b""
        writer.close()
        return int(line.split()[1]) if line else 0

    def bad_keys(self) -> list[str | None]:
        """None at all, one that nobody has, and a wrong one with an id that was learnt."""
        wrong = new_key().text
        return [None, wrong, f"{self.learnt[:20]}_{wrong.rpartition('_')[2]}"]

    async def check_honest(self) -> None:
        """A key that was never used, one that was, and liveness: each is answered on a new connection."""
        fresh = self._only or self._keys.create([Scope.INFERENCE])[0]
        for said, key in (
            (get("/v1/models"), fresh),
            (get("/v1/models"), self.honest),
            (get("/health/live"), None),
        ):
            assert await self.status(said, key) == 200

    def close(self) -> None:
        self._opened.close()


Walk = Callable[[Stage], Awaitable[None]]
WALKS: dict[str, Walk] = {}


def walk(name: str) -> Callable[[Walk], Walk]:
    """Tries the hand-over of this name."""

    def note(tried: Walk) -> Walk:
        WALKS[name] = tried
        return tried

    return note


@walk("accepted")
async def accepted(stage: Stage) -> None:
    mine = await stage.open(get("/v1/models"), stage.honest)
    await mine[0].readuntil(b"data")
    for number in range(3 * server.MAX_CONNECTIONS):
        await stage.open("", address=ADDRESSES[number % len(ADDRESSES)])
        if number % 5 == 0:
            await stage.status(get("/v1/models"), stage.greedy)
            await stage.check_honest()
    mine[1].write(f"{get('/health/live')}\r\n".encode())
    assert b"live" in await mine[0].readuntil(b"live"), "an idle connection of who has few is kept"


@walk("headed")
async def headed(stage: Stage) -> None:
    for number in range(2 * server.MAX_CONNECTIONS):
        _, writer = await stage.open("", address=ADDRESSES[number % len(ADDRESSES)])
        writer.write(get("/v1/models").encode())
    await stage.check_honest()


@walk("read")
async def read(stage: Stage) -> None:
    ping, small = b"\x89\x80\0\0\0\0", b"\x81\x81\0\0\0\0x"
    for flood in (ping, small):
        reader, writer = await stage.open(SOCKET, stage.greedy)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(flood * 50_000)
        await stage.check_honest()
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass


@walk("hashed")
async def hashed(stage: Stage) -> None:
    said, refused = get("/v1/models"), set[int]()
    for _ in range(gate_module.ATTEMPTS_AT_ONCE + 5):
        for bad in stage.bad_keys():
            refused.add(await stage.status(said, bad))
    assert refused == {401, 429}
    await stage.check_honest()
    assert await stage.status(said, stage.learnt) == 429, "the key that is guessed at this address"
    assert await stage.status(said, stage.greedy) == 200


@walk("open to all")
async def open_to_all(stage: Stage) -> None:
    for _ in range(30):
        await stage.status(get("/health"))
        await stage.status(get("/"))
    assert await stage.status(get("/health")) == 429
    await stage.check_honest()


@walk("refused")
async def refused(stage: Stage) -> None:
    long = f"{POST}content-length: 5000000\r\n\r\nx"
    large = f"{POST}content-length: 99000000\r\n\r\nx"
    for number in range(4 * guard.MAX_DRAINS):
        for key, said in ((stage.greedy, large), *((bad, long) for bad in stage.bad_keys())):
            await stage.open(said, key, ADDRESSES[number % len(ADDRESSES)])
        await stage.check_honest()
    reader, _ = await stage.open(large, stage.honest)
    assert b"body_too_large" in await reader.readuntil(b"body_too_large"), "who is refused sees why"


@walk("admitted")
async def admitted(stage: Stage) -> None:
    stage.backend.held = asyncio.Event()
    asked = f"{POST}content-length: {len(CHAT)}\r\n\r\n{CHAT}"
    for _ in range(guard.MAX_REQUESTS):
        await stage.open(asked, stage.greedy)
    await until(lambda: len(stage.backend.requests) == guard.MAX_REQUESTS // 2)
    assert await stage.status(asked, stage.greedy) == 429, "half of what others leave"
    await stage.check_honest()
    stage.backend.held.set()
    assert await stage.status(asked, stage.honest) == 200


@walk("silent")
async def silent(stage: Stage) -> None:
    mine = await stage.open(SOCKET, stage.honest)
    await mine[0].readuntil(b"\r\n\r\n")
    for _ in range(3 * app.MAX_SOCKETS):
        assert await stage.status(SOCKET, stage.greedy) == 101
        await stage.check_honest()
    assert await stage.status(SOCKET, stage.honest) == 101
    mine[1].write(b"\x81\x82\0\0\0\0{}")
    assert b"bad_field" in await mine[0].readuntil(b"bad_field"), "who has fewer is left alone"


@walk("sent")
async def sent(stage: Stage) -> None:
    stage.backend.texts = ["x" * 100_000] * 50
    for _ in range(6):
        await stage.open(f"{POST}content-length: {len(CHAT)}\r\n\r\n{CHAT}", stage.greedy)
    await until(lambda: len(stage.backend.requests) == 6)
    await stage.check_honest()


@walk("accepted by gRPC")
async def accepted_by_grpc(stage: Stage) -> None:
    """By the same gate. A call without a key asks for liveness."""
    service = InferenceService(stage.backend, lambda: b"", nothing_used)
    server = rpc.Server(
        [(inference_grpc.add_InferenceServicer_to_server, service, SERVICE)],
        port=rpc.Port(connections=40, ping=1000.0),
        interceptors=[GateInterceptor(by_key(stage.gate))],
    )
    port = server.listen("127.0.0.1:0", None)
    await server.start()

    key = {"metadata": [("authorization", f"Bearer {stage.honest}")], "wait_for_ready": True}

    def connected() -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=rpc.CHANNEL_OPTIONS)

    stage.backend.held = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        mine = inference_grpc.InferenceStub(await stack.enter_async_context(connected()))
        answering = mine.Generate(ASK, **key)
        await until(lambda: bool(stage.backend.requests))
        for number in range(5 * 40):
            address = ADDRESSES[number % len(ADDRESSES)]
            _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            writer.write(HTTP2)
            stack.callback(writer.close)
            if number % 50 == 49:
                async with connected() as channel:
                    await inference_grpc.InferenceStub(channel).ListModels(LIST, **key)
        async with connected() as channel:
            live = await health_pb2_grpc.HealthStub(channel).Check(CHECK, wait_for_ready=True)
        assert live.status == health_pb2.HealthCheckResponse.SERVING
        stage.backend.held.set()
        assert [event async for event in answering], "who is answered is left alone"
    await accepted_by_certificate(stage.backend)


async def accepted_by_certificate(backend: ScriptedBackend) -> None:
    """At the port for members: strangers that shake hands or do not, others of the cluster without a right,
    and a member that opens more connections than the port has, and asks over each."""
    now, authority = time.time(), Authority.create("demo", now=time.time())
    greedy_one, honest_one = make_member(), make_member()
    roster = make_roster("demo", [greedy_one, honest_one], (), now=now)
    stranger = make_member()

    def own(role: Role, identifier: str) -> TlsMaterial:
        return authority.material(PeerIdentity("demo", role, identifier), now=now)

    door = MemberDoor("demo", lambda: roster, Limits(key_per_second=1e6, key_at_once=40))
    service = InferenceService(backend, lambda: b"", nothing_used)
    server = rpc.Server(
        [(inference_grpc.add_InferenceServicer_to_server, service, SERVICE)],
        port=dataclasses.replace(MEMBERS, connections=16),
        interceptors=[GateInterceptor(door.admit)],
    )
    port = server.listen("127.0.0.1:0", server_credentials(TlsStore(own(Role.GATEWAY, "gateway"))))
    await server.start()

    def connected(identifier: str) -> inference_grpc.InferenceStub:
        options = channel_options(role_server_name(Role.GATEWAY))
        channel = secure_channel(f"127.0.0.1:{port}", own(Role.CLIENT, identifier), options)
        stack.push_async_callback(channel.close)
        return inference_grpc.InferenceStub(channel)

    asked = len(backend.requests)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        backend.held = asyncio.Event()
        answering = connected(honest_one.id).Generate(ASK, wait_for_ready=True)
        await until(lambda: len(backend.requests) == asked + 1)

        async def greedily() -> None:
            """Returns once it is answered, or was sent away."""
            before, call = len(backend.requests), connected(greedy_one.id).Generate(ASK)
            reading = asyncio.ensure_future(call.read())
            await until(lambda: len(backend.requests) > before or reading.done())
            stack.callback(call.cancel)
            stack.callback(reading.cancel)

        for number in range(2 * 16):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HTTP2)
            stack.callback(writer.close)
            with pytest.raises(grpc.aio.AioRpcError):
                await connected(stranger.id).ListModels(LIST, timeout=60)
            await greedily()
            if number % 8 == 7:
                await connected(honest_one.id).ListModels(LIST, wait_for_ready=True)
        backend.held.set()
        assert [event async for event in answering], "who is answered is left alone"


@pytest.fixture
async def stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: Checks, request: pytest.FixtureRequest
) -> AsyncIterator[Stage]:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 40)
    monkeypatch.setattr(guard, "MAX_REQUESTS", 16)
    monkeypatch.setattr(guard, "MAX_DRAINS", 3)
    monkeypatch.setattr(app, "MAX_SOCKETS", 3)
    backend, keys = ScriptedBackend(), KeyFile(tmp_path / "state")
    keys.create([Scope.READ])
    door, own = request.param, new_key().text
    limits = Limits(key_per_second=1e6, peer_per_second=1e-3)
    gate = Gate(keys, limits, required=door == "LAN", clock=lambda: 0.0)
    tls = LanTls(tmp_path / "lan", "demo", list) if door == "LAN" else None
    trusted = ssl.create_default_context(cafile=str(tmp_path / "lan" / ROOT_FILE)) if tls else None
    lets_in = OwnGate(digest_of(own)) if door == "proxy" else gate
    async with serve_edge(backend, tls=tls, gate=lets_in) as port:
        made = Stage(port, backend, keys, gate, tmp_path, trusted, own if door == "proxy" else "")
        try:
            assert await made.status(get("/v1/models"), made.honest) == 200
            yield made
        finally:
            made.close()


STRANGERS = ("accepted", "headed", "open to all", "refused")
"""Hand-overs at which nobody needs a key to take something."""

WALKED = [
    *(("loopback", name) for name in WALKS),
    *(("LAN", name) for name in WALKS if name != "accepted by gRPC"),
    *(("proxy", name) for name in STRANGERS),
]


@pytest.mark.parametrize(("stage", "name"), WALKED, indirect=["stage"])
async def test_an_honest_key_is_refused_nothing(name: str, stage: Stage) -> None:
    async with asyncio.timeout(200):
        await WALKS[name](stage)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["hand-over"])
def test_the_table_says_what_the_code_does(row: dict[str, str]) -> None:
    assert all(row.values())
    files = re.findall(r"`([\w/]+\.py)`", row["bound"])
    assert files
    modules = [importlib.import_module(f"sealring.{file[:-3].replace('/', '.')}") for file in files]
    for name, number, unit in re.findall(r"`(\w+)` ([\d,.]+)((?: KiB| MiB)?)", row["bound"]):
        said = float(number.rstrip(",.").replace(",", "")) * UNITS[unit]
        if name.islower():
            assert GatewaySettings.model_fields[name].default == said
        else:
            assert said in [getattr(module, name, None) for module in modules], name


def test_every_hand_over_is_tried() -> None:
    walked = set[str]()
    for row in rows():
        tried = re.findall(r"`([\w/]+\.py)` ((?:`[\w ]+`(?:, )?)+)", row["tried in"])
        assert tried
        for file, names in tried:
            text = (ROOT / "tests" / file).read_text("utf-8")
            for name in re.findall(r"`([\w ]+)`", names):
                if file == "trust/test_hand_overs.py":
                    walked.add(name)
                    assert name == row["hand-over"]
                else:
                    assert re.search(rf"def {name}\(", text), name
    assert walked == set(WALKS)
