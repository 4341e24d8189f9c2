"""The reports of all nodes, compared: findings that no machine can make by itself.

A report is what its node says. Facts are compared; its findings are shown without their commands, because a
member that was broken into could have an operator paste anything: on the machine itself `sealring doctor`
prints them anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sealring.doctor import cabling, clocks
from sealring.doctor.memory import SYSTEM_NEEDS, raise_command
from sealring.doctor.reach import AS_SERVICE, DENIED, denied
from sealring.doctor.report import Facts, Finding, Report, ok, problem, warning
from sealring.mesh.system.networks import ALLOW_LOCAL_NETWORK, LOCAL_NETWORK
from sealring.mesh.units import size

_SHOWN = 8
_SHOWN_LINKS = 32


@dataclass(frozen=True)
class PlannedStage:
    """A plan's demand on a node: bytes of weights and of one row's KV cache."""

    ring: str
    weights: int
    cache: int


@dataclass(frozen=True)
class Node:
    """A node as the coordinator knows it, with its report or why it has none; its clock in seconds."""

    member: str
    name: str
    online: bool
    trouble: str = ""
    report: Report | None = None
    failure: str = ""
    offset: float = 0.0
    offset_error: float = 0.0
    memory_usable: int = 0
    stages: Sequence[PlannedStage] = field(default=())


@dataclass(frozen=True)
class MeasuredLink:
    """What the node `caller` measured of its fastest way to `called`, by names; no host where it found none.

    `measured` is a time as people read it.
    """

    caller: str
    called: str
    host: str
    round_trip_us: int
    bytes_per_second: int
    measured: str


def examine(nodes: Sequence[Node], links: Sequence[MeasuredLink] = ()) -> list[Finding]:
    """The findings that compare the nodes. `links` are as the coordinator has them."""
    facts = {one.member: one.report.facts for one in nodes if one.report is not None}
    names = {one.member: one.name for one in nodes}
    hosts = {member: found.model_copy(update={"name": names[member]}) for member, found in facts.items()}
    return [
        *_presence(nodes),
        *_versions(hosts),
        *_reach(hosts, {one.member for one in nodes if one.online}, names),
        *clocks.compare_all(
            {one.name: (one.offset, one.offset_error) for one in nodes if one.report is not None}
        ),
        *_memory(nodes),
        *_links(links),
        *cabling.check(hosts),
    ]


def without_commands(report: Report) -> Report:
    """Another machine's report as it may be shown."""
    findings = tuple(one.model_copy(update={"command": ""}) for one in report.findings)
    return report.model_copy(update={"findings": findings})


def _presence(nodes: Sequence[Node]) -> Iterator[Finding]:
    for one in nodes:
        if not one.online:
            why = one.trouble or "its daemon is not running, or cannot reach the coordinator"
            yield problem(
                "cluster.offline", f"{one.name} is offline", why, "look on that machine", "sealring doctor"
            )
        elif one.report is None:
            yield warning("cluster.report", f"{one.name} gave no report", one.failure, "look on that machine")
    if nodes and all(one.report is not None for one in nodes):
        shown = "the one node" if len(nodes) == 1 else f"all {len(nodes)} nodes"
        yield ok("cluster.report", f"{shown} gave a report")


