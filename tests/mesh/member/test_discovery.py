"""Announcements on the loopback interface, real and false: what is heard is a hint, and bounded."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import IPv4Network
from typing import Any

import grpc.aio
import multicast
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from zeroconf import IPVersion
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from sealring.mesh.crypto import encode_base32
from sealring.mesh.errors import Unavailable
from sealring.mesh.member import MAX_HEARD, SERVICE, Offer, find_clusters, hear_of_coordinator, short_hash
from sealring.mesh.member.discovery import announced, announced_to_members, listen, reached, read_announcement
from sealring.mesh.rpc import TlsStore, server_credentials
from tests.mesh.member.test_bootstrap import coordinator_material

LOOPBACK = ["127.0.0.1"]
HOME = [IPv4Network("192.168.1.0/24")]
ROOT = bytes(range(32))
GOOD = {b"root": encode_base32(ROOT).encode(), b"name": b"home", b"v": b"1"}


@pytest.fixture(autouse=True)
def on_a_network_of_its_own() -> Iterator[None]:
    """Most of these tests announce on loopback or listen there."""
    with multicast.alone():
        yield


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Any]]:
    """Serves the certificate of an authority on loopback; returns the port."""
    servers = []

    async def start(authority: Any, **options: Any) -> int:
        server = grpc.aio.server()
        store = TlsStore(coordinator_material(authority, **options))
        servers.append(server)
        port = server.add_secure_port("127.0.0.1:0", server_credentials(store, require_client=False))
        await server.start()
        return port

    yield start
    for server in servers:
        await server.stop(None)


async def test_a_cluster_is_found_while_it_is_announced_and_not_after(
    authority: Any, clock: Any, serve: Any
) -> None:
    port = await serve(authority)
    async with announced(Offer(authority.root.fingerprint, "demo", ()), LOOPBACK, port):
        (found,) = await find_clusters(LOOPBACK, seconds=1.0, clock=clock)
    assert found == Offer(authority.root.fingerprint, "demo", (f"127.0.0.1:{port}",))
    assert await find_clusters(LOOPBACK, seconds=0.5, clock=clock) == []


async def test_two_clusters_of_one_name_stay_two_and_a_lie_about_a_name_is_not_shown(
    authority: Any, make_authority: Callable[..., Any], clock: Any, serve: Any
) -> None:
    other = make_authority()
    ports = [await serve(one) for one in (authority, other)]
    roots = [authority.root.fingerprint, other.root.fingerprint]
    async with (
        announced(Offer(roots[0], "demo", ()), LOOPBACK, ports[0]),
        announced(Offer(roots[1], "someone-elses", ()), LOOPBACK, ports[1]),
    ):
        found = await find_clusters(LOOPBACK, seconds=1.0, clock=clock)
    assert {one.name for one in found} == {"demo"}, "what its root metadata says"
    assert {one.root_sha256 for one in found} == set(roots)
    assert len({short_hash(one.root_sha256) for one in found}) == 2


async def test_an_announcement_whose_root_nobody_shows_is_no_offer(
    authority: Any, make_authority: Callable[..., Any], clock: Any, serve: Any
) -> None:
    """Another cluster answers there, or a program that says nothing, or nobody."""
    port = await serve(make_authority())
    silent = socket.create_server(("127.0.0.1", 0))
    pins = [bytes([number]) * 32 for number in range(2)]
    try:
        async with (
            announced(Offer(authority.root.fingerprint, "demo", ()), LOOPBACK, port),
            announced(Offer(pins[0], "demo", ()), LOOPBACK, silent.getsockname()[1]),
            announced(Offer(pins[1], "demo", ()), LOOPBACK, 9),
        ):
            assert await find_clusters(LOOPBACK, seconds=1.0, clock=clock) == []
    finally:
        silent.close()


async def test_a_flood_of_announcements_is_cut_off() -> None:
    async with Flood(3 * MAX_HEARD):
        heard = await listen(LOOPBACK, seconds=2.0)
    assert 0 < len(heard) <= MAX_HEARD


@pytest.mark.parametrize("label", [b"\x1b[2J\n", b"\x7f", b"a" * 63, b"\xff\xfe", b"."])
async def test_an_instance_with_an_impossible_name_is_passed_over(label: bytes) -> None:
    """It would have ended the search, so that nobody could join in the presence of one such machine."""
    service = b"\x09_sealring\x04_tcp\x05local\x00"
    instance = bytes([len(label)]) + label + service
    head = struct.pack(">HHHHHH", 0, 0x8400, 0, 1, 0, 0)
    message = head + service + struct.pack(">HHIH", 12, 1, 120, len(instance)) + instance
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        sending.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sending.bind(("127.0.0.1", 5353))
        listening = asyncio.create_task(listen(LOOPBACK, seconds=0.5))
        while not listening.done():
            sending.sendto(message, ("224.0.0.251", 5353))
            await asyncio.sleep(0.02)
    assert await listening == []


class Flood:
    """Answers with many instances at once."""

    def __init__(self, count: int) -> None:
        self._count = count

    async def __aenter__(self) -> None:
        self._multicast = AsyncZeroconf(interfaces=LOOPBACK, ip_version=IPVersion.V4Only)
        for number in range(self._count):
            properties = {"root": encode_base32(number.to_bytes(32, "big")), "name": "x"}
            info = AsyncServiceInfo(
                SERVICE,
                f"n{number}.{SERVICE}",
                port=9,
                addresses=[bytes([127, 0, 0, 1])],
                properties=properties,
                server=f"n{number}.local.",
            )
            self._multicast.zeroconf.registry.async_add(info)

    async def __aexit__(self, *_: object) -> None:
        await self._multicast.async_close()


def test_what_is_announced_well_is_read() -> None:
    offer = read_announcement(GOOD, ["192.168.1.7", "192.168.1.8"], 7701, HOME)
    assert offer == Offer(ROOT, "home", ("192.168.1.7:7701", "192.168.1.8:7701"))


@pytest.mark.parametrize(
    "lie",
    [
        {b"root": b""},
        {b"root": None},
        {b"root": encode_base32(ROOT)[:-1].encode()},
        {b"root": encode_base32(ROOT).upper().encode()},
        {b"root": b"\xff" * 52},
        {b"root": b"a" * 100_000},
        {b"name": None},
        {b"name": b""},
        {b"name": b"\x1b[2Jhome"},
        {b"name": b"home\n"},
        {b"name": "hоme".encode()},
        {b"name": b"a" * 64},
    ],
)
def test_what_is_malformed_is_dropped(lie: dict[bytes, bytes | None]) -> None:
    assert read_announcement(GOOD | lie, ["192.168.1.7"], 7701, HOME) is None


@pytest.mark.parametrize("port", [None, 0, -1, 65536])
def test_a_port_has_to_be_one(port: int | None) -> None:
    assert read_announcement(GOOD, ["192.168.1.7"], port, HOME) is None


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "127.0.0.1", "192.168.2.7", "192.168.1.0", "192.168.1.255", "224.0.0.251", "0.0.0.0"],
)
def test_an_announcement_sends_nobody_outside_the_own_networks(address: str) -> None:
    assert read_announcement(GOOD, [address], 7701, HOME) is None
    found = read_announcement(GOOD, [address, "192.168.1.7"], 7701, HOME)
    assert found is not None
    assert found.addresses == ("192.168.1.7:7701",)


@given(
    st.dictionaries(st.binary(max_size=9), st.none() | st.binary(max_size=300), max_size=9),
    st.lists(st.ip_addresses(v=4).map(str), max_size=300),
    st.none() | st.integers(),
)
def test_anything_may_be_announced(properties: Any, addresses: list[str], port: int | None) -> None:
    for said in properties, properties | GOOD:
        found = read_announcement(said, addresses, port, [IPv4Network("0.0.0.0/0")])
        assert found is None or (1 <= len(found.addresses) <= 4 and found.name.isprintable())


@pytest.mark.parametrize("hosts", [[], ["192.0.2.1"]])
async def test_without_a_network_there_is_one_clear_error(hosts: list[str]) -> None:
    with refused("NO_MULTICAST", Unavailable):
        await find_clusters(hosts, seconds=0)


@pytest.mark.parametrize(
    ("platform", "error", "said"),
    [
        ("darwin", errno.EHOSTUNREACH, "Local Network"),
        ("linux", errno.EHOSTUNREACH, "No route to host"),
        ("darwin", errno.ENETDOWN, "Network is down"),
    ],
)
async def test_what_every_interface_refuses_is_said_and_not_an_empty_network(
    monkeypatch: pytest.MonkeyPatch, platform: str, error: int, said: str
) -> None:
    """zeroconf itself keeps quiet about it."""

    def refuse(self: socket.socket, *_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(socket.socket, "sendto", refuse)
    monkeypatch.setattr("sys.platform", platform)
    asks: tuple[Callable[[], Any], ...] = (
        lambda: listen(LOOPBACK, seconds=0),
        lambda: hear_of_coordinator(ROOT, LOOPBACK),
        announced(Offer(ROOT, "home", ()), LOOPBACK, 9).__aenter__,
        announced_to_members(ROOT, LOOPBACK, 9).__aenter__,
    )
    for ask in asks:
        with pytest.raises(Unavailable, match=said) as caught:
            await ask()
        assert caught.value.reason == "NO_MULTICAST"
        assert ("Local Network" in (caught.value.hint or "")) == ("Local Network" in said)


async def test_what_one_interface_refuses_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket.sendto

    def refuse(self: socket.socket, *arguments: Any) -> int:
        if self.getsockname()[0] == "127.0.0.2":
            raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
        return real(self, *arguments)

    monkeypatch.setattr(socket.socket, "sendto", refuse)
    assert reached(["127.0.0.1", "127.0.0.2", "192.0.2.1"]) == ["127.0.0.1"]


async def test_beside_another_accounts_program_questions_come_from_another_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """macOS lets no second account bind an address at port 5353, but all addresses (in_pcbbind)."""
    root, real = os.urandom(32), socket.socket.bind

    def bind(self: socket.socket, address: Any) -> None:
        if address[0] != "" and address[1] == 5353:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        real(self, address)

    async with (
        announced_to_members(root, LOOPBACK, 7700),
        announced(Offer(root, "home", ()), LOOPBACK, 7701),
    ):
        monkeypatch.setattr(socket.socket, "bind", bind)
        assert await hear_of_coordinator(root, LOOPBACK) == ("127.0.0.1:7700",)
        assert Offer(root, "home", ("127.0.0.1:7701",)) in await listen(LOOPBACK, seconds=0.7)
        with pytest.raises(Unavailable, match="another account"):
            await announced_to_members(root, LOOPBACK, 7700).__aenter__()


async def test_members_hear_of_their_coordinator_and_newcomers_hear_nothing_of_it() -> None:
    root = os.urandom(32)
    assert await hear_of_coordinator(root, LOOPBACK) == ()
    async with announced_to_members(root, LOOPBACK, 7700):
        assert await hear_of_coordinator(root, LOOPBACK) == ("127.0.0.1:7700",)
        assert await hear_of_coordinator(os.urandom(32), LOOPBACK) == (), "another cluster's"
        assert root not in [one.root_sha256 for one in await listen(LOOPBACK, seconds=0.7)]


async def test_lies_about_a_coordinator_send_no_member_outside_its_networks_and_are_few() -> None:
    """A former member knows the instance's name, and anybody may answer in its place."""
    root = os.urandom(32)
    addresses = [bytes([8, 8, 8, 8]), *(bytes([127, 0, 1, number]) for number in range(1, 200))]
    label = encode_base32(hashlib.sha256(b"sealring coordinator for its members v1\x00" + root).digest())[:16]
    async with AsyncZeroconf(interfaces=LOOPBACK, ip_version=IPVersion.V4Only) as multicast:
        lie = AsyncServiceInfo(
            SERVICE, f"{label}.{SERVICE}", port=9, addresses=addresses, server="liar.local."
        )
        multicast.zeroconf.registry.async_add(lie)
        heard = await hear_of_coordinator(root, LOOPBACK)
    assert 0 < len(heard) <= 16
    assert all(one.startswith("127.0.1.") for one in heard)
