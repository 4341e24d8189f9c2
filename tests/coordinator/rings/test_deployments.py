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
    plans: Any = SimpleNamespace(changing=nullcontext(), rings_of=lambda names: [])
    survey: Any = FakeSurvey()
    service = DeploymentService(store, unused, survey, plans, unused, clock=lambda: 0.0)
    spelt = ring_id("Qwen2.5", 0).removesuffix("-0")
    with pytest.raises(AlreadyExists) as caught:
        await service.create(admin_pb2.DeploymentSpec(name=spelt, model="m"), "operator")
    assert caught.value.reason == "NAME_TAKEN"


async def test_a_plan_of_what_serves_changes_nothing_and_takes_its_place() -> None:
    there = [
        StoredDeployment(name="demo", plan=planned("demo")),
        StoredDeployment(name="b", plan=planned("b")),
    ]
    asked: list[list[str]] = []

    class Survey(FakeSurvey):
        async def ask(self, spec: Any, *, replacing: Any) -> Any:
            asked.append(replacing)

        async def shapes(self, *_: Any, replacing: Any) -> Any:
            return admin_pb2.ShapeTable()

    store: Any = SimpleNamespace(deployments=SimpleNamespace(all=lambda: there, check_free=lambda name: None))
    unused: Any = None
    plans: Any = SimpleNamespace(changing=nullcontext(), rings_of=list)
    survey: Any = Survey()
    service = DeploymentService(store, unused, survey, plans, unused, clock=lambda: 0.0)
    answer = await service.plan(admin_pb2.DeploymentSpec(name="demo", model="m"))
    assert answer.plan.spec.name == "demo"
    assert asked == [["demo"]]


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
    plans: Any = SimpleNamespace(changing=nullcontext(), rings_of=lambda names: [])
    service = DeploymentService(store, unused, survey, plans, unused, clock=lambda: 0.0)
    with pytest.raises(AlreadyExists) as caught:
        await service.create(admin_pb2.DeploymentSpec(name="demo", model="m"), "operator")
    assert caught.value.reason == "NAME_TAKEN"
