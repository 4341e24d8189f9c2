"""One address cannot have all of a port's connections; whoever called with a certificate keeps its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from leaftest import MEMBER, material
from patience import PATIENCE_SECONDS

from sealring.mesh.pki.authority import ClusterCA
from sealring.mesh.rpc import connections
from sealring.mesh.rpc import server as rpc
from sealring.mesh.rpc.connections import LATE_SECONDS, ConnectionWatch
from sealring.mesh.rpc.server import Port, Server
from sealring.mesh.rpc.tls import (
    TlsStore,
    channel_credentials,
    channel_options,
    server_credentials,
)

SHARE = 3


@pytest.fixture(params=[False, socket.has_dualstack_ipv6()], ids=["ipv4", "both"])
def listening(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """With IPv4 alone, and as gRPC listens to both versions."""
    both = {"family": socket.AF_INET6, "dualstack_ipv6": True} if request.param else {}
    with socket.create_server(("" if both else "127.0.0.1", 0), **both) as made:
        yield made


def connected(listening: socket.socket, stack: contextlib.ExitStack) -> socket.socket:
    """The caller's end of a connection that this process has accepted."""
    end = stack.enter_context(socket.create_connection(("127.0.0.1", listening.getsockname()[1])))
    stack.enter_context(listening.accept()[0])
    end.settimeout(PATIENCE_SECONDS)
    return end


