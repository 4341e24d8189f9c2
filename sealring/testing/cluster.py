"""A cluster that exists on paper: signed root metadata and rosters, and the keys of its members."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.crypto.identity import SoftwareSigner, member_id
from sealring.mesh.pki.root import RootMetadata, encode_chain
from sealring.mesh.prompt.sealed import SealingKey
from sealring.mesh.roster.model import Gateway, Roster, RosterMember
from sealring.mesh.roster.reader import check_roster
from sealring.mesh.trust.levels import TrustLevel
from sealring.testing.authority import Authority, make_member, make_ring, make_roster

SOFTWARE, HARDWARE = TrustLevel.SOFTWARE, TrustLevel.HARDWARE


class PaperCluster:
    """Rings of `size` members each, by name (`demo-0`). The level is the tail's; all before it have `rest`.

    A roster lives for ten minutes: a cluster that is kept for longer than a test takes a clock that stands.
    """

    def __init__(
        self,
        rings: Mapping[str, TrustLevel] | None = None,
        *,
        size: int = 2,
        rest: TrustLevel = HARDWARE,
        name: str = "paper",
        clock: Clock = wall_clock,
        authority: Authority | None = None,
        **changes: Any,
    ) -> None:
        """`changes` are fields of the first roster. With an `authority` the name is that of its cluster."""
        self._clock = clock
        now = int(clock())
        self.authority = authority or Authority.create(name, now=now)
        self.signers: list[SoftwareSigner] = []
        """The members' identity keys: ring by ring, in the order of their ranks."""
        self.keys: dict[str, SealingKey] = {}
        """Sealing keys by ring: those of the heads."""
        self.gateway = SoftwareSigner.generate()
        """The identity key of the gateway that the roster names."""
        members: list[RosterMember] = []
        drawn = []
        for ring, level in (rings or {"demo-0": SOFTWARE}).items():
            self.keys[ring] = SealingKey()
            own = [self._member(rest if rank < size - 1 else level, now) for rank in range(size)]
            own[0] = dataclasses.replace(own[0], sealing_key=self.keys[ring].public_key)
            members += own
            drawn.append(make_ring(own, ring))
        gateways = (Gateway(member_id(self.gateway.public_key), self.gateway.public_key),)
        self.draft = make_roster(
            self.authority.cluster, members, drawn, now=now, **{"gateways": gateways, **changes}
        )
        """What is signed next, apart from version and previous hash."""
        self._sign()

    def _member(self, level: TrustLevel, now: int) -> RosterMember:
        self.signers.append(SoftwareSigner.generate())
        return make_member(self.signers[-1], level=level, attested_at=now - 10, challenged_at=now - 5)

    def _sign(self) -> None:
        self.envelope = self.sign()
        """The signed roster, as a gateway tells it."""
        self.roster = check_roster(self.envelope, self.root, now=self._clock())

    @property
    def root(self) -> RootMetadata:
        """The newest root metadata: `authority.root`."""
        return self.authority.root

    @property
    def root_chain(self) -> bytes:
        """The root metadata, as a gateway tells it."""
        return encode_chain(self.root.chain)

    @property
    def pin(self) -> str:
        """What a client knows of the cluster: the hash of its root key, in hex."""
        return self.root.fingerprint.hex()

    def sign(self, **changes: Any) -> bytes:
        """The envelope of the draft with some fields changed; it is not published."""
        return self.authority.sign(dataclasses.replace(self.draft, **changes))

    def verified(self, **changes: Any) -> Roster:
        """What a reader has of it. Raises RosterError where a reader would refuse it."""
        return check_roster(self.sign(**changes), self.root, now=self._clock())

    def publish(self, **changes: Any) -> Roster:
        """Signs the next version of the roster with some fields changed. Raises RosterError."""
        following = {"version": self.roster.version + 1, "previous": self.roster.hash}
        self.draft = dataclasses.replace(self.draft, **{**following, **changes})
        self._sign()
        return self.roster

    def new_head(self, ring: str, *, hybrid: bool = False) -> Roster:
        """The head's daemon was started anew: another sealing key, another roster."""
        self.keys[ring] = SealingKey(hybrid=hybrid)
        head = self.roster.ring(ring).members[0].id
        members = tuple(
            dataclasses.replace(one, sealing_key=self.keys[ring].public_key) if one.id == head else one
            for one in self.draft.members
        )
        return self.publish(members=members)
