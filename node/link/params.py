"""The parameters of a handshake, from the roster. Only daemons use them; carriers have the keys."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from sealring.mesh.crypto.identity import member_id
from sealring.mesh.crypto.suites import Suite
from sealring.mesh.errors import HandshakeError, NotFound
from sealring.mesh.roster.model import Roster
from sealring.node.link.keys import HASH_BYTES, MAX_U64, LinkContext


@dataclass(frozen=True)
class LinkParams(LinkContext):
    """One end's expectations of a link before a handshake, all from its own verified roster.

    `epoch` counts the lives of the ring; the link leads from `from_rank` to `to_rank`, and the end with the
    lower rank initiates. `peer_key` is an uncompressed P-256 point.
    """

    own_id: str
    peer_id: str
    peer_key: bytes
    suites: tuple[Suite, ...]

    def __post_init__(self) -> None:
        ranks = (self.from_rank, self.to_rank)
        sound = (
            self.from_rank != self.to_rank
            and self.own_rank in ranks
            and min(ranks) >= 0
            and max(ranks) < 1 << 32
            and 0 <= self.epoch <= MAX_U64
            and 0 < self.roster_version <= MAX_U64
            and len(self.roster_hash) == HASH_BYTES
            and bool(self.suites)
            and self.own_id != self.peer_id
            and member_id(self.peer_key) == self.peer_id
        )
        if not sound:
            raise HandshakeError("link parameters contradict each other", reason="BAD_LINK")

    @classmethod
    def from_roster(cls, roster: Roster, ring_id: str, epoch: int, from_rank: int, own_id: str) -> Self:
        """The link that leaves `from_rank` of a ring, as the member `own_id` at either end of it sees it.

        Raises NotFound (NO_SUCH_RING, NOT_IN_RING), HandshakeError (BAD_LINK).
        """
        ring = roster.ring(ring_id)
        _, downstream = ring.link_peers(from_rank)
        ends = (ring.members[from_rank], downstream)
        own = next((end for end in ends if end.id == own_id), None)
        if own is None:
            raise NotFound("member is at neither end of the link", reason="NOT_IN_RING", ring=ring_id)
        peer = ends[1] if own is ends[0] else ends[0]
        return cls(
            cluster=roster.cluster,
            ring=ring_id,
            epoch=epoch,
            from_rank=from_rank,
            to_rank=downstream.rank,
            own_rank=own.rank,
            roster_version=roster.version,
            roster_hash=roster.hash,
            own_id=own_id,
            peer_id=peer.id,
            peer_key=roster.member(peer.id).identity_key,
            suites=roster.suites,
        )

    @property
    def context(self) -> LinkContext:
        """The part that stays with the session keys."""
        return LinkContext(**{each.name: getattr(self, each.name) for each in fields(LinkContext)})
