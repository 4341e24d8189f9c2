"""Joins a cluster with a token: `sealring node join`."""

from __future__ import annotations

import asyncio

from mesh.certificates import Role
from mesh.enrolment import Enrolled, NodeEvidence, enrol
from mesh.envelope import SealingKey
from mesh.errors import AlreadyExists, ConfigError
from mesh.memberstate import is_enrolled
from mesh.statelock import lock_state
from node.attestor import measure_posture, require_software_allowed
from node.identity import make_signer, read_device_chain
from node.manifest import manifest_hash
from node.settings import NodeSettings


async def join(settings: NodeSettings, token: str) -> Enrolled:
    """Enrols this node with the coordinator that the settings name.

    Raises AlreadyExists (ALREADY_ENROLLED), ConfigError (NO_ADDRESS, BAD_DEVICE_ATTESTATION),
    PermissionDenied (SOFTWARE_IDENTITY, JOIN_REFUSED), Conflict (STATE_IN_USE), InvalidInput, Unavailable,
    and RosterError or CertificateError when the coordinator is not the one that the token pins.
    """
    folder = settings.state_dir
    with lock_state(folder):
        if is_enrolled(folder):
            raise AlreadyExists(
                f"this node is enrolled already, in {folder}",
                hint="name another state folder, or remove this one to join anew",
                reason="ALREADY_ENROLLED",
            )
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
            coordinator=settings.coordinator,
            token=token,
            role=Role.MEMBER,
            signer=signer,
            state_dir=folder,
            name=settings.name,
            evidence=evidence,
        )
