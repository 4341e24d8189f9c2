"""First contact: the pin is checked before anything is sent."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from leaftest import material
from refusals import refused

from sealring.mesh.errors import CertificateError, DeadlineExceeded, InvalidInput, RosterError, Unavailable
from sealring.mesh.member import (
    MAX_TOKEN_CHARACTERS,
    JoinToken,
    claimed_root,
    fetch_root,
    verify_coordinator_leaf,
)
from sealring.mesh.member.bootstrap import find_coordinator
from sealring.mesh.pki import (
    MAX_CHAIN_BYTES,
    LeafKey,
    PeerIdentity,
    Role,
    TlsMaterial,
    encode_chain,
    sign_root,
    to_pem,
)
from sealring.mesh.rpc import TlsStore, server_credentials
from sealring.mesh.system.addresses import format_address, free_port

NOW = 1_800_000_000
TOKEN = JoinToken.generate(bytes(range(32)), ["10.0.0.1:7701", "[fe80::1]:7701", "studio.local:7701"])


def coordinator_material(
    authority: Any,
    *,
    role: Role = Role.COORDINATOR,
    chain: bytes | None = None,
    cluster: str = "demo",
    ca: Any = None,
) -> TlsMaterial:
    root_chain = encode_chain(authority.root.chain) if chain is None else chain
    peer = PeerIdentity(cluster, role, "main")
    return material(ca or authority.ca, peer, now=NOW, root_chain=root_chain)


@pytest.mark.parametrize("require_client", [True, False])
async def test_fetch_root_from_a_grpc_server(authority: Any, clock: Any, require_client: bool) -> None:
    server = grpc.aio.server()
    store = TlsStore(coordinator_material(authority))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(store, require_client=require_client))
    await server.start()
    root = await fetch_root("127.0.0.1", port, authority.root.fingerprint, deadline=5, clock=clock)
    assert root == authority.root
    await server.stop(None)


@pytest.mark.parametrize("pinned", [True, False])
async def test_nothing_is_sent_after_the_handshake_and_the_connection_is_closed(
    authority: Any, make_authority: Callable[..., Any], clock: Any, tmp_path: Path, pinned: bool
) -> None:
    """To a wrong root as to the right one; HTTP/2 is asked for, as gRPC does."""
    shown = coordinator_material(authority)
    (tmp_path / "leaf.pem").write_bytes(shown.private_key + to_pem(shown.certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "leaf.pem")
    context.set_alpn_protocols(["h2"])
    seen: list[object] = []
    done = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer.get_extra_info("ssl_object").selected_alpn_protocol())
        try:
            seen.append(await reader.read(1))
        except ConnectionError:
            seen.append(b"")
        writer.transport.abort()
        done.set()

    server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    pin = (authority if pinned else make_authority()).root.fingerprint
    if pinned:
        assert await fetch_root("127.0.0.1", port, pin, deadline=5, clock=clock) == authority.root
    else:
        with refused("ROOT_PIN", RosterError):
            await fetch_root("127.0.0.1", port, pin, deadline=5, clock=clock)
    async with asyncio.timeout(200):
        await done.wait()
    assert seen == ["h2", b""]
    server.close()


async def test_a_silent_or_absent_coordinator_is_named() -> None:
    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(DeadlineExceeded):
        await fetch_root("127.0.0.1", port, bytes(32), deadline=0.2)
    server.close()
    await server.wait_closed()
    with pytest.raises(Unavailable):
        await fetch_root("127.0.0.1", port, bytes(32), deadline=5)


async def test_a_server_that_talks_no_tls_is_named() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    with pytest.raises(Unavailable):
        await fetch_root("127.0.0.1", server.sockets[0].getsockname()[1], bytes(32), deadline=5)
    server.close()


def refusal(leaf: bytes, fingerprint: bytes, now: float = NOW) -> str:
    with pytest.raises((RosterError, CertificateError)) as error:
        verify_coordinator_leaf(leaf, fingerprint, now=now)
    return error.value.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"role": Role.MEMBER}, "NOT_COORDINATOR"),
        ({"cluster": "other"}, "NOT_COORDINATOR"),
        ({"chain": b""}, "ROOT_CHAIN_LENGTH"),
        ({"chain": b"\x00"}, "ROOT_MALFORMED"),
        ({"chain": b"\x00\x00\x00\x05abc"}, "ROOT_MALFORMED"),
        ({"chain": b"\x00\x00\x00\x02{}"}, "ENVELOPE_MALFORMED"),
        ({"chain": b"\xff" * MAX_CHAIN_BYTES}, "ROOT_MALFORMED"),
        ({"chain": b"\xff" * (MAX_CHAIN_BYTES + 1)}, "ROOT_CHAIN_LENGTH"),
    ],
    ids=range(8),
)
def test_a_leaf_that_is_no_coordinators_is_refused(authority: Any, changes: Any, reason: str) -> None:
    leaf = coordinator_material(authority, **changes).certificate
    assert refusal(leaf, authority.root.fingerprint) == reason


def test_a_leaf_of_another_authority_or_outside_its_life_is_refused(
    authority: Any, make_authority: Callable[..., Any]
) -> None:
    other = coordinator_material(authority, ca=make_authority().ca).certificate
    assert refusal(other, authority.root.fingerprint) == "NOT_ISSUED_HERE"
    leaf = coordinator_material(authority).certificate
    for now in (NOW - 3600, NOW + 3600 + 61):
        assert refusal(leaf, authority.root.fingerprint, now) in {"CERTIFICATE_EXPIRED", "ROOT_NOT_YET_VALID"}


def test_expired_root_is_refused(authority: Any) -> None:
    short = dataclasses.replace(authority.root, expires=NOW + 10, chain=())
    signed = sign_root(short, authority.root_signers)
    leaf = coordinator_material(authority, chain=encode_chain(signed.chain)).certificate
    assert refusal(leaf, authority.root.fingerprint, NOW + 70) == "ROOT_EXPIRED"


def test_an_old_pin_follows_a_rotated_root(authority: Any, make_authority: Callable[..., Any]) -> None:
    other = make_authority()
    second = dataclasses.replace(authority.root, version=2, root_keys=other.root.root_keys, chain=())
    rotated = sign_root(second, authority.root_signers + other.root_signers, previous=authority.root)
    leaf = coordinator_material(authority, chain=encode_chain(rotated.chain)).certificate
    assert verify_coordinator_leaf(leaf, authority.root.fingerprint, now=NOW) == rotated
    assert refusal(leaf, rotated.fingerprint) == "ROOT_PIN"


HOSTS = st.one_of(
    st.ip_addresses().map(str), st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,120}[a-z0-9])?", fullmatch=True)
)
ADDRESSES = st.lists(st.builds(format_address, HOSTS, st.integers(1, 65535)), min_size=1, max_size=6)


@given(st.binary(min_size=32, max_size=32), ADDRESSES)
def test_token_round_trip(root_sha256: bytes, addresses: list[str]) -> None:
    token = JoinToken.generate(root_sha256, addresses)
    text = token.format()
    assert JoinToken.parse(text) == token
    assert len(text) <= MAX_TOKEN_CHARACTERS
    assert token.addresses == tuple(addresses[: len(token.addresses)]), "the best come first"
    assert text.split(".")[3] not in repr(token)


@given(st.data())
def test_token_has_one_spelling(data: st.DataObject) -> None:
    text = TOKEN.format()
    position = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from(sorted(set("abcz27.") - {text[position]})))
    change = data.draw(
        st.sampled_from(
            [
                text[:position],
                text[:position] + text[position + 1 :],
                text[:position] + other + text[position + 1 :],
                text + "\n",
            ]
        )
    )
    with pytest.raises(InvalidInput):
        JoinToken.parse(change)


@pytest.mark.parametrize("text", ["", "sr2...", "sr1.a.b.c", "SR2.A.B.C", "sr2." + "a" * 5000])
def test_token_refuses(text: str) -> None:
    with refused("BAD_TOKEN", InvalidInput):
        JoinToken.parse(text)


@pytest.mark.parametrize(
    "addresses",
    [(), ("10.0.0.1:0",), ("10.0.0.1:07701",), ("nowhere",), ("10.0.0.1:1",) * 5, ("a" * 250 + ":1",) * 2],
)
def test_token_with_bad_addresses_is_refused_though_its_check_is_right(addresses: tuple[str, ...]) -> None:
    with refused("BAD_TOKEN", InvalidInput):
        JoinToken.parse(dataclasses.replace(TOKEN, addresses=addresses).format())


@pytest.mark.parametrize("addresses", [[], ["10.0.0.1:0"], ["10.0.0.1"], ["a" * 254 + ":7701"]])
def test_no_token_is_made_without_a_usable_address(addresses: list[str]) -> None:
    with refused("BAD_ADDRESS", InvalidInput):
        JoinToken.generate(bytes(32), addresses)


def test_a_token_holds_four_addresses_or_300_characters_of_them() -> None:
    four = [f"10.0.0.{number}:1" for number in range(5)]
    assert JoinToken.generate(bytes(32), four).addresses == tuple(four[:4])
    for size, fit in ((300, 2), (301, 1)):
        long = ["a" * 240 + ":7701", ""]
        long[1] = "c" * (size - len(",".join(long)) - 5) + ":7701"
        token = JoinToken.generate(bytes(32), long)
        assert token.addresses == tuple(long[:fit])
        assert (len(token.format()) == MAX_TOKEN_CHARACTERS) == (fit == 2), "the longest that there is"
        assert JoinToken.parse(token.format()) == token


def test_token_upper_case_and_loose_last_bits_are_refused() -> None:
    text = TOKEN.format()
    with pytest.raises(InvalidInput):
        JoinToken.parse(text.upper())
    head, *rest = text.split(".")
    loose = ".".join([head, "a" * 51 + "b", *rest[1:]])
    with pytest.raises(InvalidInput):
        JoinToken.parse(loose)


async def test_the_first_address_whose_coordinator_holds_the_root_is_taken(
    authority: Any, make_authority: Callable[..., Any], clock: Any
) -> None:
    servers = [grpc.aio.server(), grpc.aio.server()]
    addresses = [f"127.0.0.1:{free_port()}"]
    for server, one in zip(servers, (make_authority(), authority), strict=True):
        credentials = server_credentials(TlsStore(coordinator_material(one)), require_client=False)
        addresses.append(f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}")
        await server.start()
    try:
        token = JoinToken.generate(authority.root.fingerprint, addresses)
        assert await find_coordinator(token.root_sha256, token.addresses, deadline=200, clock=clock) == (
            addresses[2],
            authority.root,
        )
        for tried in (token.addresses[:2], token.addresses[1::-1]):
            with refused("ROOT_PIN", RosterError):  # worse than one that nobody is at
                await find_coordinator(token.root_sha256, tried, deadline=200, clock=clock)
    finally:
        for server in servers:
            await server.stop(None)


async def test_a_dead_first_address_does_not_hold_up_the_next(authority: Any, clock: Any) -> None:
    """Connections to it are taken and never answered, as by a machine that has just lost its cable."""
    server = grpc.aio.server()
    credentials = server_credentials(TlsStore(coordinator_material(authority)), require_client=False)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    with socket.create_server(("127.0.0.1", 0)) as dead:
        addresses = [f"127.0.0.1:{dead.getsockname()[1]}", f"127.0.0.1:{port}"]
        found = await find_coordinator(authority.root.fingerprint, addresses, deadline=math.inf, clock=clock)
    assert found == (addresses[1], authority.root)
    await server.stop(None)


async def test_the_root_that_an_address_shows_can_be_read_before_it_is_known(
    authority: Any, make_authority: Callable[..., Any], clock: Any
) -> None:
    servers = []
    for options in ({}, {"ca": make_authority().ca}):
        server = grpc.aio.server()
        credentials = server_credentials(
            TlsStore(coordinator_material(authority, **options)), require_client=False
        )
        servers.append((server, server.add_secure_port("127.0.0.1:0", credentials)))
        await server.start()
    (good, port), (bad, other) = servers
    pin, root = await claimed_root("127.0.0.1", port, deadline=200, clock=clock)
    assert (pin, root) == (authority.root.fingerprint, authority.root)
    with refused("NOT_ISSUED_HERE", CertificateError):
        await claimed_root("127.0.0.1", other, deadline=200, clock=clock)
    for server in good, bad:
        await server.stop(None)


def test_a_leaf_without_root_metadata_is_refused(authority: Any) -> None:
    peer = PeerIdentity("demo", Role.COORDINATOR, "main")
    leaf = authority.ca.issue(LeafKey().csr(), peer, lifetime=60, now=NOW)
    assert refusal(leaf, authority.root.fingerprint) == "NO_ROOT_METADATA"
