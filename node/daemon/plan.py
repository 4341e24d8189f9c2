"""One member's part in an epoch: the coordinator's PrepareEpoch, checked against the verified roster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sealring.mesh.errors import EpochEnded, FailedPrecondition, InvalidInput
from sealring.mesh.names import is_commit, is_sha256
from sealring.mesh.ring.limits import (
    BACKENDS,
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_PREFILL_CHUNK,
    MAX_ROWS,
    MAX_TAPS,
)
from sealring.mesh.roster.model import Ring, RingMember, Roster
from sealring.mesh.rpc import protocol12
from sealring.mesh.rpc.protocol import PROTOCOL_VERSION, check_speaks
from sealring.node.link.params import LinkParams
from sealring.v1 import membership_pb2

KV_BITS = (0, 4, 8)


@dataclass(frozen=True)
class LinkPlan:
    """One directed link of this member, and the addresses (host:port) of the member at its other end."""

    params: LinkParams
    peer_addresses: tuple[str, ...]

    @property
    def closes(self) -> bool:
        """Whether it leads from the ring's tail to its head, in a ring of three and more."""
        return self.params.from_rank > self.params.to_rank + 1

    @property
    def receives(self) -> bool:
        """Whether records of this link arrive here."""
        return self.params.own_rank == self.params.to_rank


@dataclass(frozen=True)
class DraftPlan:
    """The draft model of a ring's head. `kv_bits` 0: its caches are not quantized. They hold `context`
    tokens."""

    model: str
    digest: str
    commit: str
    hub_files: str
    kv_bits: int
    context: int


@dataclass(frozen=True)
class EpochPlan:
    """The settings of one epoch of one ring, as its member `rank` uses them."""

    ring: str
    epoch: int
    deployment: str
    rank: int
    size: int
    layers: tuple[int, int]
    prompts: tuple[int, int]
    """The layers that compute prompts; (0, 0) where `layers` do."""
    members: tuple[RingMember, ...]
    model: str
    model_digest: str
    context: int
    max_rows: int
    kv_budget: int
    prefill_chunk: int
    kv_bits: int
    backend: str
    """Backend of the group in which each member computes a part of every layer; empty in a pipeline."""
    links: tuple[LinkPlan, ...]
    commit: str = ""
    """Commit that files fetched from the hub must have; empty for any."""
    hub_files: str = ""
    """Hash of the names and hashes of the hub's files, which finds other commits with the same files."""
    speculate: bool = False
    """Whether steps may have drafts."""
    draft: DraftPlan | None = None
    """A model by which this member, the head, guesses tokens."""
    taps: tuple[int, ...] = ()
    """The layers of the model whose hidden states a drafter at the ring's tail reads, which rise."""
    mtp: bool = False
    """Whether the tail guesses tokens by the model's MTP head."""
    vision: bool = False
    """Whether this member, the head, has memory for the model's vision tower."""
    adapter: str = ""
    """A folder, named as the model, by whose adapter that is tuned."""
    releases: tuple[bytes, ...] = ()
    """The hashes of its members' software, each once, in order."""
    protocol: int = PROTOCOL_VERSION

    @property
    def held(self) -> tuple[int, int]:
        """The layers that this member holds, for answers or prompts."""
        return self.layers[0], max(self.layers[1], self.prompts[1])

    @property
    def seals_rows(self) -> bool:
        """Whether the head seals parameters of rows for the tail, past members in between."""
        return self.size > 2 and not self.backend and self.protocol != protocol12.PROTOCOL


def plan_epoch(prepare: membership_pb2.PrepareEpoch, roster: Roster, own_id: str) -> EpochPlan:
    """Checks a PrepareEpoch against the roster.

    Raises FailedPrecondition (ROSTER_MISMATCH, PLAN_MISMATCH, UNSUPPORTED_STRATEGY,
    INCOMPATIBLE_VERSION), InvalidInput (BAD_EPOCH), NotFound (NO_SUCH_RING, NOT_IN_RING).
    """
    if (prepare.roster_version, prepare.roster_hash) != (roster.version, roster.hash):
        raise FailedPrecondition(
            f"the epoch names roster {prepare.roster_version}, in use is roster {roster.version}",
            hint="the coordinator sends its newest roster and prepares again",
            reason="ROSTER_MISMATCH",
        )
    check_speaks(prepare.protocol, f"ring {prepare.ring[:64]}")
    ring = roster.ring(prepare.ring)
    own = ring.member(own_id)
    _check_bounds(prepare)
    _check_ring(prepare, ring)
    return EpochPlan(
        ring=ring.id,
        epoch=prepare.epoch,
        deployment=ring.deployment,
        rank=own.rank,
        size=len(ring.members),
        layers=own.layers,
        prompts=own.prompts if own.prompts and own.prompts != own.layers else (0, 0),
        members=ring.members,
        model=ring.model,
        model_digest=prepare.model_digest,
        context=ring.context,
        max_rows=prepare.max_rows,
        kv_budget=prepare.kv_budget,
        prefill_chunk=prepare.prefill_chunk,
        kv_bits=prepare.kv_bits,
        backend=prepare.backend,
        links=_links(ring, prepare.epoch, own, roster),
        commit=prepare.commit,
        hub_files=prepare.hub_files,
        speculate=prepare.speculate,
        draft=_draft(prepare, own, len(ring.members)),
        taps=_taps(prepare, len(ring.members)),
        mtp=prepare.mtp and prepare.speculate and not prepare.backend and len(ring.members) > 1,
        vision=prepare.vision and not prepare.backend and own.rank == 0,
        adapter=prepare.adapter,
        releases=tuple(sorted({roster.member(each.id).manifest_hash for each in ring.members})),
        protocol=prepare.protocol,
    )


