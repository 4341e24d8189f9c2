"""A member's programs: where they find gateways, whatever their own disk does."""

from __future__ import annotations

import time
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.calls import member, operator
from sealring.cli.calls.member import MemberChannels
from sealring.mesh.errors import Unavailable
from sealring.mesh.member import MachineState, save_machine_state
from sealring.mesh.pki import PeerIdentity, Role
from sealring.mesh.rpc import reach
from sealring.testing.authority import Authority

PEER = PeerIdentity("demo", Role.CLIENT, "one")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    authority = Authority.create("demo", now=time.time())
    own = authority.material(PEER, now=time.time())
    pin = authority.root.fingerprint
    save_machine_state(tmp_path, MachineState(PEER, "one", "127.0.0.1:1", pin, authority.root, own, ""))
    return tmp_path


async def test_a_full_disk_keeps_nobody_from_finding_gateways(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk with room remembers the addresses for times without a coordinator, and for a coordinator that no
    gateway follows yet."""
    watching = True
    enrolled = ["gate"]

    @asynccontextmanager
    async def connect(*asked: Any, **options: Any) -> Any:
        async def call(method: str) -> Any:
            found = [
                SimpleNamespace(id=one, watching=watching, addresses=["127.0.0.1:2"] if watching else [])
                for one in enrolled
            ]
            return SimpleNamespace(gateways=found)

        yield SimpleNamespace(call=call)

    async def connected(address: str, *asked: Any, **options: Any) -> Any:
        async def close() -> None: ...

        return SimpleNamespace(address=address, close=close)

    def full(*asked: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(operator, "connect", connect)
    monkeypatch.setattr(reach, "connected", connected)
    channels = MemberChannels(folder)
    async with aclosing(channels):
        with monkeypatch.context() as disk:
            disk.setattr(member, "write_atomic", full)
            assert await channels.find() == ["127.0.0.1:2"]
        assert await channels.find() == ["127.0.0.1:2"]
        watching = False
        assert await channels.find() == ["127.0.0.1:2"], "those of the last time"

    written = (folder / "gateways.json").read_bytes()

    @asynccontextmanager
    async def away(*asked: Any, **options: Any) -> Any:
        raise Unavailable("away")
        yield

    monkeypatch.setattr(operator, "connect", away)
    channels = MemberChannels(folder)
    async with aclosing(channels):
        assert await channels.find() == ["127.0.0.1:2"], "those of the last time"

    enrolled = ["another"]
    monkeypatch.setattr(operator, "connect", connect)
    channels = MemberChannels(folder)
    async with aclosing(channels):
        with pytest.raises(Unavailable):  # it was evicted
            await channels.find()
    monkeypatch.setattr(operator, "connect", away)
    channels = MemberChannels(folder)
    async with aclosing(channels):
        with pytest.raises(Unavailable):
            await channels.find()
        for unread in (b'["127.0.0.1:2"]', b'{"gate": 2}', b"2", b"{"):
            (folder / "gateways.json").write_bytes(unread)
            with pytest.raises(Unavailable):
                await channels.find()
        (folder / "gateways.json").write_bytes(written)
        assert await channels.find() == ["127.0.0.1:2"]
