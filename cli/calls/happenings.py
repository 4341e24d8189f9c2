"""What happens in a cluster, told in a line each: who comes and goes, and what the deployments do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sealring.cli.calls.waiting import describe
from sealring.mesh.trust.levels import described


def node_lines(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[str]:
    """What has changed between two looks at the nodes (Admin's, by their ids)."""
    from sealring.v1 import admin_pb2

    for identifier, node in now.items():
        old = before.get(identifier)
        if old is None:
            yield f"{node.name} has joined, trust level {described(node.level)}"
        was = old.state if old is not None else admin_pb2.NODE_STATE_OFFLINE
        if node.state == was:
            continue
        if node.state == admin_pb2.NODE_STATE_ONLINE:
            yield f"{node.name} is online"
        elif node.state == admin_pb2.NODE_STATE_OFFLINE:
            yield f"{node.name} is offline{': ' + node.trouble if node.trouble else ''}"
        elif node.state == admin_pb2.NODE_STATE_DRAINING:
            yield f"{node.name} is draining"
    for identifier, node in before.items():
        if identifier not in now:
            yield f"{node.name} is out of the cluster"


def code_lines(tokens: Any) -> tuple[str, ...]:
    """What there is to say of the join code in Admin's list of tokens."""
    if not tokens.HasField("code"):
        return ("the join code has ended (another: sealring token code)",)
    if tokens.code.used_up:
        return ("too many wrong join codes were typed: this one has ended (another: sealring token code)",)
    if tokens.code.wrong:
        return (f"wrong join codes that were typed: {tokens.code.wrong}",)
    return ()


def deployment_lines(before: Mapping[str, str], now: Mapping[str, str]) -> Iterable[str]:
    """What has changed between two `deployment_states`."""
    for name, state in now.items():
        if before.get(name) != state:
            yield state
    for name in before:
        if name not in now:
            yield f"{name} is deleted"


def deployment_states(deployments: Iterable[Any]) -> dict[str, str]:
    """The state of each deployment of Admin's list, by its name, without its progress."""
    from sealring.v1 import membership_pb2

    states = {}
    for one in deployments:
        name = one.plan.spec.name
        if one.rings and all(ring.phase == membership_pb2.RING_PHASE_SERVING for ring in one.rings):
            members = {stage.member: stage.member_name for ring in one.plan.rings for stage in ring.stages}
            states[name] = f"{name} serves on {', '.join(sorted(members.values()))}"
        elif one.HasField("load") and not one.rings:
            phase = membership_pb2.LoadPhase.Name(one.load.phase).removeprefix("LOAD_PHASE_")
            states[name] = f"{name} is {phase.lower().replace('_', ' ')}"
        else:
            forming = [ring for ring in one.rings if not ring.progress]
            states[name] = describe(name, forming) if forming else f"{name}: loading"
    return states
