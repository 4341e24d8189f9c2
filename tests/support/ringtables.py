"""Rings in service whose epoch machines record their calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sealring.coordinator.rings.driver import RingDriver
from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.running import RingTable
from sealring.coordinator.settings import CoordinatorSettings
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
    made: Any = RingTable(CoordinatorSettings(replace_after=replace_after))
    for name, machine in machines.items():
        made.running[name] = SimpleNamespace(
            plan=admin_pb2.RingPlan(ring=name, stages=[admin_pb2.StagePlan(member="a")]),
            machine=machine,
            digest="abcd",
            backend="",
            protocol=0,
            name_of=machine.members.__getitem__,
        )
    return made


def driver(made: RingTable, **parts: Any) -> RingDriver:
    names = ("publisher", "sessions", "watchers")
    return RingDriver(made, *(parts.get(name) for name in names), clock=lambda: 7.0)
