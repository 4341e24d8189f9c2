"""The LAN door: callers and addresses that it takes, and how it comes and goes with its keys."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from cheapkeys import Checks, checks
from patience import until

from sealring.edge.access.gate import Gate
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope
from sealring.edge.http.app import PATHS, create_app
from sealring.edge.http.server import HttpServer
from sealring.gateway.lan import door as module
from sealring.gateway.lan.certificate import ROOT_FILE
from sealring.gateway.lan.door import LanDoor
from sealring.mesh.errors import SealringError
from sealring.mesh.system.addresses import free_port
from sealring.mesh.system.networks import OwnAddress
from sealring.testing import ScriptedBackend

__all__ = ["checks"]

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


class House:
    """A door, its keys, and clients of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = KeyFile(folder)
        moments = count(0, 60)
        self.gate = Gate(self.keys, required=True, clock=lambda: next(moments))
        self.port = free_port()
        self.tried = 0
        self.own = [OwnAddress("127.0.0.1", "en0")]

    def door(self, listen: str | None = None) -> LanDoor:
        app = create_app(ScriptedBackend(), exposition=lambda: b"", gate=self.gate)
        listen = listen or f"0.0.0.0:{self.port}"

        def serve(**options: Any) -> HttpServer:
            self.tried += 1
            return HttpServer(app, **options)

        return LanDoor(self.folder, listen, "attic", self.gate, serve)

    @contextlib.asynccontextmanager
    async def open(self, listen: str | None = None) -> AsyncIterator[LanDoor]:
        door = self.door(listen)
        running = asyncio.create_task(door.run())
        try:
            yield door
        finally:
            running.cancel()
            await asyncio.wait((running,))
            await door.stop()

    def client(self, key: str = "", **headers: str) -> httpx.AsyncClient:
        given = {"authorization": f"Bearer {key}"} if key else {}
        root = str(self.folder / ROOT_FILE)
        return httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{self.port}", verify=root, headers=given | headers, timeout=60
        )


