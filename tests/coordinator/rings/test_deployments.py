"""Deployments, where two would share what must be one's own."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.coordinator.rings.deployments import DeploymentService
from sealring.coordinator.store import StoredDeployment
from sealring.mesh.errors import AlreadyExists, FailedPrecondition
from sealring.mesh.names import ring_id
from sealring.v1 import admin_pb2


def planned(name: str) -> admin_pb2.DeploymentPlan:
    return admin_pb2.DeploymentPlan(
        spec=admin_pb2.DeploymentSpec(name=name, model="m"), rings=[admin_pb2.RingPlan(ring=ring_id(name, 0))]
    )


class FakeSurvey:
    def check(self, spec: admin_pb2.DeploymentSpec) -> admin_pb2.DeploymentSpec:
        return spec

    async def ask(self, spec: Any, *, replacing: Any) -> Any:
        pass

    async def plan(self, spec: Any, answers: Any, *, digest: str = "", replacing: Any) -> Any:
        return planned(spec.name)


async def test_two_deployments_never_share_the_name_of_a_ring() -> None:
    """A name may be spelt like what another one's ring is called."""
    there = StoredDeployment(name="Qwen2.5", plan=planned("Qwen2.5"))
    store: Any = SimpleNamespace(
        deployments=SimpleNamespace(all=lambda: [there], check_free=lambda name: None)
    )
    unused: Any = None
    survey: Any = FakeSurvey()
    service = DeploymentService(store, unused, survey, unused, clock=lambda: 0.0)
    spelt = ring_id("Qwen2.5", 0).removesuffix("-0")
    with pytest.raises(AlreadyExists) as caught:
        await service.create(admin_pb2.DeploymentSpec(name=spelt, model="m"), "operator")
    assert caught.value.reason == "NAME_TAKEN"


async def test_of_two_at_once_the_second_is_refused_by_its_name_and_not_for_lack_of_nodes() -> None:
    there: list[StoredDeployment] = []
    store: Any = SimpleNamespace(deployments=SimpleNamespace(all=lambda: there, check_free=lambda name: None))

    class Survey(FakeSurvey):
        async def ask(self, spec: Any, *, replacing: Any) -> Any:
            there.append(StoredDeployment(name="demo", plan=planned("demo")))

        async def plan(self, spec: Any, answers: Any, *, digest: str = "", replacing: Any) -> Any:
            raise FailedPrecondition("no node can serve", reason="NOT_ENOUGH_NODES")

    survey: Any = Survey()
    unused: Any = None
    service = DeploymentService(store, unused, survey, unused, clock=lambda: 0.0)
    with pytest.raises(AlreadyExists) as caught:
        await service.create(admin_pb2.DeploymentSpec(name="demo", model="m"), "operator")
    assert caught.value.reason == "NAME_TAKEN"


@pytest.mark.parametrize("remade", [False, True])
async def test_what_falls_back_keeps_its_nodes_and_promises_unless_it_was_made_anew(remade: bool) -> None:
    plan = admin_pb2.DeploymentPlan(
        spec=admin_pb2.DeploymentSpec(name="demo", strategy="tensor", context=512, max_rows=4),
        rings=[
            admin_pb2.RingPlan(ring=name, stages=[admin_pb2.StagePlan(member=one) for one in members])
            for name, members in (("demo-0", "cd"), ("demo-1", "ab"))
        ],
    )
    asked = admin_pb2.DeploymentSpec(name="demo", strategy="tensor", clear_links=True, or_pipeline=True)
    known = {"demo": StoredDeployment(name="demo", asked=asked, plan=plan, created=1)}

    class Survey(FakeSurvey):
        async def ask(self, spec: Any, *, replacing: Any) -> Any:
            if remade:
                known["demo"] = StoredDeployment(name="demo", asked=asked, plan=plan, created=2)
            return dict.fromkeys(["a", "b", "c", "d", "stranger"])

        async def plan(self, spec: Any, answers: Any, *, digest: str = "", replacing: Any) -> Any:
            assert (set(answers), replacing) == ({"a", "b"}, ("demo-1",))
            assert (spec.strategy, spec.replicas, spec.clear_links) == ("pipeline", 1, False)
            assert (spec.context, spec.max_rows) == (512, 4)
            return admin_pb2.DeploymentPlan(spec=spec, rings=[admin_pb2.RingPlan(ring="demo-0", min_trust=7)])

    deployments = SimpleNamespace(get=known.get, save=lambda made: known.update(demo=made))
    store: Any = SimpleNamespace(deployments=deployments, audit=SimpleNamespace(append=lambda *of: None))
    publisher: Any = SimpleNamespace(change=nullcontext)
    unused: Any = None
    survey: Any = Survey()
    service = DeploymentService(store, publisher, survey, unused, clock=lambda: 0.0)
    await service.fall_back("demo", "demo-1", "why")
    made = known["demo"].plan
    assert made.spec.strategy == "tensor"
    assert made.rings[0] == plan.rings[0]
    after = admin_pb2.RingPlan(ring="demo-1", min_trust=7, pipeline=True)
    assert made.rings[1] == (plan.rings[1] if remade else after)
