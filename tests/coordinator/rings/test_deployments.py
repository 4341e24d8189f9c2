"""Deployments, where two would share what must be one's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sealring.coordinator.rings.deployments import DeploymentService
from sealring.mesh.errors import AlreadyExists
from sealring.mesh.names import ring_id
from sealring.v1 import admin_pb2


def planned(name: str) -> admin_pb2.DeploymentPlan:
    return admin_pb2.DeploymentPlan(
        spec=admin_pb2.DeploymentSpec(name=name, model="m"), rings=[admin_pb2.RingPlan(ring=ring_id(name, 0))]
    )


class FakeSurvey:
    def check(self, spec: admin_pb2.DeploymentSpec) -> admin_pb2.DeploymentSpec:
        return spec

    async def ask(self, spec: admin_pb2.DeploymentSpec) -> None:
        pass

    async def plan(self, spec: admin_pb2.DeploymentSpec, answers: None) -> admin_pb2.DeploymentPlan:
        return planned(spec.name)


async def test_two_deployments_never_share_the_name_of_a_ring() -> None:
    """A name may be spelt like what another one's ring is called."""
    there = SimpleNamespace(plan=planned("Qwen2.5"))
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
