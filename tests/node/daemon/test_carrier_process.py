"""How a daemon lets its carrier in: by knocking at a port until somebody listens there."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from sealring.mesh.errors import EpochEnded
from sealring.node.daemon import carrier_process as daemon_carrier
from sealring.v1 import engine_pb2


class Silent:
    """Connections to a port that drops those who come before somebody listens, as a Mac's."""

    def __init__(self, until: int) -> None:
        self.until, self.attempts = until, 0
        self.closed = 0

    def __call__(self) -> Silent:
        self.attempts += 1
        return self

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed += 1

    def setblocking(self, flag: bool) -> None:
        assert flag is False

    def connect_ex(self, address: tuple[str, int]) -> int:
        assert address == ("127.0.0.1", 4242)
        return errno.EINPROGRESS

    def getpeername(self) -> tuple[str, int]:
        if self.attempts < self.until:
            raise OSError(errno.ENOTCONN, "not connected")
        return ("127.0.0.1", 4242)


async def test_a_knock_that_is_not_answered_at_once_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Silent(until=5)
    monkeypatch.setattr(daemon_carrier.socket, "socket", silent)
    monkeypatch.setattr(daemon_carrier, "_KNOCK_PAUSE", 0.0)
    monkeypatch.setattr(daemon_carrier, "_KNOCK_SECONDS", 200.0)
    knocking = asyncio.create_task(daemon_carrier._knock(4242))
    while silent.attempts < 5:
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (silent.attempts, silent.closed) == (5, 4), "it stays when it was let in"
    knocking.cancel()
    await asyncio.wait((knocking,))
    assert silent.closed == 5


async def test_a_knock_finds_who_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        knocking = asyncio.create_task(daemon_carrier._knock(held.getsockname()[1]))
        await asyncio.sleep(0)
        held.listen()
        held.setblocking(False)
        visitor, _ = await asyncio.get_running_loop().sock_accept(held)
        knocking.cancel()
        await asyncio.wait((knocking,))
        with visitor:
            assert await asyncio.get_running_loop().sock_recv(visitor, 1) == b""


@pytest.mark.parametrize(("port", "knocks"), [(-1, 0), (0, 0), (1, 1), (65535, 1), (65536, 0)])
async def test_nobody_knocks_where_there_is_no_port(
    monkeypatch: pytest.MonkeyPatch, port: int, knocks: int
) -> None:
    tried: list[int] = []

    class Visitor:
        def __enter__(self) -> Visitor:
            return self

        def __exit__(self, *_: object) -> None: ...

        def setblocking(self, flag: bool) -> None: ...

        def connect_ex(self, address: tuple[str, int]) -> None:
            tried.append(address[1])

        def getpeername(self) -> None: ...

    monkeypatch.setattr(daemon_carrier.socket, "socket", Visitor)
    monkeypatch.setattr(daemon_carrier, "_KNOCK_PAUSE", 0.0)
    knocking = asyncio.create_task(daemon_carrier._knock(port))
    for _ in range(5):
        await asyncio.sleep(0)
    assert knocking.done() == (not knocks)
    knocking.cancel()
    await asyncio.wait((knocking,))
    assert tried == [port] * knocks


async def test_a_knock_is_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Silent(until=10**9)
    monkeypatch.setattr(daemon_carrier.socket, "socket", silent)
    monkeypatch.setattr(daemon_carrier, "_KNOCK_PAUSE", 0.0)
    monkeypatch.setattr(daemon_carrier, "_KNOCK_SECONDS", 0.001)
    await daemon_carrier._knock(4242)
    assert silent.closed == silent.attempts


async def test_a_carrier_that_did_not_start_takes_no_orders() -> None:
    """Its epoch ends with a reason, and no step waits for it."""
    carrier = daemon_carrier.CarrierProcess(lambda error: None)
    with pytest.raises(EpochEnded) as ended:
        carrier.give(engine_pb2.StartCarrier())
    with pytest.raises(EpochEnded):
        await carrier.look()
    assert (ended.value.reason, carrier.pid, carrier._answers) == ("CHILD_ENDED", 0, {})
