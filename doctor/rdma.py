"""RDMA over Thunderbolt: whether it is on, and the devices of `rdma_devices` ready for it.

Only tensor deployments with `--backend jaccl` need it. MLX's jaccl opens a device by its name and takes the
IPv4 address of its interface (mlx/distributed/jaccl/lib/jaccl/rdma.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sealring.doctor.report import Finding, note, ok, problem, unknown
from sealring.doctor.system import System
from sealring.doctor.thunderbolt import IFCONFIG, fastest, parse_addresses, parse_bridges, read_ports
from sealring.doctor.versions import os_version
from sealring.doctor.view import View

RDMA_CTL = "/usr/bin/rdma_ctl"
IBV_DEVICES = "/usr/bin/ibv_devices"
FIRST_VERSION = (26, 2)
_WITHOUT_RECOVERY = (27,)
"""From here `rdma_ctl enable` is said to work without the recovery system. Nobody has confirmed it."""

_LEAST_GIGABITS = 80
"""Thunderbolt 5 has these. `rdma_ctl` says "enabled" with Thunderbolt 4 too, where there is no device."""

_DEVICE = re.compile(r"^\s*(rdma_[a-z0-9]{1,15})\s+[0-9a-f]{1,32}\s*$", re.MULTILINE)


def parse_status(text: str) -> bool | None:
    """Whether RDMA is on, by `rdma_ctl status`."""
    return {"enabled": True, "disabled": False}.get(text.strip().rpartition(" ")[2].rstrip(".").lower())


def parse_devices(text: str) -> tuple[str, ...]:
    """Names of RDMA devices, by `ibv_devices`."""
    return tuple(_DEVICE.findall(text))


def parse_version(text: str) -> tuple[int, ...]:
    """Numbers of a version such as 26.2.1; empty where it is none."""
    parts = text.strip().split(".")
    good = len(parts) <= 4 and all(re.fullmatch(r"[0-9]{1,6}", part) for part in parts)
    return tuple(map(int, parts)) if good else ()


def status(system: System) -> str:
    """enabled, disabled, impossible (by the ports), or empty if it is unknown."""
    found = parse_status(system.run(RDMA_CTL, "status").text)
    if found and _impossible(system):
        return "impossible"
    return "" if found is None else "enabled" if found else "disabled"


def _impossible(system: System) -> bool:
    """Whether no port is of Thunderbolt 5. A slow cable in a fast port leaves the device there."""
    slow = 0 < fastest(read_ports(system)) < _LEAST_GIGABITS
    return slow and not parse_devices(system.run(IBV_DEVICES).text)


def check(system: System, view: View) -> Iterator[Finding]:
    """RDMA's state: a note unless the node's settings name devices, since most deployments need none."""
    wanted = [line.partition("=")[2] for line in view.settings.rdma_devices]
    version = parse_version(os_version(system))
    if version and version < FIRST_VERSION:
        if wanted:
            yield _unready("RDMA over Thunderbolt begins with macOS 26.2", "update macOS, on every Mac alike")
        else:
            yield ok("rdma.status", "RDMA over Thunderbolt begins with macOS 26.2")
        return
    found = status(system)
    if not found:
        why = system.run(RDMA_CTL, "status").why or "rdma_ctl answered in words that are not known here"
        yield unknown("rdma.status", "RDMA over Thunderbolt", why, f"{RDMA_CTL} status")
    elif found == "impossible":
        what = "this Mac has no RDMA: its Thunderbolt ports are slower than Thunderbolt 5"
        if wanted:
            yield _unready(what, "take rdma_devices out of its settings, and use --backend ring")
        else:
            yield ok("rdma.status", f"{what}, though rdma_ctl says enabled")
    elif found == "disabled" and wanted:
        fix = "turn it on at the Mac, in the Terminal of its recovery system"
        if version >= _WITHOUT_RECOVERY:
            fix = "turn it on at the Mac; if it refuses, in the Terminal of its recovery system"
        yield _unready("RDMA over Thunderbolt is off", fix, "sudo rdma_ctl enable")
    elif found == "disabled":
        yield ok(
            "rdma.status",
            "RDMA over Thunderbolt is off; only --backend jaccl needs it",
        )
    else:
        devices = parse_devices(system.run(IBV_DEVICES).text)
        yield note(
            "rdma.status",
            f"RDMA over Thunderbolt is on ({', '.join(devices) or 'no device'})",
            "only --backend jaccl uses it, and needs the same build of macOS on every Mac",
        )
        yield from _devices(system, wanted, devices)


def _devices(system: System, wanted: Sequence[str], devices: Sequence[str]) -> Iterator[Finding]:
    """Whether jaccl can use the devices in the settings."""
    interfaces = system.run(IFCONFIG, "-a").text
    addresses = parse_addresses(interfaces)
    bridged = {
        member: name for name, (up, members) in parse_bridges(interfaces).items() if up for member in members
    }
    ready = True
    for device in wanted:
        interface = device.removeprefix("rdma_")
        if device not in devices:
            fix = "correct it: sealring doctor --cluster prints what to set"
            finding = _unready(f"rdma_devices names {device}, and this Mac has none", fix)
        elif interface in bridged:
            fix = "take it out, and give it an address of its own, in a network of the cable's two ends alone"
            command = f"sudo {IFCONFIG} {bridged[interface]} deletem {interface}"
            finding = _unready(f"{interface} of {device} is in {bridged[interface]}", fix, command)
        elif interfaces and not addresses.get(interface):
            fix = "give it one, in a network of the cable's two ends alone"
            finding = _unready(f"{interface} of {device} has no IPv4 address", fix)
        else:
            continue
        ready = False
        yield finding
    if wanted and ready:
        yield ok("rdma.devices", f"the devices of rdma_devices are there: {', '.join(wanted)}")


def _unready(what: str, fix: str, command: str = "") -> Finding:
    why = "rdma_devices is set, and tensor rings over jaccl do not come up without"
    return problem("rdma.unready", what, why, fix, command)
