"""Cables between Macs: each once, and loops over bridges."""

from __future__ import annotations

from itertools import pairwise

import pytest
from doctortest import by_id
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.doctor.cabling import Cable, check, find_cables, find_loop, rdma_devices
from sealring.doctor.report import Bridge, Facts, Severity, ThunderboltPort

MESH = {"a": ("ab", "ac"), "b": ("ab", "bc"), "c": ("bc", "ac")}


def host(name: str, *cables: str, bridged: bool = True, rdma: str = "") -> Facts:
    """A Mac with a port for each cable, which two Macs name; all ports are in one bridge."""
    ports = tuple(
        ThunderboltPort(
            uuid=f"{cable}/{name}", peer="/".join((cable, *(set(cable) - {name}))), device=f"en{number}"
        )
        for number, cable in enumerate(cables)
    )
    bridge = Bridge(
        name="bridge0",
        service="Thunderbolt Bridge",
        members=tuple(port.device for port in ports),
        enabled=bridged,
    )
    return Facts(name=name, ports=ports, bridges=(bridge,), rdma=rdma)


def hosts(*facts: Facts) -> dict[str, Facts]:
    return {one.name: one for one in facts}


def test_two_macs_with_a_cable() -> None:
    pair = hosts(host("a", "ab"), host("b", "ab"))
    assert [set(cable.ends) for cable in find_cables(pair)] == [{"a", "b"}]
    assert by_id(check(pair))["thunderbolt.loop"].severity is Severity.OK


def test_what_one_end_tells_is_enough() -> None:
    silent = Facts(name="b", ports=(ThunderboltPort(uuid="ab/b", device="en0"),))
    assert len(find_cables(hosts(host("a", "ab"), silent))) == 1


def test_three_macs_in_a_circle_storm() -> None:
    circle = hosts(host("a", "ab", "ac"), host("b", "ab", "bc"), host("c", "ac", "bc"))
    found = by_id(check(circle))["thunderbolt.loop"]
    assert found.severity is Severity.PROBLEM
    assert found.command == 'sudo /usr/sbin/networksetup -setnetworkserviceenabled "Thunderbolt Bridge" off'
    assert all(name in found.what for name in "abc")


def test_a_circle_with_one_bridge_off_does_not() -> None:
    circle = hosts(host("a", "ab", "ac"), host("b", "ab", "bc", bridged=False), host("c", "ac", "bc"))
    assert by_id(check(circle))["thunderbolt.loop"].severity is Severity.OK


def test_a_command_holds_nothing_that_a_node_made_up() -> None:
    circle = hosts(host("a", "ab", "ac"), host("b", "ab", "bc"), host("c", "ac", "bc"))
    evil = Bridge(name="x", service='" off; rm -rf / "', members=("en0", "en1"))
    circle = {name: one.model_copy(update={"bridges": (evil,)}) for name, one in circle.items()}
    assert by_id(check(circle))["thunderbolt.loop"].command == "sudo /sbin/ifconfig bridge0 down"


def test_a_cable_to_a_stranger_or_to_the_port_itself_counts_for_nothing() -> None:
    assert list(check(hosts(host("a", "ax")))) == []
    assert find_cables(hosts(Facts(name="a", ports=(ThunderboltPort(uuid="A", peer="A"),)))) == []
    nameless = Facts(name="b", ports=(ThunderboltPort(peer="ab/a"),))
    assert find_cables(hosts(Facts(name="a", ports=(ThunderboltPort(uuid="ab/a"),)), nameless)) == []


@pytest.mark.parametrize(("here", "there"), [(True, False), (False, True)])
def test_a_cable_is_bridged_where_both_ends_are(here: bool, there: bool) -> None:
    pair = hosts(host("a", "ab", bridged=here), host("b", "ab", bridged=there))
    assert [cable.bridged for cable in find_cables(pair)] == [False]


