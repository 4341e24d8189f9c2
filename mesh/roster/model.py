"""The roster: a cluster's members with their trust levels, and the rings that they form.

Frozen values only. `mesh/roster/codec.py` turns them into bytes and back, `mesh/roster/rules.py` holds the
rules of a well-formed roster, and `mesh/roster/reader.py` decides whether to believe one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sealring.mesh.clock import SKEW_SECONDS
from sealring.mesh.crypto.keys import KeyType
from sealring.mesh.crypto.suites import Suite
from sealring.mesh.errors import NotFound
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.trust.levels import TrustLevel

MAX_LIFETIME_SECONDS = 15 * 60
NO_PREVIOUS = bytes(32)
PIPELINE, TENSOR = "pipeline", "tensor"
"""Strategies: each member computes some of the layers, or a part of every layer."""
MAX_RINGS_OF_MEMBER = 8
"""Rings that one node may serve in at once."""

TERM_BITS = 32
"""Width of the version within a term; versions rise by one and never fill it. A coordinator that takes over
begins the next term, so readers that know it refuse further rosters of its predecessor."""


@dataclass(frozen=True)
class RosterMember:
    """An enrolled node. Hashes are SHA-256, times seconds since 1970, addresses `host:port`.

    It is a member since `enrolled`. No two enrolments of one identity have the same.
    """

    id: str
    identity_key: bytes
    key_type: KeyType
    sealing_key: bytes
    level: TrustLevel
    trust: int
    attestation_hash: bytes
    attested_at: int
    challenged_at: int
    manifest_hash: bytes
    addresses: tuple[str, ...]
    enrolled: int


@dataclass(frozen=True)
class RingMember:
    """A member's place in a ring: its rank, and its layers as [first, end).

    `prompts` are those with which it computes prompts, where they are others. It holds all that it has in
    either.
    """

    id: str
    rank: int
    layers: tuple[int, int]
    prompts: tuple[int, int] | None = None

    @property
    def held(self) -> tuple[int, int]:
        """The layers that it holds."""
        return self.layers if self.prompts is None else (self.layers[0], self.prompts[1])


@dataclass(frozen=True)
class Ring:
    """One replica of a deployment; `members` stand in the order of their ranks."""

    id: str
    deployment: str
    replica: int
    model: str
    model_digest: bytes
    strategy: str
    context: int
    total_layers: int
    plan_hash: bytes
    trust_floor: int
    min_trust: int
    members: tuple[RingMember, ...]

    @property
    def clear_links(self) -> bool:
        """Whether members add up parts of layers over links that are not sealed."""
        return self.strategy == TENSOR

    def member(self, identifier: str) -> RingMember:
        """The ring member with this id. Raises NotFound (NOT_IN_RING)."""
        for member in self.members:
            if member.id == identifier:
                return member
        raise NotFound("member is not in the ring", reason="NOT_IN_RING", ring=self.id)

    def link_peers(self, rank: int) -> tuple[RingMember, RingMember]:
        """The members before and after `rank` on the ring (upstream, downstream); itself in a ring of one."""
        if not 0 <= rank < len(self.members):
            raise NotFound("rank is not in the ring", reason="NOT_IN_RING", ring=self.id)
        return self.members[rank - 1], self.members[(rank + 1) % len(self.members)]


@dataclass(frozen=True)
class Gateway:
    """A gateway that may schedule. Its key is a P-256 identity key, its id the hash of that."""

    id: str
    identity_key: bytes


@dataclass(frozen=True)
class Revoked:
    """The end of an enrolment: when it began, and when the member or gateway was evicted or banned (seconds
    since 1970). The identity may have joined again since."""

    id: str
    identity_key: bytes
    enrolled: int
    at: int


@dataclass(frozen=True)
class Roster:
    """One version of a cluster's roster.

    The upper bits of `version` are the term of the coordinator that signed it (`term_of`). `coordinators` are
    the main addresses of the coordinator and its standby. `root_version` is the version of the root metadata
    whose roster keys signed it. `previous` is the hash of the previous roster (zeros before the first),
    `hash` that of this one's payload bytes (empty in a draft).
    """

    cluster: str
    root_version: int
    version: int
    previous: bytes
    issued: int
    expires: int
    suites: tuple[Suite, ...]
    trust_floor: int
    min_trust: int
    members: tuple[RosterMember, ...] = ()
    rings: tuple[Ring, ...] = ()
    gateways: tuple[Gateway, ...] = ()
    revoked: tuple[Revoked, ...] = ()
    coordinators: tuple[str, ...] = ()
    hash: bytes = b""

    @property
    def hosts(self) -> frozenset[str]:
        """Those of members, coordinator and standby."""
        named = (*self.coordinators, *(address for one in self.members for address in one.addresses))
        return frozenset(parse_address(one)[0] for one in named)

    def member(self, identifier: str) -> RosterMember:
        """The member with this id. Raises NotFound (NOT_IN_ROSTER)."""
        for member in self.members:
            if member.id == identifier:
                return member
        raise NotFound("member is not in the roster", reason="NOT_IN_ROSTER", member=identifier)

    def ring(self, identifier: str) -> Ring:
        """The ring with this id. Raises NotFound (NO_SUCH_RING)."""
        for ring in self.rings:
            if ring.id == identifier:
                return ring
        raise NotFound("ring is not in the roster", reason="NO_SUCH_RING", ring=identifier)

    def rings_of(self, identifier: str) -> tuple[Ring, ...]:
        """The rings that a member serves in."""
        return tuple(ring for ring in self.rings if any(member.id == identifier for member in ring.members))

    def gateway(self, identifier: str) -> Gateway:
        """The gateway with this id. Raises NotFound (NOT_IN_ROSTER)."""
        for gateway in self.gateways:
            if gateway.id == identifier:
                return gateway
        raise NotFound("gateway is not in the roster", reason="NOT_IN_ROSTER", gateway=identifier)

    def expired(self, now: float) -> bool:
        """Whether it has expired, allowing for SKEW_SECONDS."""
        return now >= self.expires + SKEW_SECONDS


def ring_min_trust(ring_members: Iterable[RingMember], members: Iterable[RosterMember]) -> int:
    """The lowest trust among a ring's members; 0 for one that is not in the roster."""
    trust = {member.id: member.trust for member in members}
    return min((trust.get(member.id, 0) for member in ring_members), default=0)


def cluster_min_trust(rings: Iterable[Ring], members: Iterable[RosterMember]) -> int:
    """The lowest trust among all members that serve in a ring; 0 when none does."""
    members = tuple(members)
    return min((ring_min_trust(ring.members, members) for ring in rings), default=0)


def term_of(version: int) -> int:
    """The term of a roster's version: 0 for the first coordinator, one more with each promotion."""
    return version >> TERM_BITS