def rdma_devices(plan: EpochPlan, named: Sequence[str]) -> list[str]:
    """This machine's RDMA device to each rank; "" at the own rank.

    `named` lists NODE=DEVICE, a node by the first characters of its id. Raises EpochEnded (NO_GROUP).
    """
    pairs = [line.split("=") for line in named]
    found = [
        next((device for node, device in pairs if member.id.startswith(node)), "") for member in plan.members
    ]
    found[plan.rank] = ""
    missing = [one.id[:16] for one in plan.members if one.rank != plan.rank and not found[one.rank]]
    if missing:
        raise EpochEnded(
            f"rdma_devices of this node names none that leads to {', '.join(missing)}, and jaccl needs it",
            hint="sealring doctor --cluster prints what to set; --or-pipeline serves without it",
            reason=EpochEnded.no_group,
        )
    return found


def _check_bounds(prepare: membership_pb2.PrepareEpoch) -> None:
    if not (
        prepare.epoch >= 1
        and 1 <= prepare.max_rows <= MAX_ROWS
        and 1 <= prepare.prefill_chunk <= MAX_PREFILL_CHUNK
        and prepare.kv_budget >= 1
        and prepare.kv_bits in KV_BITS
        and (not prepare.commit or is_commit(prepare.commit))
        and (not prepare.hub_files or is_sha256(prepare.hub_files))
    ):
        raise InvalidInput("the epoch's limits are out of bounds", reason="BAD_EPOCH")


def _taps(prepare: membership_pb2.PrepareEpoch, size: int) -> tuple[int, ...]:
    """Raises InvalidInput (BAD_EPOCH)."""
    taps = tuple(prepare.taps)
    if not taps:
        return ()
    rising = all(one < other for one, other in pairwise(taps))
    possible = prepare.speculate and not prepare.backend and size > 1
    if not possible or not rising or len(taps) > MAX_TAPS or taps[-1] >= MAX_LAYERS:
        raise InvalidInput("the layers that the epoch's drafter reads are out of bounds", reason="BAD_EPOCH")
    return taps


def _draft(prepare: membership_pb2.PrepareEpoch, own: RingMember, size: int) -> DraftPlan | None:
    """Raises InvalidInput (BAD_EPOCH)."""
    if not prepare.HasField("draft"):
        return None
    draft = prepare.draft
    if not (
        prepare.speculate
        and own.rank == (size - 1 if prepare.taps else 0)
        and is_sha256(draft.digest)
        and (not draft.commit or is_commit(draft.commit))
        and (not draft.hub_files or is_sha256(draft.hub_files))
        and draft.kv_bits in KV_BITS
        and 1 <= draft.context <= MAX_CONTEXT
    ):
        raise InvalidInput("the epoch's draft model is out of bounds", reason="BAD_EPOCH")
    return DraftPlan(draft.model, draft.digest, draft.commit, draft.hub_files, draft.kv_bits, draft.context)


def _check_ring(prepare: membership_pb2.PrepareEpoch, ring: Ring) -> None:
    if prepare.backend not in (BACKENDS if ring.clear_links else ("",)):
        raise FailedPrecondition(
            f"a {ring.strategy} ring has no backend {prepare.backend[:16]!r} on this node",
            reason="UNSUPPORTED_STRATEGY",
        )
    named = (prepare.model, prepare.model_digest, prepare.context)
    if named != (ring.model, ring.model_digest.hex(), ring.context):
        raise FailedPrecondition("the epoch names another model than the roster", reason="PLAN_MISMATCH")


def _links(ring: Ring, epoch: int, own: RingMember, roster: Roster) -> tuple[LinkPlan, ...]:
    """The outgoing and the incoming link. In a ring of two both lead to the same member."""
    size = len(ring.members)
    if size == 1:
        return ()
    every = (
        LinkParams.from_roster(roster, ring.id, epoch, from_rank, own.id)
        for from_rank in (own.rank, (own.rank - 1) % size)
    )
    return tuple(LinkPlan(params, roster.member(params.peer_id).addresses) for params in every)