def test_macs_without_a_name_are_shown_by_their_ids() -> None:
    circle = {name: host(name, *cables).model_copy(update={"name": ""}) for name, cables in MESH.items()}
    bridge = Bridge(name="z", service="Of b", members=("en0", "en1"))
    circle["b"] = circle["b"].model_copy(update={"bridges": (bridge,)})
    loop = by_id(check(circle))["thunderbolt.loop"]
    assert "close a loop: b - a - c - b" in loop.what
    assert loop.fix.startswith("take the bridge away on b, ")
    assert loop.command.endswith(' "Of b" off')
    pair = {name: circle[name] for name in "ab"}
    assert by_id(check(pair))["thunderbolt.loop"].what.endswith("without a loop: b - a")


def test_a_service_is_turned_off_where_its_bridge_is_on() -> None:
    off = Bridge(name="x", service="Off", members=(), enabled=False)
    nameless = Bridge(name="y", members=("en0", "en1"))
    on = Bridge(name="z", service="On", members=("en0", "en1"))
    circle = {
        name: host(name, *cables).model_copy(update={"bridges": (off, nameless, on)})
        for name, cables in MESH.items()
    }
    assert by_id(check(circle))["thunderbolt.loop"].command.endswith('-setnetworkserviceenabled "On" off')


def test_a_mesh_for_rdma_has_a_cable_between_every_pair() -> None:
    chain = [host("a", "ab", rdma="enabled"), host("b", "ab", "bc", rdma="enabled")]
    open_end = hosts(*chain, host("c", "bc", rdma="enabled"))
    assert by_id(check(open_end))["rdma.mesh"].what == "no cable between a - c"
    assert "rdma.mesh" not in by_id(check(hosts(*chain, host("c", "bc"))))


def test_a_mesh_tells_which_device_leads_to_whom() -> None:
    mesh = [host(name, *cables, rdma="enabled") for name, cables in MESH.items()]
    found = [one.what for one in check(hosts(*mesh[:2])) if one.id == "rdma.devices"]
    assert found == [
        'RDMA devices of a: rdma_devices = ["b=rdma_en0"]',
        'RDMA devices of b: rdma_devices = ["a=rdma_en0"]',
    ]
    assert rdma_devices(hosts(*mesh), ["c", "a", "b"]) == [
        [None, "rdma_en1", "rdma_en0"],
        ["rdma_en1", None, "rdma_en0"],
        ["rdma_en1", "rdma_en0", None],
    ]
    assert rdma_devices(hosts(*mesh[:1], host("d")), ["a", "d"]) == [[None, None], [None, None]]
    looped = Facts(
        name="a",
        ports=(ThunderboltPort(uuid="A", peer="B", device="en0"), ThunderboltPort(uuid="B", device="en1")),
    )
    assert rdma_devices(hosts(looped), ["a"]) == [[None]]
    odd = Facts(
        name="a",
        ports=(ThunderboltPort(uuid="A", peer="B", device="$(x)"), ThunderboltPort(peer="B", device="en7")),
    )
    assert rdma_devices(hosts(odd, Facts(name="b", ports=(ThunderboltPort(uuid="B"),))), ["a", "b"])[0] == [
        None,
        "rdma_en7",
    ]


def test_ids_are_shown_as_far_as_settings_need_them() -> None:
    long = {"a" * 17: host("a", "ab", rdma="enabled"), "b" * 17: host("b", "ab", rdma="enabled")}
    found = [one.what for one in check(long) if one.id == "rdma.devices"]
    assert found[0] == f'RDMA devices of a: rdma_devices = ["{"b" * 16}=rdma_en0"]'


EDGES = st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("abcdef")), max_size=9)


@settings(max_examples=25)
@given(edges=EDGES)
def test_a_loop_is_found_where_there_is_one_and_is_one(edges: list[tuple[str, str]]) -> None:
    cables = [Cable(edge, True) for edge in edges]
    loop = find_loop(cables)
    nodes = {end for edge in edges for end in edge}
    groups = {node: node for node in nodes}

    def root(node: str) -> str:
        while groups[node] != node:
            node = groups[node]
        return node

    closed = False
    for first, second in edges:
        closed |= root(first) == root(second)
        groups[root(first)] = root(second)
    assert bool(loop) == closed
    assert len(set(loop)) == len(loop)
    known = {frozenset(edge) for edge in edges}
    assert all(frozenset(pair) in known for pair in pairwise([*loop, *loop[:1]]))
