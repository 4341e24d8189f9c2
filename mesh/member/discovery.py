"""Clusters of this network by DNS-SD over multicast DNS (RFC 6763, RFC 6762), which Macs call Bonjour.

Newcomers hear of clusters, and members of their own coordinator, whose addresses may have changed.

A coordinator whose cluster can be joined by a code announces the hash of its root key, its cluster's name
and where it answers. All of that is a hint: anybody on the network can announce anything. What is heard is
bounded and checked. It becomes an offer only once a server at one of its addresses has shown root metadata of
that hash, whose name is the one to show.

macOS runs a responder on the same port, 5353. Both bind it with SO_REUSEPORT and get all multicast, but
unicast goes to one of them. So questions here always ask for multicast answers. macOS lets no two accounts
bind an address of their own there: where another account's program has it, questions come from another port,
and are answered to that (RFC 6762 section 6.7).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from zeroconf import BadTypeInNameException, DNSQuestionType, IPVersion, ServiceStateChange
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.crypto.encoding import FormatError, decode_base32, encode_base32
from sealring.mesh.errors import SealringError, Unavailable
from sealring.mesh.member.bootstrap import MAX_TOKEN_ADDRESSES, find_coordinator
from sealring.mesh.member.joincode import Offer
from sealring.mesh.names import is_label
from sealring.mesh.system.addresses import format_address
from sealring.mesh.system.networks import (
    ALLOW_LOCAL_NETWORK,
    LOCAL_NETWORK,
    LOCAL_NETWORK_DENIED,
    network_of,
)

SERVICE = "_sealring._tcp.local."
SECONDS = 3.0
"""How long to listen: RFC 6762 has responders wait up to 0.5 s, and questions are repeated after 1 s."""

MAX_HEARD = 64
"""Instances that are looked at. More of them are a flood: clusters then join by an address or a token."""

_ASK_MILLISECONDS = 1500
_LOOK_SECONDS = 2.0
_LOOK_AT_ONCE = 8
_MAX_ADDRESSES = 16
_QUIET = logging.CRITICAL
_GROUP = ("224.0.0.251", 5353)
_NOTHING = bytes(12)
"""A message without a question, to which nobody answers."""

_FOR_MEMBERS = b"sealring coordinator for its members v1\x00"


@contextlib.asynccontextmanager
async def announced(offer: Offer, hosts: Sequence[str], port: int) -> AsyncIterator[None]:
    """Announces a cluster within the block, on the interfaces that have `hosts` (IPv4), with these.

    Raises Unavailable (NO_MULTICAST).
    """
    said = {"v": "1", "name": offer.name, "root": encode_base32(offer.root_sha256)}
    async with _registered(encode_base32(offer.root_sha256)[:16], said, hosts, port):
        yield


@contextlib.asynccontextmanager
async def announced_to_members(root_sha256: bytes, hosts: Sequence[str], port: int) -> AsyncIterator[None]:
    """Announces within the block where a cluster's coordinator answers its members, as `announced` does.

    Its label says nothing to whoever does not know the cluster's root. There is no name and no root hash in
    it, so newcomers pass it over. Raises Unavailable (NO_MULTICAST).
    """
    async with _registered(_members_label(root_sha256), {"v": "1"}, hosts, port):
        yield


async def hear_of_coordinator(root_sha256: bytes, hosts: Sequence[str]) -> tuple[str, ...]:
    """The addresses (host:port) that somebody announces for the coordinator of this root, 16 at most.

    They are within the networks of this machine, and nothing of them is proven. The question goes to the
    interfaces that have `hosts`. Raises Unavailable (NO_MULTICAST).
    """
    service = AsyncServiceInfo(SERVICE, f"{_members_label(root_sha256)}.{SERVICE}")
    async with _multicast(hosts) as multicast:
        await service.async_request(multicast.zeroconf, _ASK_MILLISECONDS, DNSQuestionType.QM)
    near = _near(service.parsed_addresses(IPVersion.V4Only), service.port, _networks(hosts))
    return near[:_MAX_ADDRESSES]


async def find_clusters(
    hosts: Sequence[str], *, seconds: float = SECONDS, clock: Clock = wall_clock
) -> list[Offer]:
    """The clusters that announce themselves to the interfaces that have `hosts` and prove their roots.

    Listens for `seconds`. Sorted by name. Raises Unavailable (NO_MULTICAST).
    """
    return await _proven(await listen(hosts, seconds=seconds), clock=clock)


async def listen(hosts: Sequence[str], *, seconds: float = SECONDS) -> list[Offer]:
    """What is announced to the interfaces that have `hosts`, each root once, of MAX_HEARD instances at most.

    Nothing of it is proven. Raises Unavailable (NO_MULTICAST).
    """
    heard: dict[str, AsyncServiceInfo] = {}

    def note(zeroconf: Any, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is ServiceStateChange.Added and len(heard) < MAX_HEARD:
            with contextlib.suppress(BadTypeInNameException):  # such as control characters
                heard[name] = AsyncServiceInfo(SERVICE, name)

    async with _multicast(hosts) as multicast:
        question = DNSQuestionType.QM
        browser = AsyncServiceBrowser(multicast.zeroconf, SERVICE, handlers=[note], question_type=question)
        await asyncio.sleep(seconds)
        await browser.async_cancel()
        services = list(heard.values())
        await asyncio.gather(
            *(one.async_request(multicast.zeroconf, _ASK_MILLISECONDS, question) for one in services)
        )
    networks = _networks(hosts)
    offers = [offer for one in services if (offer := _offer(one, networks)) is not None]
    return _joined(offers)


async def _proven(offers: Sequence[Offer], *, clock: Clock = wall_clock) -> list[Offer]:
    """Those at whose addresses a coordinator with that root answers, by the names that their roots give.

    Nothing but a TLS handshake is sent.
    """
    few = asyncio.Semaphore(_LOOK_AT_ONCE)

    async def look(offer: Offer) -> Offer | None:
        async with few:
            with contextlib.suppress(SealringError):
                address, root = await find_coordinator(
                    offer.root_sha256, offer.addresses, deadline=_LOOK_SECONDS, clock=clock
                )
                return replace(offer, name=root.cluster, addresses=(address,))
        return None

    found = await asyncio.gather(*map(look, offers))
    return sorted((one for one in found if one), key=lambda one: (one.name, one.root_sha256))


def read_announcement(
    properties: Mapping[bytes, bytes | None],
    addresses: Sequence[str],
    port: int | None,
    networks: Sequence[IPv4Network],
) -> Offer | None:
    """The offer of an instance; None where any part of it is malformed.

    Only addresses within `networks`, those of this machine's interfaces, count: an announcement sends nobody
    elsewhere.
    """
    try:
        root = decode_base32((properties.get(b"root") or b"").decode("ascii"), size=32)
        name = (properties.get(b"name") or b"").decode("ascii")
    except (FormatError, UnicodeDecodeError):
        return None
    if not is_label(name):
        return None
    near = _near(addresses, port, networks)
    return Offer(root, name, near[:MAX_TOKEN_ADDRESSES]) if near else None


def _near(addresses: Sequence[str], port: int | None, networks: Sequence[IPv4Network]) -> tuple[str, ...]:
    """Those of the addresses that are hosts within `networks`, as host:port; none for an impossible port."""
    if not port or not 0 < port < 1 << 16:
        return ()
    return tuple(
        format_address(str(host), port)
        for host in map(IPv4Address, addresses)
        if any(host in one and host not in (one.network_address, one.broadcast_address) for one in networks)
    )


def _networks(hosts: Sequence[str]) -> list[IPv4Network]:
    return [network for host in hosts if (network := network_of(host)) is not None]


def _members_label(root_sha256: bytes) -> str:
    return encode_base32(hashlib.sha256(_FOR_MEMBERS + root_sha256).digest())[:16]


def _offer(service: AsyncServiceInfo, networks: Sequence[IPv4Network]) -> Offer | None:
    addresses = service.parsed_addresses(IPVersion.V4Only)
    return read_announcement(service.properties, addresses, service.port, networks)


def _joined(offers: Sequence[Offer]) -> list[Offer]:
    """One offer for each root, with the addresses of all that name it."""
    roots: dict[bytes, Offer] = {}
    for one in offers:
        before = roots.setdefault(one.root_sha256, one)
        addresses = tuple(dict.fromkeys(before.addresses + one.addresses))[:_MAX_ADDRESSES]
        roots[one.root_sha256] = replace(before, addresses=addresses)
    return list(roots.values())


@contextlib.asynccontextmanager
async def _registered(
    label: str, said: Mapping[str, str], hosts: Sequence[str], port: int
) -> AsyncIterator[None]:
    async with _multicast(hosts, asks=False) as multicast:
        service = AsyncServiceInfo(
            SERVICE,
            f"{label}.{SERVICE}",
            port=port,
            addresses=[IPv4Address(host).packed for host in hosts],
            properties=dict(said),
            server=f"sealring-{label}.local.",
        )
        # Another machine may hold this name for us, as a forwarder does; the root hash in it is ours anyway.
        await multicast.async_register_service(service, cooperating_responders=True)
        yield


@contextlib.asynccontextmanager
async def _multicast(hosts: Sequence[str], *, asks: bool = True) -> AsyncIterator[AsyncZeroconf]:
    """Multicast DNS at the interfaces that have `hosts` and can send; with `asks` for questions alone.

    Raises Unavailable (NO_MULTICAST).
    """
    logging.getLogger("zeroconf").setLevel(_QUIET)  # it would log what strangers send
    usable = reached(hosts)
    taken = next((error for host in usable if (error := _bind_error(host))), None)
    if taken is not None and not asks:
        raise _no_multicast(taken)
    try:
        multicast = AsyncZeroconf(interfaces=usable, ip_version=IPVersion.V4Only, unicast=taken is not None)
    except OSError as error:
        raise _no_multicast(error) from None
    try:
        if taken is not None:
            await multicast.zeroconf.async_wait_for_start()
            for sender in multicast.zeroconf.engine.senders:  # for which zeroconf leaves it to the routes
                _choose_interface(sender.sock, sender.sock_name[0])
        yield multicast
    finally:
        await multicast.async_close()


def reached(hosts: Sequence[str]) -> list[str]:
    """Those of this machine's addresses from which multicast DNS can be sent.

    zeroconf logs an error of a send, and goes on. Raises Unavailable (NO_MULTICAST) where there are none.
    """
    errors = {host: _send_error(host) for host in hosts}
    usable = [host for host, error in errors.items() if error is None]
    if not usable:
        kept = [error for error in errors.values() if error and error.errno != errno.EADDRNOTAVAIL]
        raise _no_multicast(kept[0] if kept else None)
    return usable


def _send_error(host: str) -> OSError | None:
    """The error of a message to the group from this address; EADDRNOTAVAIL where no interface has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
            _choose_interface(probe, host)
            probe.sendto(_NOTHING, _GROUP)
        except OSError as error:
            return error
        return None


def _bind_error(host: str) -> OSError | None:
    """The error of binding this address at the port of multicast DNS. zeroconf would leave sockets open."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            probe.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            probe.bind((host, _GROUP[1]))
        except OSError as error:
            return error
        return None


def _choose_interface(sending: socket.socket, host: str) -> None:
    sending.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(host))


def _no_multicast(error: OSError | None) -> Unavailable:
    why = "this machine has no network" if error is None else error.strerror or type(error).__name__
    hint = "join with the first machine's address, or with a token"
    if error is not None and error.errno == LOCAL_NETWORK_DENIED and sys.platform == "darwin":
        why, hint = f"{why}: {LOCAL_NETWORK}", f"{ALLOW_LOCAL_NETWORK}; or {hint}"
    elif error is not None and error.errno == errno.EADDRINUSE:
        why = f"{why}: a program of another account has port {_GROUP[1]} of an address"
    return Unavailable(f"multicast DNS cannot be used: {why}", hint=hint, reason="NO_MULTICAST")
