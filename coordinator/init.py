"""Makes a new cluster: keys, certificate authority, root metadata, database and the operator's bundle."""

from __future__ import annotations

import secrets
from pathlib import Path

from coordinator.keys import OPERATOR_DIR, OPERATOR_ID, ROOT_KEY, ROOT_METADATA, ROSTER_KEY, ClusterKeys
from coordinator.settings import CoordinatorSettings
from coordinator.store import Store
from mesh.certificates import ClusterCA, LeafKey, PeerIdentity, Role, to_pem
from mesh.clock import Clock, wall_clock
from mesh.dsse import Ed25519Signer
from mesh.encoding import encode_base32
from mesh.errors import AlreadyExists, ConfigError
from mesh.memberstate import MemberState, save_description, save_member_state
from mesh.rootmeta import RootMetadata, encode_chain, sign_root
from mesh.statefiles import write_atomic
from mesh.tls import TlsMaterial

OPERATOR_CERTIFICATE_SECONDS = 30 * 24 * 3600
"""Of the operator's bundle; a running coordinator renews it in place at half its life."""

OPERATOR_CSR = "operator_csr"
_ROOT_SECONDS = 10 * 365 * 24 * 3600
_FILES = (ROOT_KEY, ROSTER_KEY, "ca.key", "ca.pem", ROOT_METADATA, OPERATOR_DIR)


def init(settings: CoordinatorSettings, *, clock: Clock = wall_clock) -> None:
    """Make the state folder of a new cluster.

    Raises AlreadyExists (STATE_EXISTS) when there is any of it already, ConfigError (STATE_IN_USE,
    STATE_UNWRITABLE).
    """
    folder = settings.state_dir
    now = clock()
    cluster = settings.cluster or f"ring-{encode_base32(secrets.token_bytes(5))}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        _refuse_existing(folder)
        store = Store.create(folder)
    except OSError as error:
        raise ConfigError(
            f"cannot make the state folder {folder}: {error.strerror}",
            hint="choose a folder that this user can write to",
            reason="STATE_UNWRITABLE",
        ) from None
    try:
        keys = _make_keys(folder, cluster, now)
        leaf = LeafKey()
        store.set_meta(OPERATOR_CSR, leaf.csr())
        _save_bundle(folder / OPERATOR_DIR, keys, leaf, settings.main_address(), now)
        store.audit.append(now, "init", "create_cluster", cluster, {"root": keys.pin.hex()})
    finally:
        store.close()


def renew_operator_bundle(folder: Path, keys: ClusterKeys, csr: bytes, address: str, *, now: float) -> bytes:
    """A new certificate for the operator's own key and the current address, put into the bundle.

    Each file is replaced as a whole, and they fit the old ones, so a reader in between is never misled.
    Returns the certificate (DER).
    """
    certificate = _operator_certificate(keys, csr, now)
    write_atomic(folder / OPERATOR_DIR / "tls.pem", to_pem(certificate))
    save_description(folder / OPERATOR_DIR, _operator(keys), OPERATOR_ID, address, keys.pin)
    return certificate


def _refuse_existing(folder: Path) -> None:
    found = [name for name in (*_FILES, "coordinator.db") if (folder / name).exists()]
    if found:
        raise AlreadyExists(
            f"there is coordinator state in {folder} already ({', '.join(found)})",
            hint="run it, or choose another state folder",
            reason="STATE_EXISTS",
        )


def _make_keys(folder: Path, cluster: str, now: float) -> ClusterKeys:
    root_signer = Ed25519Signer.create(folder / ROOT_KEY)
    roster_signer = Ed25519Signer.create(folder / ROSTER_KEY)
    ca = ClusterCA.create(folder, cluster, now=now)
    draft = RootMetadata(
        cluster=cluster,
        version=1,
        root_keys=(root_signer.public_key,),
        root_threshold=1,
        roster_keys=(roster_signer.public_key,),
        roster_threshold=1,
        authorities=(ca.certificate,),
        issued=int(now),
        expires=int(now) + _ROOT_SECONDS,
    )
    root = sign_root(draft, [root_signer])
    write_atomic(folder / ROOT_METADATA, encode_chain(root.chain), mode=0o644)
    return ClusterKeys(ca, roster_signer, root)


def _save_bundle(folder: Path, keys: ClusterKeys, leaf: LeafKey, address: str, now: float) -> None:
    certificate = _operator_certificate(keys, leaf.csr(), now)
    material = TlsMaterial(leaf.private_pem(), certificate, keys.root.authorities)
    save_member_state(
        folder, MemberState(_operator(keys), OPERATOR_ID, address, keys.pin, keys.root, material)
    )


def _operator_certificate(keys: ClusterKeys, csr: bytes, now: float) -> bytes:
    return keys.ca.issue(csr, _operator(keys), lifetime=OPERATOR_CERTIFICATE_SECONDS, now=now)


def _operator(keys: ClusterKeys) -> PeerIdentity:
    return PeerIdentity(keys.root.cluster, Role.OPERATOR, OPERATOR_ID)
