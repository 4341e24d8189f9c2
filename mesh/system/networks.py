"""This machine's IPv4 addresses, and the networks that they belong to."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Interface, IPv4Network

import psutil  # type: ignore[import-untyped]

from sealring.mesh.system.addresses import is_loopback

ANY_HOST = "0.0.0.0"  # noqa: S104 - a listener there answers only callers that show what they know
_HOST_BITS = 32
_ELSEWHERE = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737), which the default route leads to. Nothing is sent to it."""

TAILSCALE = IPv4Network("100.64.0.0/10")
"""Tailscale's on a tunnel; elsewhere an internet provider's."""

_PRIVATE = ("192.168.0.0/16", "10.0.0.0/8", "172.16.0.0/12", "169.254.0.0/16", "127.0.0.0/8")
HOUSE = (*map(IPv4Network, _PRIVATE), TAILSCALE)
"""Networks that nobody on the internet is in."""

_TUNNEL = re.compile(r"(utun|tun|tap|ppp|ipsec|wg|tailscale)\d")
_VIRTUAL = re.compile(r"(bridge|vmenet|vmnet|vboxnet|docker|virbr|veth|podman|br-)")
"""Interfaces of virtual machines and containers, of Internet Sharing and of cables between two Macs."""

LOCAL_NETWORK_DENIED = errno.EHOSTUNREACH
"""The error of macOS, at once and with nothing sent, where Local Network access is denied (errno 65)."""

LOCAL_NETWORK = (
    "macOS denies Local Network access with exactly this error; curl, nc and ping are Apple's own and "
    "exempt, so that they work proves nothing"
)
ALLOW_LOCAL_NETWORK = (
    "let launchd run the node, which is exempt; or allow it in System Settings, Privacy & Security, "
    "Local Network"
)


@dataclass(frozen=True)
class OwnAddress:
    """An IPv4 address of this machine and the interface that has it."""

    host: str
    interface: str

    def __str__(self) -> str:
        return f"{self.host} ({self.interface})"


def own_addresses() -> list[OwnAddress]:
    """IPv4 addresses that others may reach, the likeliest first: on the default route, then the others, then
    link-local ones (169.254), which two Macs on one cable have."""
    states = psutil.net_if_stats()
    found = [
        (one.ip.is_link_local, OwnAddress(str(one.ip), interface))
        for interface, one in _interfaces()
        if interface in states and states[interface].isup and not one.ip.is_loopback
    ]
    preferred = address_towards(*_ELSEWHERE)
    found.sort(key=lambda one: (one[0], one[1].host != preferred))
    return [address for _, address in found]


def hosts_of(peer: str) -> frozenset[str]:
    """The hosts of a caller from `peer`, as far as they are known: where it is this machine, all of them."""
    own = {one.host for one in own_addresses()}
    return frozenset({peer, *own} if is_loopback(peer) or peer in own else {peer})


def house_addresses() -> list[OwnAddress]:
    """Those at which phones and laptops of a house reach this machine, the likeliest first: of Ethernet and
    Wi-Fi, then of other interfaces, link-local ones, Tailscale's. Not of a VPN, and none that is public."""
    own, found = own_addresses(), list[tuple[int, OwnAddress]]()
    states = psutil.net_if_stats()
    for one in own:
        if one.interface not in states:
            continue  # it has gone since
        address = IPv4Address(one.host)
        tunnel = _TUNNEL.match(one.interface) or "pointopoint" in states[one.interface].flags
        if address in TAILSCALE if tunnel else any(address in network for network in HOUSE[:-1]):
            other = _VIRTUAL.match(one.interface) is not None
            found.append((3 if tunnel else 2 if address.is_link_local else int(other), one))
    return [one for _, one in sorted(found, key=lambda each: each[0])]


def hosts_with(main: str, most: int) -> tuple[str, ...]:
    """At most `most` hosts at which others reach what listens on every interface: `main`, then the rest.

    Without `main` while no interface has it, as where its cable is out, unless nothing else is left.
    """
    found = [one.host for one in own_addresses()]
    first = [main] if main in found or not found or is_loopback(main) else []
    return tuple(dict.fromkeys((*first, *found)))[:most]


def address_towards(host: str, port: int) -> str | None:
    """This machine's own IPv4 address on the route to `host`; None without a route. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port or 9))
            own: str = probe.getsockname()[0]
            return own
    except OSError:
        return None


def sources_towards(host: str, own: Sequence[OwnAddress]) -> list[str]:
    """Those of the addresses `own` whose interfaces' networks hold `host`, which is no name; the same host
    for one of this machine's own."""
    address = IPv4Address(host)
    mine = {one.host for one in own}
    if address.is_loopback or host in mine:
        return [host]
    return [
        str(one.ip)
        for _, one in _interfaces()
        if str(one.ip) in mine and address in one.network and one.network.prefixlen < _HOST_BITS
    ]


def network_of(host: str) -> IPv4Network | None:
    """The narrowest network of this machine's interfaces that holds `host`, an address of this machine.

    None for a name, for 0.0.0.0, and if no interface has such a network.
    """
    try:
        address = IPv4Address(host)
    except AddressValueError:
        return None
    networks = (one.network for _, one in _interfaces())
    holding = [network for network in networks if address in network and not address.is_unspecified]
    return max(holding, key=lambda network: network.prefixlen, default=None)


def _interfaces() -> Iterator[tuple[str, IPv4Interface]]:
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for one in addresses:
            try:
                yield name, IPv4Interface(f"{one.address}/{one.netmask}")
            except ValueError:  # an address of another kind, or one without a mask
                continue
