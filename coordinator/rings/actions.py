"""What the cluster's machine has its driver do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from sealring.v1 import admin_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage, WatchResponse


class Send(NamedTuple):
    """Send a message to a member, if it is online."""

    member: str
    message: CoordinatorMessage


class Tell(NamedTuple):
    """Tell all gateways."""

    event: WatchResponse


class Note(NamedTuple):
    """Write to the log."""

    event: str
    fields: Mapping[str, object]
    serious: bool = False


class Drained(NamedTuple):
    """Store that a member's drain is over, so that the next coordinator does not resume it."""

    member: str


class Formed(NamedTuple):
    """Store the rings that deployments have had (`State.former`)."""


class Unload(NamedTuple):
    """Take the rings of a model on demand away. Without success the model goes on as one that is loaded."""

    deployment: str
    why: str


@dataclass(frozen=True, eq=False)
class Move:
    """Plan a ring anew, from the time `at` on: without the members `lost`; as a pipeline over its own, for
    the reason `pipeline`; or else for as many stages as were asked."""

    deployment: str
    ring: admin_pb2.RingPlan
    at: float
    lost: frozenset[str] = frozenset()
    pipeline: str = ""


class Place(NamedTuple):
    """Ask the nodes for a model on demand, find room for it, and load it if `OnDemand.room` says so."""

    deployment: str


Change: TypeAlias = Move | Place
"""A change of plans: it takes long, is made while `Cluster.still` wants it, and ends with `Cluster.ended`."""

Action: TypeAlias = Send | Tell | Note | Drained | Formed | Unload | Change
