from __future__ import annotations

from typing import Any

import pytest

from sealring.cli.calls.waiting import describe, find_deployment, wait_until_serving
from sealring.mesh.errors import DeadlineExceeded, FailedPrecondition, NotFound
from sealring.v1 import admin_pb2, membership_pb2

FORMING = membership_pb2.RING_PHASE_FORMING
SERVING = membership_pb2.RING_PHASE_SERVING
DOWN = membership_pb2.RING_PHASE_DOWN


class Admin:
    """Answers with one ring state after the other, then the last for ever."""

    def __init__(self, *states: admin_pb2.RingStatus) -> None:
        self.states = list(states)

    async def call(self, method: str) -> Any:
        assert method == "ListDeployments"
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        plan = admin_pb2.DeploymentPlan(spec=admin_pb2.DeploymentSpec(name="demo"))
        return admin_pb2.ListDeploymentsResponse(deployments=[admin_pb2.Deployment(plan=plan, rings=[state])])


def ring(phase: int, reason: str = "", *progress: tuple[str, float], epoch: int = 0) -> admin_pb2.RingStatus:
    shown = [membership_pb2.EpochProgress(what=what, fraction=fraction) for what, fraction in progress]
    return admin_pb2.RingStatus(ring="demo-0", epoch=epoch, phase=phase, reason=reason, progress=shown)  # type: ignore[arg-type]


async def test_waiting_tells_what_happens_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sealring.cli.calls.waiting._POLL_SECONDS", 0)
    admin: Any = Admin(
        ring(FORMING),
        ring(FORMING, "", ("handshake", 1.0), ("loading", 0.25)),
        ring(DOWN, "a fault"),
        ring(SERVING),
    )
    said: list[str] = []
    found = await wait_until_serving(admin, "demo", seconds=30, say=said.append)
    assert found.rings[0].phase == SERVING
    assert said == [
        "demo: forming the ring",
        "demo: loading 25% (slowest of 2 nodes)",
        "demo: waiting, a fault",
    ]


async def test_waiting_gives_up_on_a_ring_that_fails_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sealring.cli.calls.waiting._POLL_SECONDS", 0)
    epochs = (0, 0, 1, 1, 2, 2, 3, 4, 5)
    admin: Any = Admin(*(ring(DOWN, "node-0: no tokenizer", epoch=epoch) for epoch in epochs))
    with pytest.raises(FailedPrecondition) as caught:
        await wait_until_serving(admin, "demo", seconds=30)
    assert caught.value.reason == "RING_FAILS"
    assert [state.epoch for state in admin.states] == [5], "after four epochs"
    assert "no tokenizer" in caught.value.message


async def test_a_ring_that_is_down_for_no_reason_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sealring.cli.calls.waiting._POLL_SECONDS", 0)
    for phase, reason in ((DOWN, ""), (FORMING, "it was down")):
        states = [ring(phase, reason, epoch=epoch) for epoch in range(1, 9)]
        found = await wait_until_serving(Admin(*states, ring(SERVING)), "demo", seconds=200)  # type: ignore[arg-type]
        assert found.rings[0].phase == SERVING


async def test_waiting_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sealring.cli.calls.waiting._POLL_SECONDS", 0)
    admin: Any = Admin(ring(DOWN, "node-1 is offline"))
    with pytest.raises(DeadlineExceeded) as caught:
        await wait_until_serving(admin, "demo", seconds=0)
    assert caught.value.reason == "RING_NOT_SERVING"
    assert caught.value.message == "demo was not serving after 0 s: node-1 is offline"
    with pytest.raises(DeadlineExceeded) as caught:
        await wait_until_serving(Admin(ring(FORMING)), "demo", seconds=-1)  # type: ignore[arg-type]
    assert caught.value.message == "demo was not serving after -1 s"


async def test_an_unknown_deployment() -> None:
    admin: Any = Admin(ring(SERVING))
    with pytest.raises(NotFound):
        await find_deployment(admin, "other")


def test_rings_that_serve_are_not_described() -> None:
    assert describe("demo", [ring(SERVING), ring(DOWN, "x")]) == "demo: waiting, x"
    assert describe("demo", [ring(SERVING, "x", ("loading", 0.5))]) == "demo: forming the ring"
    assert describe("demo", [ring(FORMING, "it was down")]) == "demo: forming the ring"