def is_open(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        return end.recv(1) != b""
    except BlockingIOError:
        return True


def test_beyond_an_addresss_share_the_late_go_and_then_the_newest(listening: socket.socket) -> None:
    """A connection with a certificate's call is never counted again."""
    now = 0.0
    watch, port = ConnectionWatch(SHARE, clock=lambda: now), listening.getsockname()[1]
    with contextlib.ExitStack() as stack:

        def some(number: int) -> list[socket.socket]:
            made = []
            for _ in range(number):
                made.append(connected(listening, stack))
                watch.look(port)
            return made

        (member,) = some(1)
        watch.vouch(f"ipv4:127.0.0.1:{member.getsockname()[1]}")
        first = some(SHARE)
        second = some(2)
        assert [is_open(each) for each in (*first, *second)] == [True] * SHARE + [False] * 2
        now += LATE_SECONDS + 1
        assert watch.look(port) == 0, "there is room for all that are left"
        third = some(2)
        assert [is_open(each) for each in (*first, *third)] == [False] * 2 + [True] * (SHARE - 2 + 2)
        assert is_open(member)


def test_a_caller_with_a_key_goes_after_all_strangers_of_its_address(listening: socket.socket) -> None:
    """Though it has been there for long, and they have come just now."""
    now = 0.0
    watch, port = ConnectionWatch(SHARE, clock=lambda: now), listening.getsockname()[1]
    with contextlib.ExitStack() as stack:
        client = connected(listening, stack)
        watch.look(port)
        watch.welcome(f"ipv4:127.0.0.1:{client.getsockname()[1]}")
        now += LATE_SECONDS + 1
        strangers = [connected(listening, stack) for _ in range(3 * SHARE)]
        assert watch.look(port) == 3 * SHARE + 1 - SHARE
        now += LATE_SECONDS + 1
        strangers += [connected(listening, stack) for _ in range(SHARE)]
        assert watch.look(port) == SHARE
        assert is_open(client)
        assert sum(map(is_open, strangers)) == SHARE - 1


def test_a_crowd_that_takes_all_descriptors_is_shut_out(listening: socket.socket) -> None:
    """With none left to list them with."""
    watch, port = ConnectionWatch(SHARE), listening.getsockname()[1]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        crowd = [connected(listening, stack) for _ in range(SHARE + 2)]
        most = max(int(name) for name in os.listdir("/dev/fd"))
        while (filled := os.dup(listening.fileno())) <= most:
            stack.callback(os.close, filled)
        stack.callback(os.close, filled)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (filled + 1, limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(listening.fileno())
        assert watch.look(port) == 2
        assert sum(map(is_open, crowd)) == SHARE


def test_connections_of_other_ports_are_left_alone(listening: socket.socket) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(SHARE + 1):
            connected(listening, stack)
        assert ConnectionWatch(SHARE).look(listening.getsockname()[1] + 1) == 0


def test_an_end_that_is_vouched_for_is_forgotten_with_its_connection(listening: socket.socket) -> None:
    """Another caller may have its number next."""
    watch, port = ConnectionWatch(0), listening.getsockname()[1]
    with contextlib.ExitStack() as stack:
        first = connected(listening, stack)
        number = first.getsockname()[1]
        watch.vouch(f"ipv4:127.0.0.1:{number}")
        watch.vouch("unix:")
        assert watch.look(port) == 0
        reset = struct.pack("ii", 1, 0)  # so that its number is free at once
        first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    assert watch.look(port) == 0
    with contextlib.ExitStack() as stack:
        again = stack.enter_context(socket.create_connection(("127.0.0.1", port), None, ("", number)))
        stack.enter_context(listening.accept()[0])
        assert again.getsockname()[1] == number
        assert watch.look(port) == 1


async def healthy(channel: grpc.aio.Channel) -> None:
    answer = await health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS
    )
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def answered(channel: grpc.aio.Channel) -> bool:
    """Whether a call was answered; False if its connection ended."""
    try:
        await healthy(channel)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    return True


async def test_half_open_connections_of_one_address_keep_no_member_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are as many as the port takes in all, again and again. A member that is connected stays so, and a
    new one gets in. Until its first call has arrived it counts as a stranger and may have to connect again.
    """
    ca = ClusterCA.create(tmp_path, "demo", now=time.time())
    own = material(ca)
    slow = dict(rpc.SERVER_OPTIONS) | {"grpc.server_handshake_timeout_ms": 10_000 * 1000}
    monkeypatch.setattr(rpc, "SERVER_OPTIONS", list(slow.items()))
    server = Server([], port=Port(connections=40, share=SHARE))
    address = f"127.0.0.1:{server.listen('127.0.0.1:0', server_credentials(TlsStore(own)))}"
    await server.start()
    strangers: list[asyncio.StreamWriter] = []

    def channel() -> grpc.aio.Channel:
        options = channel_options(MEMBER.server_name)
        return grpc.aio.secure_channel(address, channel_credentials(own), options=options)

    async with channel() as member:
        await healthy(member)
        watching = health_pb2_grpc.HealthStub(member).Watch(health_pb2.HealthCheckRequest())
        await watching.read()
        host, _, port = address.rpartition(":")
        for _ in range(3):
            strangers += [(await asyncio.open_connection(host, int(port)))[1] for _ in range(60)]
            async with channel() as newcomer, asyncio.timeout(PATIENCE_SECONDS):
                while not await answered(newcomer):
                    pass
        assert not watching.done()
        watching.cancel()
    for one in strangers:
        one.close()
    await server.stop(0)


async def test_an_idle_connection_ends() -> None:
    """Though its client answers all that is asked of it."""
    server = Server([], port=Port(idle=0.2))
    port = server.listen("127.0.0.1:0", None)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
    await server.stop(0)


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The looks of all watches; they follow each other at once, and nothing but an announcement makes one."""
    looks: list[int] = []
    monkeypatch.setattr(connections, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(connections, "UNANNOUNCED_SECONDS", 1000.0)
    look = ConnectionWatch.look

    def noted(watch: ConnectionWatch, port: int) -> int:
        looks.append(port)
        return look(watch, port)

    monkeypatch.setattr(ConnectionWatch, "look", noted)
    return looks


async def test_a_port_with_tls_is_looked_at_when_a_connection_is_opened_and_not_in_between(
    tmp_path: Path, paced: list[int]
) -> None:
    """One is enough that says nothing: its handshake has begun, as far as gRPC knows."""
    credentials = server_credentials(TlsStore(material(ClusterCA.create(tmp_path, "demo", now=time.time()))))
    server = Server([], port=Port(share=SHARE))
    port = server.listen("127.0.0.1:0", credentials)
    await server.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not paced:
            await asyncio.sleep(0)
        for _ in range(2):
            before = len(paced)
            (_, stranger) = await asyncio.open_connection("127.0.0.1", port)
            while len(paced) == before:
                await asyncio.sleep(0.001)
            stranger.close()
    await server.stop(0)
    assert set(paced) == {port}
    assert len(paced) < 10, "nothing else made it look"
    assert not ConnectionWatch.running


def test_connections_over_both_protocols_are_found_and_no_other_descriptor_is(tmp_path: Path) -> None:
    """All addresses are read by the rules of one family."""
    with contextlib.ExitStack() as stack:
        both = {"family": socket.AF_INET6, "dualstack_ipv6": True}
        listening = stack.enter_context(socket.create_server(("::", 0), **both))  # type: ignore[arg-type]
        ends, port = [], listening.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            ends.append(stack.enter_context(socket.create_connection((host, port))))
            stack.enter_context(listening.accept()[0])
        pair = [stack.enter_context(one) for one in socket.socketpair()]
        stack.enter_context((tmp_path / "file").open("w"))
        assert ConnectionWatch(0).look(port) == 2
        assert [is_open(one) for one in (*ends, *pair)] == [False, False, True, True]
