"""`sealring status`: nodes, gateways, rings, and why a node is in no ring."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.calls.members import why_idle
from sealring.cli.terminal.output import plain
from sealring.v1 import admin_pb2

ONLINE, OFFLINE, DRAINING = (
    admin_pb2.NODE_STATE_ONLINE,
    admin_pb2.NODE_STATE_OFFLINE,
    admin_pb2.NODE_STATE_DRAINING,
)


def node(**fields: Any) -> dict[str, Any]:
    return plain(
        admin_pb2.Node(
            **{"id": "b", "name": "b", "state": ONLINE, "trust": 20, "memory_usable": 9 << 30, **fields}
        )
    )


def deployment(**spec: Any) -> dict[str, Any]:
    stage = admin_pb2.StagePlan(member="a", weight_bytes=4 << 30, kv_bytes=1 << 30, end_layer=4)
    plan = admin_pb2.DeploymentPlan(
        spec=admin_pb2.DeploymentSpec(name="m", **spec), rings=[admin_pb2.RingPlan(stages=[stage])]
    )
    return plain(admin_pb2.Deployment(plan=plan))


@pytest.mark.parametrize(
    ("fields", "spec", "why"),
    [
        ({"rings": [admin_pb2.NodeRing(ring="m-0")]}, {}, ""),
        ({"state": OFFLINE}, {}, "offline, it has not connected yet"),
        ({"state": OFFLINE, "last_seen": 1}, {}, "offline, last seen 19"),
        ({"state": OFFLINE, "trouble": "its clock is wrong"}, {}, "offline, its clock is wrong"),
        ({"trouble": "its clock is wrong"}, {}, "its clock is wrong"),
        ({"state": DRAINING}, {}, "it was drained"),
        ({}, None, "no model is served"),
        ({}, {"trust_floor": 30}, "m wants trust level hardware and it has self_signed"),
        ({}, {"members": ["a"]}, "m is for other nodes"),
        ({"trust": 20}, {"trust_floor": 20}, "m does not need it"),
        ({}, {"members": ["b"]}, "m does not need it"),
        ({"memory_usable": 5 << 30}, {}, "m does not need it"),
        ({"memory_usable": 1 << 30}, {}, "m needs 5.0 GiB of memory on each node and it has 1.0 GiB"),
        ({"id": "a"}, {}, "m is about to use it"),
        ({}, {}, "m does not need it: one node holds all of it"),
    ],
)
def test_why_a_node_is_in_no_ring(fields: dict[str, Any], spec: dict[str, Any] | None, why: str) -> None:
    said = why_idle(node(**fields), [] if spec is None else [deployment(**spec)])
    assert said.startswith(why)
    assert bool(said) == bool(why)


def test_a_plan_without_stages_needs_no_memory() -> None:
    empty = deployment()
    empty["plan"]["rings"] = []
    assert why_idle(node(memory_usable=0), [empty]) == "m does not need it: 0 nodes hold all of it"
    assert why_idle(node(), [deployment(trust_floor=30), empty]).count("; ") == 1


ROOT = SimpleNamespace(ends=4_000_000_000.5, ends_soon=lambda now: True)


@pytest.fixture
def looked(coordinator: Any) -> Any:
    """A coordinator with one node and one gateway, which answers twice, and then Ctrl-C comes."""
    found = admin_pb2.ListNodesResponse(
        nodes=[admin_pb2.Node(id="a", name="mac-1", state=ONLINE, trust=10)],
        gateways=[admin_pb2.Gateway(id="g", name="edge", watching=True)],
    )
    coordinator.answers["ListNodes"] = [found, found, KeyboardInterrupt]
    return coordinator


def test_it_shows_nodes_gateways_and_why(here: Any, looked: Any) -> None:
    shown = here("status")
    assert "mac-1 is in no ring: no model is served" in shown.out
    assert "edge" in shown.out
    assert "connected" in shown.out
    assert "the cluster ends" not in shown.err
    found = here("status", "--json").data
    assert [found[part][0]["name"] for part in ("nodes", "gateways")] == ["mac-1", "edge"]
    assert (found["nodes"][0]["trust"], found["nodes"][0]["idle"]) == ("software", "no model is served")


def test_it_shows_what_nodes_store_of_prompts(here: Any, coordinator: Any) -> None:
    stored = {"stored_bytes": 3 << 30, "stored_blocks": 1200, "stored_read": 20_480, "stored_damaged": 2}
    nodes = [
        admin_pb2.Node(id="a", name="mac-1", state=ONLINE, stored_broken=True, on_battery=True, **stored),
        admin_pb2.Node(id="b", name="mac-2", state=ONLINE, low_power=True),
    ]
    coordinator.answers["ListNodes"] = admin_pb2.ListNodesResponse(nodes=nodes)
    said = "mac-1 stores 3.0 GiB of prompts in 1,200 blocks, and has read 20,480 tokens of them"
    assert f"{said}; 2 were damaged; its disk takes no more" in here("status").out
    assert "on battery: mac-1\nin Low Power Mode: mac-2\n" in here("status").out
    node, _ = here("status", "--json").data["nodes"]
    assert {name: node[name] for name in stored} == stored


def test_watching_shows_it_again_until_ctrl_c_and_warns_of_the_clusters_end(here: Any, looked: Any) -> None:
    looked.root = ROOT
    done = here("status", "--watch")
    assert (done.status, done.out.count("mac-1 is in no ring"), done.out[0]) == (130, 2, "\n")
    assert "the cluster ends at 2096-" in done.err
