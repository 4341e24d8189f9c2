"""The coordinator's keys on disk: root, roster and certificate authority, and what is issued with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store.database import RESTORE_HINT
from sealring.mesh.crypto.dsse import Ed25519Signer
from sealring.mesh.errors import ConfigError, SealringError
from sealring.mesh.pki.authority import ClusterCA
from sealring.mesh.pki.certificates import LeafKey, PeerIdentity, Role, TlsMaterial
from sealring.mesh.pki.root import (
    RootMetadata,
    check_root_times,
    decode_chain,
    encode_chain,
    follow_root,
    sign_root,
)
from sealring.mesh.system.files import read_bounded, write_atomic

ROOT_KEY = "root.key"
ROSTER_KEY = "roster.key"
ROOT_METADATA = "root.dsse"
OPERATOR_DIR = "operator"
CA_CERTIFICATE = "ca.pem"
COORDINATOR_ID = "main"
OPERATOR_ID = "operator"
ROOT_SECONDS = 10 * 365 * 24 * 3600


@dataclass(frozen=True)
class ClusterKeys:
    """The keys that a running coordinator signs with: every roster key, and not the root key."""

    ca: ClusterCA
    rosters: tuple[Ed25519Signer, ...]
    root: RootMetadata

    @classmethod
    def load(cls, settings: CoordinatorSettings, *, now: float) -> Self:
        """Load and check that everything belongs together and is enough to sign rosters.

        Raises ConfigError (STATE_MISSING, STATE_CORRUPT, BAD_CA, BAD_KEY, SECRET_FILE_UNSAFE,
        TOO_FEW_ROSTER_KEYS), RosterError (ROOT_EXPIRED).
        """
        folder = settings.state_dir
        try:
            made = ClusterCA.load(folder)
            rosters = tuple(Ed25519Signer.load(file) for file in roster_key_files(settings))
            root = _follow(read_bounded(folder / ROOT_METADATA))
        except FileNotFoundError as error:
            raise ConfigError(
                f"the coordinator's state in {folder} lacks {Path(str(error.filename)).name}",
                hint=f"{RESTORE_HINT}; or make a new one with: sealring coordinator init",
                reason="STATE_MISSING",
            ) from None
        held = {signer.public_key for signer in rosters}
        ca = made.named_in(root.authorities)
        if ca is None or not held <= set(root.roster_keys):
            raise ConfigError(
                f"the keys in {folder} are not those of its root metadata",
                hint=RESTORE_HINT,
                reason="STATE_CORRUPT",
            )
        if len(held) < root.roster_threshold:
            raise ConfigError(
                f"rosters need the signatures of {root.roster_threshold} keys, and {len(held)} are here",
                hint="name the files of the others: roster_key_files",
                reason="TOO_FEW_ROSTER_KEYS",
            )
        check_root_times(root, now=now)
        return cls(ca, rosters, root)

    @property
    def root_chain(self) -> bytes:
        """The chain of root metadata as certificates and answers carry it."""
        return encode_chain(self.root.chain)

    @property
    def pin(self) -> bytes:
        """What join tokens pin: the fingerprint of the first root of the chain."""
        return follow_root(self.root.chain[0], None).fingerprint

    def server_material(self, hosts: tuple[str, ...], *, lifetime: float, now: float) -> TlsMaterial:
        """A fresh key and certificate for the coordinator's own servers, with the root chain inside."""
        leaf = LeafKey()
        certificate = self.ca.issue(
            leaf.csr(),
            PeerIdentity(self.root.cluster, Role.COORDINATOR, COORDINATOR_ID),
            lifetime=lifetime,
            now=now,
            addresses=hosts,
            root_chain=self.root_chain,
        )
        return TlsMaterial(leaf.private_pem(), certificate, self.root.authorities)


def extend_root(settings: CoordinatorSettings, *, now: float) -> RootMetadata | None:
    """Root metadata and authority's certificate for ten years from now, once half of their time is over.

    It signs with the root key in the folder: nothing is done where that is not there, or not enough. The
    authority keeps its key, so that members which do not know the new version yet trust what it issues.
    Raises ConfigError (STATE_CORRUPT, BAD_CA, BAD_KEY, SECRET_FILE_UNSAFE).
    """
    folder = settings.state_dir
    try:
        signer = Ed25519Signer.load(folder / ROOT_KEY)
        root = _follow(read_bounded(folder / ROOT_METADATA))
        ca = ClusterCA.load(folder).named_in(root.authorities)
    except FileNotFoundError:
        return None
    due = root.ends - min(ROOT_SECONDS, root.ends - root.issued) / 2
    if ca is None or now < due or root.root_keys != (signer.public_key,):
        return None
    following = replace(
        root,
        version=root.version + 1,
        authorities=ca.extended(root.authorities, now=now),
        expires=int(now) + ROOT_SECONDS,  # and as valid before as it was: the clock may be wrong
    )
    signed = sign_root(following, [signer], previous=root)
    write_atomic(folder / ROOT_METADATA, encode_chain(signed.chain), mode=0o644)
    return signed


def roster_key_files(settings: CoordinatorSettings) -> tuple[Path, ...]:
    """The files of the coordinator's roster keys: one in its folder, and those that the settings name."""
    return (settings.state_dir / ROSTER_KEY, *settings.roster_key_files)


def _follow(data: bytes) -> RootMetadata:
    root = None
    try:
        for envelope in decode_chain(data):
            root = follow_root(envelope, root)
    except SealringError as error:
        raise ConfigError(
            f"the root metadata is corrupt: {error.message}",
            hint=RESTORE_HINT,
            reason="STATE_CORRUPT",
        ) from None
    if root is None:
        raise ConfigError("the root metadata is empty", hint=RESTORE_HINT, reason="STATE_CORRUPT")
    return root
