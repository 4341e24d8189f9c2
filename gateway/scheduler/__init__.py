"""Which rows are admitted, evicted and stepped, and when: pure state machines without clocks or I/O."""

from sealring.gateway.scheduler.actions import (
    Action,
    AnnounceStep,
    Begin,
    Deliver,
    DiscardRow,
    End,
    Fail,
    Finish,
    MemberMemory,
    OpenRow,
    Request,
    RingFacts,
)
from sealring.gateway.scheduler.costs import StepCosts
from sealring.gateway.scheduler.scheduler import Load, Scheduler

__all__ = [
    "Action",
    "AnnounceStep",
    "Begin",
    "Deliver",
    "DiscardRow",
    "End",
    "Fail",
    "Finish",
    "Load",
    "MemberMemory",
    "OpenRow",
    "Request",
    "RingFacts",
    "Scheduler",
    "StepCosts",
]