@pytest.fixture
def house(tmp_path: Path, checks: Checks, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    made = House(tmp_path / "lan")
    monkeypatch.setattr(module, "house_addresses", lambda: made.own)
    return made


async def test_nothing_is_answered_without_a_key_but_that_it_lives(house: House) -> None:
    """No path and no header changes that."""
    key, _ = house.keys.create([Scope.INFERENCE])
    async with house.open() as door, house.client() as stranger, house.client(key) as phone:
        await until(lambda: bool(door.addresses()))
        paths = [path.replace("{model}", "demo") for _, path, _ in PATHS.operations()]
        for path in (
            *paths,
            "/",
            "/docs",
            "/openapi.json",
            "/data/cluster",
            "/page.js",
            "/unknown",
            "//",
            "/health/",
        ):
            expected = 200 if path == "/health/live" else 401
            for method in ("GET", "POST"):
                assert (await stranger.request(method, path)).status_code in (expected, 405), path
        for tricks in (
            {"host": "localhost"},
            {"host": "evil.example", "origin": "https://evil.example"},
            {"x-forwarded-for": "127.0.0.1", "forwarded": "for=127.0.0.1"},
            {"authorization": "Bearer x"},
            {"authorization": f"Basic {key}"},
            {"cookie": f"authorization=Bearer {key}"},
        ):
            assert (await stranger.get("/v1/models", headers=tricks)).status_code == 401, tricks
        answer = await stranger.options("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
        assert (await phone.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert (await phone.get("/health")).status_code == 200
        for path in ("/data/cluster", "/page.js"):
            assert (await phone.get(path)).status_code == 404, "the dashboard is not behind it"
        assert (await phone.get("/metrics")).status_code == 403


async def test_it_closes_with_its_last_key_and_opens_with_another(house: House) -> None:
    async with house.open() as door:
        for _ in range(3):
            await asyncio.sleep(0.02)
        assert not door.addresses()
        with pytest.raises(httpx.ConnectError):
            async with house.client() as client:
                await client.get("/health/live")
        for _ in range(2):
            key, record = house.keys.create([Scope.INFERENCE])
            await until(lambda: bool(door.addresses()))
            async with house.client(key) as client:
                assert (await client.get("/v1/models")).status_code == 200
                house.keys.revoke(record.id)
                await until(lambda: not door.addresses())
                with pytest.raises(httpx.HTTPError):
                    await client.get("/v1/models")


@pytest.mark.parametrize("lost", ["removed", "damaged", "shown"])
async def test_a_key_file_that_is_lost_closes_it(house: House, lost: str) -> None:
    """Without keys everybody would be let in elsewhere, had there been none when the gateway began."""
    key, _ = house.keys.create([Scope.INFERENCE])
    file = house.keys.file
    async with house.open() as door, house.client(key) as client:
        await until(lambda: bool(door.addresses()))
        assert (await client.get("/v1/models")).status_code == 200
        changes: dict[str, Callable[[], Any]] = {
            "removed": file.unlink,
            "damaged": lambda: file.write_bytes(b"{}"),
            "shown": lambda: (file.write_bytes(file.read_bytes() + b" "), file.chmod(0o644)),
        }
        changes[lost]()
        with contextlib.suppress(httpx.HTTPError):
            assert (await client.get("/v1/models")).status_code == 401
        await until(lambda: not door.addresses())


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has one address of loopback")
async def test_it_answers_at_addresses_of_the_house_alone(house: House) -> None:
    """It listens at all, also at those of a VPN and public ones. They may change."""
    house.keys.create([Scope.INFERENCE])
    any_name = ssl.create_default_context()
    any_name.check_hostname, any_name.verify_mode = False, ssl.CERT_NONE
    async with house.open() as door, house.client() as near:
        for host, other in (("127.0.0.2", "127.0.0.3"), ("127.0.0.3", "127.0.0.2")):
            house.own[:] = [OwnAddress(host, "en0")]
            await until(lambda host=host: door.addresses() == [f"{host}:{house.port}"])
            _, writer = await asyncio.open_connection(host, house.port, ssl=any_name)
            writer.close()
            reader, writer = await asyncio.open_connection(other, house.port)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            assert (await near.get("/health/live")).status_code == 200, "this machine itself"


async def test_a_port_that_is_taken_is_tried_again(house: House) -> None:
    """The gateway goes on without the door meanwhile."""
    house.keys.create([Scope.INFERENCE])
    taken = await asyncio.start_server(lambda *_: None, "0.0.0.0", house.port)
    async with house.open() as door:
        await until(lambda: house.tried > 2)
        assert not door.addresses()
        taken.close()
        await taken.wait_closed()
        await until(lambda: bool(door.addresses()))


async def test_without_the_setting_it_makes_nothing_and_never_opens(house: House) -> None:
    house.keys.create([Scope.INFERENCE])
    before = sorted(house.folder.iterdir())
    door = LanDoor(house.folder, None, "attic", house.gate, lambda **_: pytest.fail("it opens"))
    running = asyncio.create_task(door.run())
    for _ in range(3):
        await asyncio.sleep(0.02)
    assert not door.addresses()
    assert sorted(house.folder.iterdir()) == before
    running.cancel()
    await asyncio.wait((running,))
    await door.stop()


async def test_it_is_reached_where_it_was_told_to_listen_and_nowhere_else(house: House) -> None:
    key, _ = house.keys.create([Scope.INFERENCE])
    async with house.open(f"127.0.0.1:{house.port}") as door, house.client(key) as client:
        await until(lambda: bool(door.addresses()))
        assert door.addresses() == [f"127.0.0.1:{house.port}"]
        assert (await client.get("/v1/models")).status_code == 200


async def test_it_names_no_public_address_of_this_machine(house: House) -> None:
    """Nor does it answer there: the root is good for addresses of a house alone."""
    house.keys.create([Scope.INFERENCE])
    house.own[:] = [OwnAddress("127.0.0.2", "en0")]
    async with house.open(f"127.0.0.3:{house.port}") as door, house.client() as near:
        with pytest.raises(httpx.HTTPError):
            await near.get("/health/live")
        assert not door.addresses()


def test_a_damaged_file_of_keys_does_not_keep_the_gateway_from_starting(house: House) -> None:
    house.keys.create([Scope.INFERENCE])
    house.keys.file.write_bytes(b"{}")
    assert not Gate(house.keys, required=True).usable_keys


def test_an_address_that_is_none_is_refused(house: House) -> None:
    with pytest.raises(SealringError):
        house.door("nowhere")
