"""Rings in service whose epoch machines record their calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.state import State
from sealring.coordinator.streams.sessions import Sessions
from sealring.coordinator.streams.watchers import Watchers
from sealring.v1 import admin_pb2


class Machine:
    """An epoch machine that records its calls."""

    def __init__(self, phase: Phase = Phase.SERVING) -> None:
        self.calls: list[Any] = []
        self.members = {"a": "node-a"}
        self.phase, self.epoch = phase, 4
        self.undecided, self.reason = False, "why"
        self.awaited: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **more: Any) -> list[Any]:
            self.calls.append((name, args, more))
            return []

        return call


def table(*, replace_after: float = 31.5, **machines: Machine) -> Any:
    """A ring of one stage in service for each machine."""
    made: Any = State(Sessions(), Watchers(), replace_after)
    for name, machine in machines.items():
        made.running[name] = SimpleNamespace(
            plan=admin_pb2.RingPlan(ring=name, stages=[admin_pb2.StagePlan(member="a")]),
            deployment=admin_pb2.DeploymentPlan(profile={"digest": "abcd"}),
            spec=admin_pb2.DeploymentSpec(),
            machine=machine,
            backend="",
            protocol=0,
            name_of=machine.members.__getitem__,
            stage_of=lambda member: admin_pb2.StagePlan(member=member),
        )
    return made
