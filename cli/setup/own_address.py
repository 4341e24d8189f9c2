"""The addresses at which other machines may reach this one."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

_ELSEWHERE = ("192.0.2.1", 9)
"""An address of documentation (RFC 5737): the way there is the way to everywhere. Nothing is sent."""


@dataclass(frozen=True)
class OwnAddress:
    """An IPv4 address of this machine and the interface that has it."""

    host: str
    interface: str

    def __str__(self) -> str:
        return f"{self.host} ({self.interface})"


def own_addresses() -> list[OwnAddress]:
    """IPv4 addresses that others may reach, the likeliest first: on the default route, then the others, then
    those that a link gave itself (169.254), which two Macs on one cable have."""
    states = psutil.net_if_stats()
    found = [
        OwnAddress(one.address, interface)
        for interface, addresses in sorted(psutil.net_if_addrs().items())
        if interface in states and states[interface].isup
        for one in addresses
        if one.family == socket.AF_INET and not ipaddress.IPv4Address(one.address).is_loopback
    ]
    preferred = address_towards(*_ELSEWHERE)
    return sorted(
        found, key=lambda one: (ipaddress.IPv4Address(one.host).is_link_local, one.host != preferred)
    )


def address_towards(host: str, port: int) -> str | None:
    """This machine's own IPv4 address on the way to `host`; None where no way is known. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port or 9))
            own: str = probe.getsockname()[0]
            return own
    except OSError:
        return None


def is_free(host: str, port: int) -> bool:
    """Whether this process could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
        return True
