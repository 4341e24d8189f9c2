"""A cluster that exists on paper only: signed root metadata and rosters whose sealing keys a test holds."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.crypto.dsse import Ed25519Signer
from sealring.mesh.crypto.identity import SoftwareSigner, member_id
from sealring.mesh.crypto.keys import KeyType
from sealring.mesh.crypto.suites import DEFAULT_SUITES
from sealring.mesh.pki.authority import ClusterCA
from sealring.mesh.pki.root import RootMetadata, encode_chain, sign_root
from sealring.mesh.prompt.sealed import SealingKey
from sealring.mesh.roster import (
    NO_PREVIOUS,
    Ring,
    RingMember,
    Roster,
    RosterMember,
    check_roster,
    complete_roster,
    sign_roster,
)
from sealring.mesh.trust.levels import SCORES, TrustLevel


class PaperCluster:
    """Rings `NAME-0`, `NAME-1`, ... of `size` members each; a level is that of the weakest, the tail.

    A roster lives for ten minutes: a cluster that is kept for longer than a test takes a clock that stands.
    """

    def __init__(
        self,
        rings: dict[str, TrustLevel] | None = None,
        *,
        size: int = 2,
        name: str = "paper",
        clock: Clock = wall_clock,
    ) -> None:
        self._clock = clock
        now = int(clock())
        self.root_seed = os.urandom(32)
        self.root_signer, self.roster_signer = Ed25519Signer(self.root_seed), Ed25519Signer.generate()
        with tempfile.TemporaryDirectory() as folder:
            authority = ClusterCA.create(Path(folder) / "ca", name, now=now).certificate
        self.root = self.sign_root(
            RootMetadata(
                cluster=name,
                version=1,
                root_keys=(self.root_signer.public_key,),
                root_threshold=1,
                roster_keys=(self.roster_signer.public_key,),
                roster_threshold=1,
                authorities=(authority,),
                issued=now - 60,
                expires=now + 86400,
            )
        )
        self.keys: dict[str, SealingKey] = {}
        """Sealing keys by ring: those of the heads."""
        self.draft = self._draft(rings or {"demo-0": TrustLevel.SOFTWARE}, size, now)
        self.publish()

    @property
    def pin(self) -> str:
        return self.root.fingerprint.hex()

    def sign_root(self, draft: RootMetadata) -> RootMetadata:
        return sign_root(draft, [self.root_signer])

    def publish(self, **changes: Any) -> Roster:
        """Signs the next version of the roster with some fields changed."""
        previous: Roster | None = getattr(self, "roster", None)
        if previous is not None:
            self.draft = dataclasses.replace(
                self.draft, version=previous.version + 1, previous=previous.hash, **changes
            )
        self.envelope = sign_roster(complete_roster(self.draft), [self.roster_signer])
        self.roster = check_roster(self.envelope, self.root, now=self._clock())
        return self.roster

    @property
    def root_chain(self) -> bytes:
        return encode_chain(self.root.chain)

    def new_head(self, ring: str, *, hybrid: bool = False) -> Roster:
        """The head's daemon was started anew: another sealing key, another roster."""
        self.keys[ring] = SealingKey(hybrid=hybrid)
        head = self.roster.ring(ring).members[0].id
        members = tuple(
            dataclasses.replace(one, sealing_key=self.keys[ring].public_key) if one.id == head else one
            for one in self.draft.members
        )
        return self.publish(members=members)

    def _draft(self, levels: dict[str, TrustLevel], size: int, now: int) -> Roster:
        members: list[RosterMember] = []
        rings = []
        for ring, level in levels.items():
            own = [_member(TrustLevel.HARDWARE, now) for _ in range(size - 1)] + [_member(level, now)]
            key = SealingKey()
            self.keys[ring] = key
            own[0] = dataclasses.replace(own[0], sealing_key=key.public_key)
            members += own
            rings.append(_ring(ring, own))
        return Roster(
            cluster=self.root.cluster,
            root_version=1,
            version=1,
            previous=NO_PREVIOUS,
            issued=now,
            expires=now + 600,
            suites=DEFAULT_SUITES,
            trust_floor=10,
            min_trust=0,
            members=tuple(members),
            rings=tuple(rings),
        )


def _member(level: TrustLevel, now: int) -> RosterMember:
    key = SoftwareSigner.generate().public_key
    kind = KeyType.SOFTWARE if level is TrustLevel.SOFTWARE else KeyType.SECURE_ENCLAVE
    return RosterMember(
        id=member_id(key),
        identity_key=key,
        key_type=kind,
        sealing_key=SealingKey().public_key,
        level=level,
        trust=SCORES[level],
        attestation_hash=b"\x11" * 32,
        enrolled=1,
        attested_at=now - 10,
        challenged_at=now - 5,
        manifest_hash=b"\x22" * 32,
        addresses=("127.0.0.1:7001",),
    )


def _ring(name: str, members: list[RosterMember]) -> Ring:
    deployment, _, replica = name.rpartition("-")
    return Ring(
        id=name,
        deployment=deployment,
        replica=int(replica),
        model="model",
        model_digest=b"\x33" * 32,
        strategy="pipeline",
        context=2048,
        total_layers=3 * len(members),
        plan_hash=b"\x44" * 32,
        trust_floor=10,
        min_trust=0,
        members=tuple(
            RingMember(member.id, rank, (3 * rank, 3 * rank + 3)) for rank, member in enumerate(members)
        ),
    )
