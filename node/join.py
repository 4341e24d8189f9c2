"""Joins a cluster with a token: `sealring node join`."""

from __future__ import annotations

import asyncio

from sealring.mesh.errors import ConfigError
from sealring.mesh.member.bootstrap import JoinToken
from sealring.mesh.member.enrolment import Enrolled, NodeEvidence, enrol
from sealring.mesh.member.state import check_may_join
from sealring.mesh.pki.certificates import Role
from sealring.mesh.prompt.sealed import SealingKey
from sealring.mesh.system.lock import lock_state
from sealring.node.identity.attestor import measure_posture, require_software_allowed
from sealring.node.identity.choice import make_signer, read_device_chain
from sealring.node.identity.manifest import manifest_hash
from sealring.node.settings import NodeSettings


async def join(settings: NodeSettings, token: str) -> Enrolled:
    """Enrols this node with the token's coordinator, also if it is or was its member.

    Raises AlreadyExists (ALREADY_ENROLLED) in the folder of another cluster, ConfigError (NO_ADDRESS,
    BAD_DEVICE_ATTESTATION), PermissionDenied (SOFTWARE_IDENTITY, JOIN_REFUSED), Conflict (STATE_IN_USE),
    InvalidInput, Unavailable, and RosterError or CertificateError when the coordinator is not the one that
    the token pins.
    """
    folder = settings.state_dir
    with lock_state(folder):
        check_may_join(folder, JoinToken.parse(token).root_sha256)
        signer = await asyncio.to_thread(make_signer, settings)
        require_software_allowed(signer.key_type, allowed=settings.software_identity_allowed)
        addresses = settings.advertised()
        if not addresses:
            raise ConfigError(
                "the node has no address to tell the cluster",
                hint="set advertise, or a port other than 0 in listen",
                reason="NO_ADDRESS",
            )
        chain = read_device_chain(settings.device_attestation)
        evidence = NodeEvidence(
            sealing_key=SealingKey().public_key,  # the daemon announces its own each time it starts
            manifest_hash=await asyncio.to_thread(manifest_hash),
            addresses=addresses,
            posture=await asyncio.to_thread(measure_posture, serial=bool(chain)),
            device_chain=chain,
        )
        return await enrol(
            token=token,
            role=Role.MEMBER,
            signer=signer,
            state_dir=folder,
            name=settings.name,
            evidence=evidence,
        )
