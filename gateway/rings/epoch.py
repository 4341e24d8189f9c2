"""An epoch of a ring, as a gateway knows it, and the errors of requests that it does not serve."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from sealring.gateway.rings.control import ControlStreams
from sealring.gateway.rings.members import MemberTarget
from sealring.mesh.errors import EpochEnded, FailedPrecondition, StageFailed, Unavailable
from sealring.mesh.prompt.images import VISION
from sealring.mesh.prompt.options import is_card
from sealring.mesh.prompt.tools import capabilities_of
from sealring.mesh.roster import model as rosters
from sealring.mesh.rpc.protocol import PROTOCOL_VERSION
from sealring.mesh.system.addresses import parse_address
from sealring.v1 import control_pb2 as control
from sealring.v1 import membership_pb2 as membership
from sealring.v1.model_pb2 import ModelCard

RETRY_SECONDS = 5
"""`retry-after` in seconds for a model that no ring serves."""

LEFT = "LEFT"
"""The reason of an end by the coordinator."""


@dataclass(frozen=True)
class ServingEpoch:
    """A ring's epoch that serves, by the verified roster and the coordinator."""

    ring: str
    epoch: int
    deployment: str
    members: tuple[MemberTarget, ...]
    max_rows: int
    prefill_chunk: int
    context: int
    share_prefixes: bool
    min_trust: int
    roster_version: int
    speculate: bool
    clear_links: bool
    protocol: int = PROTOCOL_VERSION
    elsewhere: bool = False
    """Whether this gateway's machine has a node, and none in this ring."""

    @classmethod
    def of(
        cls,
        roster: rosters.Roster,
        ring: rosters.Ring,
        state: membership.RingState,
        here: Collection[str] = (),
    ) -> ServingEpoch:
        """`here` are the hosts at which this gateway's machine is reached."""
        listed = [roster.member(member.id) for member in ring.members]
        beside = [one for one in roster.members if _reached_at(one, here)]
        return cls(
            ring=ring.id,
            epoch=state.epoch,
            deployment=ring.deployment,
            members=tuple(MemberTarget(each.id, each.identity_key, each.addresses) for each in listed),
            max_rows=state.max_rows,
            prefill_chunk=state.prefill_chunk,
            context=ring.context,
            share_prefixes=state.share_prefixes,
            min_trust=ring.min_trust,
            roster_version=roster.version,
            speculate=state.speculate,
            clear_links=ring.clear_links,
            protocol=state.protocol,
            elsewhere=bool(beside) and not any(one in listed for one in beside),
        )


def _reached_at(member: rosters.RosterMember, hosts: Collection[str]) -> bool:
    return any(parse_address(one)[0] in hosts for one in member.addresses)


@dataclass(frozen=True)
class Abilities:
    """What a ring's model can do beside answering, as the head reports it."""

    capabilities: Sequence[str] = ()
    vision_not_installed: bool = False
    """Whether the head's machine is all that keeps the model from seeing."""

    own: ModelCard = field(default_factory=ModelCard)
    """Options of sampling that the head fills in where a request does not name them."""

    @property
    def sees(self) -> bool:
        """Whether the model sees images."""
        return VISION in self.capabilities


@dataclass
class Epoch:
    """An epoch that this gateway is attached to. `serving` changes with the roster."""

    serving: ServingEpoch
    streams: ControlStreams
    attached: Sequence[control.Attached]

    def __post_init__(self) -> None:
        head = self.attached[0] if self.attached else control.Attached()
        own = head.own if is_card(head.own) else ModelCard()
        self.abilities = Abilities(capabilities_of(head.capabilities), head.vision_not_installed, own)

    def tell_all(self, message: control.ScheduleRequest) -> None:
        self.streams.send_all(message.SerializeToString())

    def take_back(self, key: str, message: control.ScheduleRequest) -> None:
        """Sends what cancels a prompt, unless that has not begun to leave."""
        if not self.streams.withdraw(key):
            self.streams.send_prompt(message.SerializeToString())


def below_floor(floor: int, trust: int) -> FailedPrecondition:
    return FailedPrecondition(
        f"the request demands a trust of {floor} and the ring has {trust}",
        hint="lower min_trust, or ask for a model on members of a higher trust level",
        reason="TRUST_BELOW_FLOOR",
        param="min_trust",
        min_trust=trust,
    )


def epoch_ended(reason: str) -> EpochEnded:
    """The error for clients whose answers the end of an epoch cut off. `reason` is that of the end."""
    again = "send the request again"
    if reason == StageFailed.out_of_memory:
        return EpochEnded("a member of the ring ran out of memory", hint=again, reason=reason)
    if reason == StageFailed.default_reason:
        return EpochEnded(
            "the model failed while it computed the answer",
            hint="the same request may fail again; the cluster's operator finds the cause in its status",
            reason=reason,
        )
    what = "the coordinator ended the ring's epoch" if reason == LEFT else "the ring lost a member"
    return EpochEnded(f"{what} while it answered", hint=again)


def ring_down(message: str) -> Unavailable:
    """The error for requests that found no ring; a member may come back, or the operator place the model
    anew."""
    return Unavailable(message, hint="try again later", reason="RING_DOWN", retry_after=RETRY_SECONDS)
