"""Which addresses this machine has, and to which network one belongs."""

from __future__ import annotations

from ipaddress import IPv4Network
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.mesh.system import networks
from sealring.mesh.system.networks import (
    address_towards,
    hosts_with,
    house_addresses,
    network_of,
    own_addresses,
    sources_towards,
)


def address(host: str | None, mask: str | None) -> Any:
    return SimpleNamespace(address=host, netmask=mask)


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac with two cables, Wi-Fi and a bridge."""
    found = {
        "lo0": [
            address("127.0.0.1", "255.0.0.0"),
            address("::1", "ffff:ffff::"),
            address("fe80::1%lo0", None),
        ],
        "en0": [address("aa:bb:cc:dd:ee:ff", None), address("192.168.1.20", "255.255.255.0")],
        "en2": [address("192.168.1.129", "255.255.255.252")],
        "en3": [address("169.254.7.7", "255.255.0.0")],
        "en4": [address("192.168.4.4", "255.255.255.0")],
        "en8": [address("0.0.0.0", "255.0.0.0")],
        "utun0": [address("10.8.0.1", "nonsense")],
    }
    up = {name: SimpleNamespace(isup=name != "en4") for name in found if name != "en8"}
    system = SimpleNamespace(net_if_addrs=lambda: found, net_if_stats=lambda: up)
    monkeypatch.setattr(networks, "psutil", system)


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("169.254.7.7", "169.254.0.0/16"),
        ("192.168.1.20", "192.168.1.0/24"),
        ("192.168.1.129", "192.168.1.128/30"),
        ("127.0.0.1", "127.0.0.0/8"),
        ("10.8.0.1", None),
        ("0.0.0.0", None),
        ("mac.local", None),
        ("::1", None),
    ],
)
def test_the_narrowest_network_counts(host: str, network: str | None) -> None:
    assert network_of(host) == (IPv4Network(network) if network else None)


def test_the_way_to_loopback_is_loopback() -> None:
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"


@pytest.mark.parametrize("route", ["192.168.1.129", "192.168.1.20", "203.0.113.5"])
def test_others_reach_what_is_up_the_default_route_first_and_a_link_gave_itself_last(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networks, "address_towards", lambda host, port: route)
    shown = [str(one) for one in own_addresses()]
    assert sorted(shown) == [
        "169.254.7.7 (en3)",
        "192.168.1.129 (en2)",
        "192.168.1.20 (en0)",
    ]
    assert shown[-1] == "169.254.7.7 (en3)"
    assert shown[0].startswith(route) or route == "203.0.113.5"


def test_a_main_address_comes_first_while_the_machine_has_it() -> None:
    found = [one.host for one in own_addresses()]
    assert hosts_with("169.254.7.7", 8) == ("169.254.7.7", *(one for one in found if one != "169.254.7.7"))
    assert hosts_with("192.168.4.4", 8) == tuple(found), "its interface is down"
    assert hosts_with("127.0.0.1", 2) == ("127.0.0.1", found[0])


def test_a_neighbour_is_called_from_each_own_address_in_its_network() -> None:
    own = own_addresses()
    assert sorted(sources_towards("192.168.1.9", own)) == ["192.168.1.20"]
    assert sorted(sources_towards("192.168.1.130", own)) == ["192.168.1.129", "192.168.1.20"]
    assert sources_towards("169.254.9.9", own) == ["169.254.7.7"]
    assert sources_towards("203.0.113.9", own) == []
    assert sources_towards("127.0.0.9", own) == ["127.0.0.9"]
    assert sources_towards("192.168.1.20", own) == ["192.168.1.20"]


MAC = {
    "lo0": ("127.0.0.1", "255.0.0.0", ""),
    "bridge0": ("169.254.9.9", "255.255.0.0", "broadcast"),
    "bridge100": ("192.168.64.1", "255.255.255.0", "broadcast"),
    "en0": ("192.168.1.20", "255.255.255.0", "broadcast"),
    "en7": ("10.0.0.5", "255.255.255.0", "broadcast"),
    "en8": ("203.0.113.9", "255.255.255.0", "broadcast"),
    "en9": ("100.70.0.1", "255.255.255.0", "broadcast"),
    "ppp0": ("10.9.0.2", "255.255.255.0", "pointopoint"),
    "utun4": ("10.8.0.2", "255.255.255.0", "pointopoint"),
    "utun5": ("100.101.102.103", "255.255.255.255", "pointopoint"),
    "vmnet8": ("172.16.8.1", "255.255.255.0", "broadcast"),
}
"""Wi-Fi and Ethernet, a Thunderbolt bridge, Internet Sharing, two VPNs, Tailscale, virtual machines, a public
address, and one of a provider's own network."""


@pytest.mark.parametrize("route", ["192.168.1.20", "10.0.0.5", "10.8.0.2", "100.101.102.103", None])
def test_a_house_reaches_a_mac_by_wifi_and_ethernet_whichever_way_the_internet_goes(
    route: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a VPN that takes all, and without internet, too. Never at a VPN's address or a public one."""
    system = SimpleNamespace(
        net_if_addrs=lambda: {name: [address(host, mask)] for name, (host, mask, _) in MAC.items()},
        net_if_stats=lambda: {
            name: SimpleNamespace(isup=True, flags=f"up,{flags},running") for name, (*_, flags) in MAC.items()
        },
    )
    monkeypatch.setattr(networks, "psutil", system)
    monkeypatch.setattr(networks, "address_towards", lambda host, port: route)
    shown = [one.host for one in house_addresses()]
    nearest = ["10.0.0.5", "192.168.1.20"] if route == "10.0.0.5" else ["192.168.1.20", "10.0.0.5"]
    assert shown == [*nearest, "192.168.64.1", "172.16.8.1", "169.254.9.9", "100.101.102.103"]
