"""State folders of machines that were off until certificates, rosters and evidence had ended."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from sealring.cli.local.cluster import LocalCluster
from sealring.coordinator.init import init
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store
from sealring.mesh.member import ROSTER, ROSTER_STATE, load_machine_state, save_tls
from sealring.mesh.pki import ClusterCA, Role
from sealring.mesh.roster import RosterReader, RosterStateFile
from sealring.mesh.system.files import write_atomic

DAY = 24 * 3600.0


def expire(folder: Path, ca: ClusterCA, *, ago: float = 4 * DAY) -> None:
    """Replaces the folder's certificate by one that was issued `ago` seconds ago, for a day."""
    state = load_machine_state(folder)
    key = load_pem_private_key(state.tls.private_key, password=None)
    assert isinstance(key, EllipticCurvePrivateKey)
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, SHA256())
    certificate = ca.issue(
        request.public_bytes(Encoding.DER), state.peer, lifetime=DAY, now=time.time() - ago
    )
    save_tls(folder, dataclasses.replace(state.tls, certificate=certificate))


def found(cluster: LocalCluster) -> None:
    """Makes the coordinator's keys as of ten days ago, before the cluster is started for the first time."""
    cluster.choose_ports()
    init(CoordinatorSettings(**cluster.settings_of("coordinator")), clock=lambda: time.time() - 10 * DAY)


def expire_all(coordinator: Path, members: list[Path], *, ago: float = 4 * DAY) -> None:
    """Makes a stopped cluster one that stopped `ago` seconds ago: last roster, evidence, all certificates."""
    then = time.time() - ago
    settings = CoordinatorSettings(state_dir=coordinator)
    keys = ClusterKeys.load(settings, now=then)
    store = Store.open(coordinator)
    try:
        for member in store.members.all(Role.MEMBER):
            at = int(then) - 60
            member.attested_at = member.challenged_at = at
            store.members.save(member)
        publisher = RosterPublisher(store, keys, settings, clock=lambda: then)
        publisher.publish()
        envelope = publisher.current.envelope
    finally:
        store.close()
    for folder in members:
        state = load_machine_state(folder)
        (folder / ROSTER_STATE).unlink()
        RosterStateFile(folder / ROSTER_STATE).create(state.peer.cluster)
        RosterReader(state.root, folder / ROSTER_STATE, state.peer.id, clock=lambda: then).accept(envelope)
        write_atomic(folder / ROSTER, envelope)
    for folder in (coordinator / "operator", *members):
        expire(folder, keys.ca, ago=ago)
