"""Connections that wait at a port keep nobody out, and callers with a certificate keep theirs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from leaftest import MEMBER, material
from patience import PATIENCE_SECONDS, until

from sealring.mesh.pki import ClusterCA
from sealring.mesh.rpc import (
    Server,
    TlsStore,
    channel_options,
    connections,
    secure_channel,
    server_credentials,
)
from sealring.mesh.rpc import server as rpc
from sealring.mesh.rpc.connections import ConnectionWatch
from sealring.mesh.rpc.server import Port

MOST = 3
RESET = struct.pack("ii", 1, 0)
"""So that a connection's number is free at once."""


@pytest.fixture(params=[False, socket.has_dualstack_ipv6()], ids=["ipv4", "both"])
def listening(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """With IPv4 alone, and as gRPC listens to both versions."""
    both = {"family": socket.AF_INET6, "dualstack_ipv6": True} if request.param else {}
    with socket.create_server(("" if both else "127.0.0.1", 0), **both) as made:
        yield made


def connected(
    listening: socket.socket, stack: contextlib.ExitStack, own: tuple[str, int] = ("127.0.0.1", 0)
) -> socket.socket:
    """The caller's end of a connection that this process has accepted."""
    server = "127.0.0.1", listening.getsockname()[1]
    end = stack.enter_context(socket.create_connection(server, None, own))
    stack.enter_context(listening.accept()[0])
    end.settimeout(PATIENCE_SECONDS)
    return end


def is_open(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        return end.recv(1) != b""
    except BlockingIOError:
        return True


def peer(end: socket.socket) -> str:
    """As gRPC names it."""
    return f"ipv4:{end.getsockname()[0]}:{end.getsockname()[1]}"


def test_the_oldest_of_whoever_has_most_goes_but_none_with_a_certificate(listening: socket.socket) -> None:
    watch, port = ConnectionWatch(MOST), listening.getsockname()[1]
    with contextlib.ExitStack() as stack:
        ends = []
        for _ in range(2 * MOST):
            ends.append(connected(listening, stack))
            watch.look(port)
            if len(ends) == 1:
                watch.vouch(peer(ends[0]), "member")
        assert [is_open(each) for each in ends] == [True] + [False] * (MOST - 1) + [True] * MOST


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has one address of loopback")
def test_many_addresses_keep_no_newcomer_out(listening: socket.socket) -> None:
    """None of them has more than any other, nor than who comes."""
    watch, port = ConnectionWatch(MOST), listening.getsockname()[1]
    with contextlib.ExitStack() as stack:
        strangers = [connected(listening, stack, (f"127.0.0.{number}", 0)) for number in range(2, 2 + MOST)]
        watch.look(port)
        newcomer = connected(listening, stack)
        assert watch.look(port) == 1
        assert is_open(newcomer)
        assert sum(map(is_open, strangers)) == MOST - 1


def test_a_connection_with_a_call_of_a_key_does_not_wait(listening: socket.socket) -> None:
    """Afterwards it waits under the name of the key, of which there are few beside strangers."""
    watch, port = ConnectionWatch(MOST), listening.getsockname()[1]
    with contextlib.ExitStack() as stack:
        client = connected(listening, stack)
        with watch.let_in(peer(client), "key"):
            strangers = [connected(listening, stack) for _ in range(3 * MOST)]
            assert watch.look(port) == 2 * MOST
            assert sum(map(is_open, strangers)) == MOST
        strangers += [connected(listening, stack) for _ in range(MOST)]
        watch.look(port)
        assert is_open(client)
        assert sum(map(is_open, strangers)) == MOST - 1
        with watch.let_in("unix:", "key"):
            pass


def test_a_key_with_more_calls_than_are_left_for_others_waits_with_all(listening: socket.socket) -> None:
    watch, port = ConnectionWatch(MOST), listening.getsockname()[1]
    with contextlib.ExitStack() as stack:
        greedy = [connected(listening, stack) for _ in range(3 * MOST)]
        for each in greedy:
            stack.enter_context(watch.let_in(peer(each), "greedy"))
        honest = connected(listening, stack)
        stack.enter_context(watch.let_in(peer(honest), "honest"))
        assert watch.look(port) > 0
        assert is_open(honest)
        assert sum(map(is_open, greedy)) <= 2 * MOST


def test_a_certificate_with_more_connections_than_are_left_for_others_waits_with_all(
    listening: socket.socket,
) -> None:
    """What has ended is charged to nobody, however often it was called over."""
    watch, port = ConnectionWatch(MOST), listening.getsockname()[1]
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            honest = connected(listening, stack)
            greedy = [connected(listening, stack) for _ in range(3 * MOST)]
            for each, name in [(honest, "honest"), *((each, "greedy") for each in greedy * 2)]:
                watch.vouch(peer(each), name)
            assert watch.look(port) > 0
            assert is_open(honest)
            assert MOST <= sum(map(is_open, greedy)) < 2 * MOST
            for each in (honest, *greedy):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        assert watch.look(port) == 0


def test_a_stranger_that_comes_again_by_the_same_port_is_shut_out_again(listening: socket.socket) -> None:
    """Before anybody has looked: its number does not say that the connection is another."""
    watch, port = ConnectionWatch(0), listening.getsockname()[1]
    own = ("127.0.0.1", 0)
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            end = connected(listening, stack, own)
            own = end.getsockname()[:2]
            assert watch.look(port) == 1
            assert not is_open(end)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def test_a_crowd_that_takes_all_descriptors_is_shut_out(listening: socket.socket) -> None:
    """With none left to list them with."""
    watch, port = ConnectionWatch(MOST), listening.getsockname()[1]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        crowd = [connected(listening, stack) for _ in range(MOST + 2)]
        most = max(int(name) for name in os.listdir("/dev/fd"))
        while (filled := os.dup(listening.fileno())) <= most:
            stack.callback(os.close, filled)
        stack.callback(os.close, filled)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (filled + 1, limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(listening.fileno())
        assert watch.look(port) == 2
        assert sum(map(is_open, crowd)) == MOST


def test_connections_of_other_ports_are_left_alone(listening: socket.socket) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MOST + 1):
            connected(listening, stack)
        assert ConnectionWatch(0).look(listening.getsockname()[1] + 1) == 0


def test_an_end_that_is_vouched_for_is_forgotten_with_its_connection(listening: socket.socket) -> None:
    """Another caller may have its number next."""
    watch, port = ConnectionWatch(1), listening.getsockname()[1]
    with contextlib.ExitStack() as stack:
        first = connected(listening, stack)
        number = first.getsockname()[1]
        watch.vouch(f"ipv4:127.0.0.1:{number}", "member")
        watch.vouch("unix:", "member")
        assert watch.look(port) == 0
        first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    assert watch.look(port) == 0
    with contextlib.ExitStack() as stack:
        again = connected(listening, stack, ("127.0.0.1", number))
        assert again.getsockname()[1] == number
        connected(listening, stack)
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
    server = Server([], port=Port(connections=40))
    address = f"127.0.0.1:{server.listen('127.0.0.1:0', server_credentials(TlsStore(own)))}"
    await server.start()
    strangers: list[asyncio.StreamWriter] = []

    def channel() -> grpc.aio.Channel:
        options = channel_options(MEMBER.server_name)
        return secure_channel(address, own, options)

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
    server = Server([], port=Port())
    port = server.listen("127.0.0.1:0", credentials)
    await server.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await until(lambda: paced)
        for _ in range(2):
            before = len(paced)
            (_, stranger) = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda before=before: len(paced) != before)
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
