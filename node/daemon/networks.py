"""Which of this machine's networks an address belongs to."""

from __future__ import annotations

from ipaddress import AddressValueError, IPv4Address, IPv4Interface, IPv4Network

import psutil  # type: ignore[import-untyped]


def network_of(host: str) -> IPv4Network | None:
    """The narrowest network of this machine's interfaces that holds `host`, an address of this machine.

    None for a name, for 0.0.0.0, and where no interface has such a network.
    """
    try:
        address = IPv4Address(host)
    except AddressValueError:
        return None
    holding = [network for network in _networks() if address in network and not address.is_unspecified]
    return max(holding, key=lambda network: network.prefixlen, default=None)


def _networks() -> list[IPv4Network]:
    found: list[IPv4Network] = []
    for interface in psutil.net_if_addrs().values():
        for one in interface:
            try:
                found.append(IPv4Interface(f"{one.address}/{one.netmask}").network)
            except ValueError:  # an address of another kind, or one without a mask
                continue
    return found
