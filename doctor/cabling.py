"""The Thunderbolt cables between the Macs of a cluster as a graph, and the loops that bridges make of them.

macOS joins all Thunderbolt ports of a Mac into one bridge, which learns no spanning tree: three Macs cabled
in a circle, or two cables between two Macs, pass broadcasts round for ever.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sealring.doctor.report import Bridge, Facts, Finding, note, ok, problem

_DEVICE = re.compile(r"[a-z0-9]{1,10}")
"""Another machine's word, which people paste."""


@dataclass(frozen=True)
class Cable:
    """A cable between the members `ends` (ids); `bridged` if both ends are in a bridge that is on."""

    ends: tuple[str, str]
    bridged: bool


def find_cables(hosts: Mapping[str, Facts]) -> list[Cable]:
    """Each cable between two hosts once, by the uuids of its ends. A report from one end is enough."""
    owners = {
        port.uuid: (member, port.device)
        for member, facts in hosts.items()
        for port in facts.ports
        if port.uuid
    }
    bridged = {
        member: {device for bridge in facts.bridges if bridge.enabled for device in bridge.members}
        for member, facts in hosts.items()
    }
    cables: dict[frozenset[str], Cable] = {}
    for member, facts in hosts.items():
        for port in facts.ports:
            if port.uuid and port.peer in owners and port.peer != port.uuid:
                other, device = owners[port.peer]
                both = port.device in bridged[member] and device in bridged[other]
                cables[frozenset((port.uuid, port.peer))] = Cable((member, other), both)
    return list(cables.values())


def rdma_devices(hosts: Mapping[str, Facts], order: Sequence[str]) -> list[list[str | None]]:
    """Each member's devices that lead to the others, by rank; None for a pair without a cable."""
    owners = {port.uuid: member for member in order for port in hosts[member].ports if port.uuid}

    def device(one: str, other: str) -> str | None:
        ports = (port for port in hosts[one].ports if owners.get(port.peer) == other != one)
        return next((f"rdma_{port.device}" for port in ports if _DEVICE.fullmatch(port.device)), None)

    return [[device(one, other) for other in order] for one in order]


def find_loop(cables: Sequence[Cable]) -> list[str]:
    """The members of one loop of bridged cables, in its order; empty without a loop."""
    beside: dict[str, list[str]] = defaultdict(list)
    for cable in cables:
        if not cable.bridged:
            continue
        first, second = cable.ends
        if path := _path(beside, first, second):
            return path
        beside[first].append(second)
        beside[second].append(first)
    return []


def _path(beside: Mapping[str, Sequence[str]], start: str, end: str) -> list[str]:
    came: dict[str, str] = {start: ""}
    waiting = deque([start])
    while waiting:
        here = waiting.popleft()
        if here == end:
            path = [here]
            while came[path[-1]]:
                path.append(came[path[-1]])
            return path
        for there in beside.get(here, ()):
            if there not in came:
                came[there] = here
                waiting.append(there)
    return []


def check(hosts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Findings about the cables and a loop; none if no cable is known."""
    cables = find_cables(hosts)
    if not cables:
        return
    loop = find_loop(cables)
    if loop:
        names = [hosts[member].name or member for member in loop]
        yield problem(
            "thunderbolt.loop",
            f"Thunderbolt cables and bridges close a loop: {' - '.join([*names, names[0]])}",
            "a bridge passes every broadcast on, so a loop of them storms until nothing works",
            f"take the bridge away on {names[0]}, and give each cable addresses of its own",
            _off(hosts[loop[0]].bridges),
        )
    else:
        shown = "; ".join(" - ".join(hosts[member].name or member for member in one.ends) for one in cables)
        yield ok("thunderbolt.loop", f"Thunderbolt cables, without a loop: {shown}")
    pairs = {frozenset(cable.ends) for cable in cables}
    cabled = sorted({member for cable in cables for member in cable.ends})
    apart = [
        (first, second)
        for index, first in enumerate(cabled)
        for second in cabled[index + 1 :]
        if frozenset((first, second)) not in pairs
    ]
    if apart and all(hosts[member].rdma == "enabled" for member in cabled):
        shown = ", ".join(f"{hosts[one].name} - {hosts[two].name}" for one, two in apart[:8])
        yield note(
            "rdma.mesh",
            f"no cable between {shown}",
            "--backend jaccl needs a cable between every pair",
        )
    elif all(hosts[member].rdma == "enabled" for member in cabled):
        order = sorted(cabled, key=lambda member: hosts[member].name)
        for member, row in zip(order, rdma_devices(hosts, order), strict=True):
            named = [f"{other[:16]}={device}" for other, device in zip(order, row, strict=True) if device]
            yield note(
                "rdma.devices",
                f"RDMA devices of {hosts[member].name}: rdma_devices = {json.dumps(named)}",
                "--backend jaccl takes them from [node] of that machine's settings file",
            )


def _off(bridges: Sequence[Bridge]) -> str:
    service = next((bridge.service for bridge in bridges if bridge.enabled and bridge.service), "")
    if service.replace(" ", "").isalnum():
        return f'sudo /usr/sbin/networksetup -setnetworkserviceenabled "{service}" off'
    return "sudo /sbin/ifconfig bridge0 down"