def _versions(hosts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Differences in versions and settings that should be the same everywhere."""
    if not hosts:
        return
    rdma = any(facts.rdma == "enabled" for facts in hosts.values())
    built = "models may be built differently"
    kinds: list[tuple[str, Callable[[Facts], str], Callable[..., Finding] | None, str]] = [
        ("sealring", lambda facts: facts.sealring, problem, "all machines of a cluster run one release"),
        ("mlx", lambda facts: facts.packages.get("mlx", ""), warning, "answers may depend on where rows run"),
        ("mlx-lm", lambda facts: facts.packages.get("mlx-lm", ""), warning, built),
        ("mlx-vlm", lambda facts: facts.packages.get("mlx-vlm", ""), warning, built),
        (
            "macOS",
            lambda facts: f"{facts.os_version} {facts.os_build}".strip() if facts.system == "darwin" else "",
            warning if rdma else None,
            "RDMA needs equal builds",
        ),
    ]
    same = True
    for what, read, severity, why in kinds:
        groups: dict[str, list[str]] = defaultdict(list)
        for facts in hosts.values():
            if value := read(facts):
                groups[value].append(facts.name)
        if len(groups) > 1 and severity is not None:
            same = False
            shown = "; ".join(
                f"{value} on {', '.join(names[:_SHOWN])}" for value, names in sorted(groups.items())
            )
            yield severity(
                "versions.equal", f"different versions of {what}: {shown}", why, "update the older ones"
            )
    if same and len(hosts) > 1:
        yield ok("versions.equal", f"all {len(hosts)} nodes run the same versions")


def _reach(hosts: Mapping[str, Facts], online: set[str], names: Mapping[str, str]) -> Iterator[Finding]:
    """Failed connections between nodes that are online. The other connections show which end is at fault."""
    failed: dict[str, dict[str, str]] = defaultdict(dict)
    tried: dict[str, set[str]] = defaultdict(set)
    for member, facts in hosts.items():
        for one in facts.connections:
            if one.member in online:
                tried[member].add(one.member)
                if one.error:
                    failed[member][one.member] = one.error
        if denied([one for one in facts.connections if one.member in online]) and facts.system == "darwin":
            yield problem(
                "reach.local_network",
                f"{facts.name} reaches no other node: {DENIED} (errno 65)",
                LOCAL_NETWORK,
                f"on {facts.name}: {ALLOW_LOCAL_NETWORK}",
                AS_SERVICE,
            )
            failed.pop(member, None)
    all_up = any(tried.values()) and not any(
        one.error and one.member in online for facts in hosts.values() for one in facts.connections
    )
    for target in sorted(online, key=lambda member: names[member]):
        trying = [member for member in tried if target in tried[member] and member != target]
        missing = [member for member in trying if target in failed.get(member, {})]
        if not missing:
            continue
        errors = sorted({failed[member][target] for member in missing})
        everybody = len(missing) == len(trying) and len(trying) > 1
        shown = ", ".join(names[member] for member in missing[:_SHOWN])
        yield problem(
            "reach.pair",
            f"{names[target]} is reached by nobody ({', '.join(errors)})"
            if everybody
            else f"{names[target]} is not reached by {shown} ({', '.join(errors)})",
            "its address is wrong or its firewall blocks"
            if everybody
            else "there is no way between these two, or one of them is denied Local Network access",
            f"compare the address with what {names[target]} has, and run the doctor on both",
            "sealring doctor",
        )
    if all_up:
        yield ok("reach.pair", "all nodes that are online reach each other")


def _links(links: Sequence[MeasuredLink]) -> Iterator[Finding]:
    """What was measured between nodes, the slowest first."""
    found = sorted((one for one in links if one.host), key=lambda one: one.bytes_per_second)
    for one in found[:_SHOWN_LINKS]:
        yield ok(
            "links.measured",
            f"{one.caller} to {one.called}: {size(one.bytes_per_second)}/s, "
            f"{one.round_trip_us / 1000:.2f} ms there and back, over {one.host}, measured {one.measured}",
        )
    for one in [one for one in links if not one.host][:_SHOWN_LINKS]:
        yield warning(
            "links.measured",
            f"{one.caller} found no way to {one.called} ({one.measured})",
            "rings are ordered so that these two are no neighbours, where others can be between them",
            "see that they share a network or a cable, and run the doctor on both",
            "sealring doctor",
        )


def _memory(nodes: Sequence[Node]) -> Iterator[Finding]:
    for one in nodes:
        facts = one.report.facts if one.report is not None else Facts()
        limit = facts.wired_limit or one.memory_usable
        need = sum(stage.weights + stage.cache for stage in one.stages)
        if not need or not limit:
            continue
        if need <= limit:
            yield ok("memory.plan", f"{one.name} may hold {size(limit)}, and its plan needs {size(need)}")
            continue
        wanted = need + (1 << 30)
        fits = facts.system == "darwin" and wanted <= facts.memory - SYSTEM_NEEDS
        yield problem(
            "memory.plan",
            f"{one.name} may hold {size(limit)} for the GPU, and its plan needs {size(need)}",
            "the limit is forgotten at every restart; beyond it memory cannot be wired and loading fails",
            f"raise the limit on {one.name}"
            if fits
            else "deploy again: the plan is too large for this machine",
            raise_command(wanted) if fits else "",
        )
