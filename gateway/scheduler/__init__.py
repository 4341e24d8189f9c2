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
from sealring.gateway.scheduler.scheduler import MAX_ATTEMPTS, Load, Scheduler

__all__ = [
    "MAX_ATTEMPTS",
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
