"""Which addresses this machine has, and to which network one belongs."""

from __future__ import annotations

from ipaddress import IPv4Network
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sealring.mesh.system import networks
from sealring.mesh.system.networks import address_towards, network_of, own_addresses


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
        "en8": [address("0.0.0.0", "255.0.0.0")],
        "utun0": [address("10.8.0.1", "nonsense")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


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


def test_others_reach_what_is_up_and_a_link_gave_itself_only_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    up = {name: SimpleNamespace(isup=name != "en2") for name in ("lo0", "en0", "en2", "en3")}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: up)
    assert [str(one) for one in own_addresses()] == ["192.168.1.20 (en0)", "169.254.7.7 (en3)"]


def test_the_way_to_loopback_is_loopback() -> None:
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"


def test_the_address_towards_everywhere_comes_first_of_those_that_are_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    up = {name: SimpleNamespace(isup=True) for name in ("lo0", "en0", "en2", "en3")}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: up)
    for preferred, others in (("192.168.1.129", ["192.168.1.20"]), ("192.168.1.20", ["192.168.1.129"])):
        monkeypatch.setattr(networks, "address_towards", lambda host, port, own=preferred: own)
        assert [one.host for one in own_addresses()] == [preferred, *others, "169.254.7.7"]


@pytest.mark.parametrize(("port", "asked"), [(0, 9), (5, 5)])
def test_the_way_is_asked_for_with_a_port(port: int, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Probe:
        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def connect(self, address: Any) -> None:
            told.append(address)

        def getsockname(self) -> tuple[str, int]:
            return "192.0.2.7", 4

    monkeypatch.setattr(networks.socket, "socket", Probe)
    assert address_towards("192.0.2.9", port) == "192.0.2.7"
    assert told == [("192.0.2.9", asked)]
