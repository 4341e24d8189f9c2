from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from commands import Coordinator, quickly

from sealring.cli.calls.waiting import (
    describe,
    find_deployment,
    wait_until_offered,
    wait_until_online,
    wait_until_serving,
)
from sealring.mesh.errors import DeadlineExceeded, FailedPrecondition, NotFound
from sealring.v1 import admin_pb2, inference_pb2, membership_pb2

FORMING = membership_pb2.RING_PHASE_FORMING
SERVING = membership_pb2.RING_PHASE_SERVING
DOWN = membership_pb2.RING_PHASE_DOWN


def coordinator(*states: admin_pb2.RingStatus) -> Any:
    """A coordinator with one ring, which goes through these states."""
    plan = admin_pb2.DeploymentPlan(spec=admin_pb2.DeploymentSpec(name="demo"))
    found = [admin_pb2.Deployment(plan=plan, rings=[state]) for state in states]
    lists = [admin_pb2.ListDeploymentsResponse(deployments=[one]) for one in found]
    return Coordinator(ListDeployments=lists)


def ring(phase: int, reason: str = "", *progress: tuple[str, float], epoch: int = 0) -> admin_pb2.RingStatus:
    shown = [membership_pb2.EpochProgress(what=what, fraction=fraction) for what, fraction in progress]
    found = admin_pb2.RingStatus(ring="demo-0", epoch=epoch, phase=phase, reason=reason, progress=shown)  # type: ignore[arg-type]
    if shown:
        found.slowest.MergeFrom(shown[-1])
        found.slowest.member = "studio"
    return found


def test_waiting_tells_what_happens_and_ends() -> None:
    admin: Any = coordinator(
        ring(FORMING),
        ring(FORMING, "", ("handshake", 1.0), ("loading", 0.25)),
        ring(DOWN, "a fault"),
        ring(SERVING),
    )
    said: list[str] = []
    found = quickly(wait_until_serving(admin, "demo", seconds=30, say=said.append))
    assert found.rings[0].phase == SERVING
    assert said == [
        "demo: forming the ring",
        "demo: 25 %, loading (studio, the slowest of 2)",
        "demo: waiting, a fault",
    ]


def test_waiting_gives_up_on_a_ring_that_fails_again_and_again() -> None:
    epochs = (0, 0, 1, 1, 2, 2, 3, 4, 5)
    admin: Any = coordinator(*(ring(DOWN, "node-0: no tokenizer", epoch=epoch) for epoch in epochs))
    with pytest.raises(FailedPrecondition) as caught:
        quickly(wait_until_serving(admin, "demo", seconds=30))
    assert caught.value.reason == "RING_FAILS"
    assert len(admin.asked) == 8, "after four epochs"
    assert "no tokenizer" in caught.value.message


def test_a_ring_that_is_down_for_no_reason_has_not_failed() -> None:
    for phase, reason in ((DOWN, ""), (FORMING, "it was down")):
        states = [ring(phase, reason, epoch=epoch) for epoch in range(1, 9)]
        found = quickly(wait_until_serving(coordinator(*states, ring(SERVING)), "demo", seconds=200))
        assert found.rings[0].phase == SERVING


def test_waiting_has_an_end() -> None:
    admin: Any = coordinator(ring(DOWN, "node-1 is offline"))
    with pytest.raises(DeadlineExceeded) as caught:
        quickly(wait_until_serving(admin, "demo", seconds=0))
    assert caught.value.reason == "RING_NOT_SERVING"
    assert caught.value.message == "demo was not serving after 0 s: node-1 is offline"
    with pytest.raises(DeadlineExceeded) as caught:
        quickly(wait_until_serving(coordinator(ring(FORMING)), "demo", seconds=-1))
    assert caught.value.message == "demo was not serving after -1 s"


def test_an_unknown_deployment() -> None:
    admin: Any = coordinator(ring(SERVING))
    with pytest.raises(NotFound):
        quickly(find_deployment(admin, "other"))


def test_rings_that_serve_are_not_described() -> None:
    assert describe("demo", [ring(SERVING), ring(DOWN, "x")]) == "demo: waiting, x"
    assert describe("demo", [ring(SERVING, "x", ("loading", 0.5))]) == "demo: forming the ring"
    assert describe("demo", [ring(FORMING, "it was down")]) == "demo: forming the ring"


def test_nodes_are_waited_for_until_all_are_online() -> None:
    online, offline = admin_pb2.NODE_STATE_ONLINE, admin_pb2.NODE_STATE_OFFLINE

    def listed(**states: Any) -> admin_pb2.ListNodesResponse:
        nodes = [admin_pb2.Node(id=name, state=state) for name, state in states.items()]
        return admin_pb2.ListNodesResponse(nodes=nodes)

    looks = [listed(), listed(a=offline, b=online, stranger=online), listed(a=online, b=online)]
    said: list[str] = []
    wanted = {"a": "node-0", "b": "node-1"}
    how: Any = {"seconds": 60, "hint": "see the logs", "say": said.append}
    admin: Any = Coordinator(ListNodes=looks)
    quickly(wait_until_online(admin, wanted, **how))
    assert said == ["0 of 2 nodes are online", "1 of 2 nodes are online"]
    admin.answers["ListNodes"] = listed(b=online)
    with pytest.raises(DeadlineExceeded) as raised:
        quickly(wait_until_online(admin, wanted, **how))
    assert (raised.value.message, raised.value.hint) == ("not online after 60 s: node-0", "see the logs")


class Models:
    """A gateway that offers one model after the other, each with a number of rings; None: it fails."""

    def __init__(self, *looks: tuple[str, int] | grpc.StatusCode) -> None:
        self.looks = list(looks)

    async def ListModels(self, request: Any, **_: Any) -> Any:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, grpc.StatusCode):
            raise grpc.aio.AioRpcError(look, grpc.aio.Metadata(), grpc.aio.Metadata())
        name, rings = look
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name=name, rings=rings)])


def test_a_gateway_is_waited_for_until_it_offers_the_model_or_asks_for_a_key() -> None:
    async def wait(*looks: Any) -> int:
        gateway: Any = SimpleNamespace(stub=Models(*looks))
        await wait_until_offered(gateway, "demo", seconds=60, hint="see its log")
        return len(gateway.stub.looks)

    away, locked = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED
    assert quickly(wait(("other", 1), ("demo", 0), away, ("demo", 1), ("demo", 1))) == 1
    assert quickly(wait(away, locked, ("demo", 1))) == 1
    with pytest.raises(DeadlineExceeded) as raised:
        quickly(wait(("demo", 0)))
    assert (raised.value.reason, raised.value.hint) == ("GATEWAY_NOT_READY", "see its log")
