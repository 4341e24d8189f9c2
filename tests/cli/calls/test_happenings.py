"""What `sealring up` says of the cluster while it runs."""

from __future__ import annotations

from typing import Any

from sealring.cli.calls.happenings import deployment_lines, deployment_states, node_lines
from sealring.v1 import admin_pb2, membership_pb2

ONLINE, OFFLINE = admin_pb2.NODE_STATE_ONLINE, admin_pb2.NODE_STATE_OFFLINE


def nodes(**states: Any) -> dict[str, admin_pb2.Node]:
    return {
        name: admin_pb2.Node(id=name, name=name, state=state, level="software")
        for name, state in states.items()
    }


def test_who_comes_and_goes() -> None:
    assert list(node_lines({}, nodes(a=OFFLINE))) == ["a has joined, trust level software"]
    assert list(node_lines({}, nodes(a=ONLINE)))[1:] == ["a is online"]
    assert list(node_lines(nodes(a=ONLINE), nodes(a=ONLINE))) == []
    gone = nodes(a=OFFLINE)
    assert list(node_lines(nodes(a=ONLINE), gone)) == ["a is offline"]
    gone["a"].trouble = "it sleeps"
    assert list(node_lines(nodes(a=ONLINE), gone)) == ["a is offline: it sleeps"]
    draining = nodes(a=admin_pb2.NODE_STATE_DRAINING)
    assert list(node_lines(nodes(a=ONLINE), draining)) == ["a is draining"]
    assert list(node_lines(nodes(a=ONLINE, b=ONLINE), nodes(b=ONLINE))) == ["a is out of the cluster"]


def deployment(phase: Any, *, reason: str = "", loading: float | None = None) -> admin_pb2.Deployment:
    progress = [] if loading is None else [membership_pb2.EpochProgress(what="loading", fraction=loading)]
    stages = [admin_pb2.StagePlan(member=name, member_name=name) for name in ("b", "a")]
    return admin_pb2.Deployment(
        plan=admin_pb2.DeploymentPlan(
            spec=admin_pb2.DeploymentSpec(name="demo"), rings=[admin_pb2.RingPlan(stages=stages)]
        ),
        rings=[admin_pb2.RingStatus(ring="demo-0", phase=phase, reason=reason, progress=progress)],
    )


def test_what_deployments_do_without_a_line_for_each_percent() -> None:
    forming, serving = membership_pb2.RING_PHASE_FORMING, membership_pb2.RING_PHASE_SERVING
    down = membership_pb2.RING_PHASE_DOWN
    steps = [
        deployment(forming),
        deployment(forming, loading=0.1),
        deployment(forming, loading=0.9),
        deployment(serving),
        deployment(down, reason="b is gone"),
    ]
    said, before = [], dict[str, str]()
    for step in steps:
        now = deployment_states([step])
        said += deployment_lines(before, now)
        before = now
    assert list(deployment_lines(before, before)) == []
    said += deployment_lines(before, {})
    assert said == [
        "demo: forming the ring",
        "demo: loading",
        "demo serves on a, b",
        "demo: waiting, b is gone",
        "demo is deleted",
    ]
    assert deployment_states([deployment(serving), admin_pb2.Deployment()]) == {
        "demo": "demo serves on a, b",
        "": ": loading",
    }
    both = deployment(serving)
    both.rings.add(phase=forming)
    assert deployment_states([both]) == {"demo": "demo: forming the ring"}
