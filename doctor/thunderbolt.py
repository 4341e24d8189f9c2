"""Thunderbolt as macOS reports it: cables, the network interface of each port, and bridges over them.

The names of ports and interfaces differ between models and are missing at times: then a port has no device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from sealring.doctor.report import Bridge, Finding, ThunderboltPort, note, ok, unknown, warning
from sealring.doctor.system import System
from sealring.doctor.view import View

PROFILER = ("/usr/sbin/system_profiler", "SPThunderboltDataType", "-json")
NETWORKSETUP = "/usr/sbin/networksetup"
IFCONFIG = "/sbin/ifconfig"
_PROFILER_SECONDS = 30.0
_PORT = re.compile(r"^Hardware Port: (.{1,100})\nDevice: ([a-z0-9]{1,15})$", re.MULTILINE)
_SERVICE = re.compile(
    r"^\((\*|[0-9]{1,4})\) (.{1,100})\n\(Hardware Port: .{1,100}, Device: ([a-z0-9]{1,15})\)$", re.MULTILINE
)
_INTERFACE = re.compile(r"^([a-z]{1,12}[0-9]{1,4}): flags=[0-9a-f]{1,8}<([A-Z0-9,]{0,200})>", re.MULTILINE)
_MEMBER = re.compile(r"^\s+member: ([a-z]{1,12}[0-9]{1,4}) ", re.MULTILINE)
_INET = re.compile(r"^\s+inet ([0-9.]{7,15}) ", re.MULTILINE)
_MAX_PORTS = 64
_GIGABITS = re.compile(r"([0-9]{1,4}) ?Gb/s")
_DEFAULT = re.compile(r"^\s*interface: ([a-z]{1,12}[0-9]{1,4})$", re.MULTILINE)
ROUTE = "/sbin/route"


def parse_profile(text: str) -> list[ThunderboltPort] | None:
    """Ports, without devices, from `system_profiler SPThunderboltDataType -json`; None if it is not that.

    A Mac behind a dock or a display is not at the other end of a cable, and is no peer.
    """
    try:
        buses = json.loads(text)["SPThunderboltDataType"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(buses, list):
        return None
    return [_port(bus) for bus in buses[:_MAX_PORTS] if isinstance(bus, dict)]


def _port(bus: dict[str, Any]) -> ThunderboltPort:
    receptacle = bus.get("receptacle_1_tag")
    tag = receptacle if isinstance(receptacle, dict) else {}
    items = bus.get("_items")
    peers = [
        one["domain_uuid_key"]
        for one in (items if isinstance(items, list) else [])
        if isinstance(one, dict) and isinstance(one.get("domain_uuid_key"), str)
    ]
    return ThunderboltPort(
        receptacle=_word(tag.get("receptacle_id_key")),
        uuid=_word(bus.get("domain_uuid_key")).upper(),
        peer=_word(peers[0] if peers else "").upper(),
        speed=_word(tag.get("current_speed_key")),
    )


def _word(value: object) -> str:
    return value[:100] if isinstance(value, str) else ""


def parse_hardware_ports(text: str) -> dict[str, str]:
    """Name of a port to its interface. From `networksetup -listallhardwareports`."""
    return {match[1]: match[2] for match in _PORT.finditer(text)}


def parse_services(text: str) -> dict[str, tuple[str, bool]]:
    """Interface to its service's name and whether that is on. From `-listnetworkserviceorder`."""
    return {match[3]: (match[2], match[1] != "*") for match in _SERVICE.finditer(text)}


def parse_bridges(text: str) -> dict[str, tuple[bool, tuple[str, ...]]]:
    """Bridge to whether it is up and its member interfaces. From `ifconfig -a`."""
    found = list(_INTERFACE.finditer(text))
    ends = [*(match.start() for match in found[1:]), len(text)]
    return {
        match[1]: ("UP" in match[2].split(","), tuple(_MEMBER.findall(text[match.end() : end])[:_MAX_PORTS]))
        for match, end in zip(found, ends, strict=False)
        if match[1].startswith("bridge")
    }


def parse_addresses(text: str) -> dict[str, tuple[str, ...]]:
    """Interface to its IPv4 addresses. From `ifconfig -a`."""
    found = list(_INTERFACE.finditer(text))
    ends = [*(match.start() for match in found[1:]), len(text)]
    return {
        match[1]: tuple(_INET.findall(text[match.end() : end]))
        for match, end in zip(found, ends, strict=False)
    }


def fastest(ports: list[ThunderboltPort] | None) -> int:
    """Gb/s of the fastest port, with what is in it; 0 if no port says any. Thunderbolt 5 begins with 80."""
    return max((int(match[1]) for port in ports or () if (match := _GIGABITS.search(port.speed))), default=0)


def parse_default_route(text: str) -> str:
    """The interface of the default route, by `route -n get default`; empty where there is none."""
    match = _DEFAULT.search(text)
    return match[1] if match else ""


def read_ports(system: System) -> list[ThunderboltPort] | None:
    """The ports with the interfaces that belong to them; None when they are not known."""
    ports = parse_profile(system.run(*PROFILER, seconds=_PROFILER_SECONDS).text)
    if ports is None:
        return None
    devices = parse_hardware_ports(system.run(NETWORKSETUP, "-listallhardwareports").text)
    return [
        port.model_copy(update={"device": devices.get(f"Thunderbolt {port.receptacle}", "")})
        for port in ports
    ]


def read_bridges(system: System) -> list[Bridge]:
    """Every bridge over a Thunderbolt port, whatever it is called."""
    devices = parse_hardware_ports(system.run(NETWORKSETUP, "-listallhardwareports").text)
    thunderbolt = {device for name, device in devices.items() if name.startswith("Thunderbolt")}
    services = parse_services(system.run(NETWORKSETUP, "-listnetworkserviceorder").text)
    bridges = []
    for name, (up, members) in parse_bridges(system.run(IFCONFIG, "-a").text).items():
        service, enabled = services.get(name, ("", True))
        if thunderbolt & set(members):
            bridges.append(Bridge(name=name, service=service, members=members, enabled=up and enabled))
    return bridges


def check(system: System, view: View) -> Iterator[Finding]:
    """The ports of this Mac; whether cables and bridges form a loop is seen with all Macs together."""
    ports = read_ports(system)
    if ports is None:
        why = system.run(*PROFILER).why or "system_profiler printed no list of ports"
        yield unknown("thunderbolt.ports", "the Thunderbolt ports", why, " ".join(PROFILER))
        return
    cabled = [port for port in ports if port.peer]
    if not cabled:
        yield ok("thunderbolt.ports", f"no other Mac at the {len(ports)} Thunderbolt ports")
        return
    shown = ", ".join(
        f"port {port.receptacle or '?'} ({port.device or '?'}, {port.speed})" for port in cabled
    )
    yield ok("thunderbolt.ports", f"other Macs at Thunderbolt {shown}")
    for port in cabled:
        if not port.device:
            yield note(
                "thunderbolt.device",
                f"Thunderbolt port {port.receptacle or '?'} has no network interface that is known",
                "macOS lists none by that name",
                "look for the port",
                f"{NETWORKSETUP} -listallhardwareports",
            )
    why = system.run(IFCONFIG, "-a").why or system.run(NETWORKSETUP, "-listallhardwareports").why
    if why:
        yield unknown("thunderbolt.bridge", "bridges over Thunderbolt", why, f"{IFCONFIG} -a")
    default = parse_default_route(system.run(ROUTE, "-n", "get", "default").text)
    for bridge in read_bridges(system):
        if bridge.name == default:
            yield warning(
                "thunderbolt.default_route",
                f"this Mac's way to all other networks leads over {bridge.name}, and so through another Mac",
                "the bridge took an address by DHCP from the network that the other Mac shares or bridges; "
                "while that Mac sleeps, this Mac is cut off",
                "set the bridge's service to a manual address, or below Ethernet and Wi-Fi in the order",
                f"{NETWORKSETUP} -listnetworkserviceorder",
            )
        if bridge.enabled and len({port.device for port in cabled} & set(bridge.members)) > 1:
            yield note(
                "thunderbolt.bridge",
                f"{bridge.name} joins several Thunderbolt cables",
                "three or more Macs whose cables close a loop over bridges storm each other",
                "see whether they do, on a machine with the operator's bundle",
                "sealring doctor --cluster",
            )
