"""Joins a cluster with a token: `sealring gateway join`."""

from __future__ import annotations

from sealring.gateway.settings import GatewaySettings
from sealring.mesh.crypto.identity import SoftwareSigner
from sealring.mesh.member.bootstrap import JoinToken
from sealring.mesh.member.enrolment import Enrolled, enrol
from sealring.mesh.member.state import IDENTITY_KEY, check_may_join
from sealring.mesh.pki.certificates import Role
from sealring.mesh.system.lock import lock_state


async def join(settings: GatewaySettings, token: str) -> Enrolled:
    """Enrols this gateway with the token's coordinator, anew where it is or was one of this cluster.

    Raises AlreadyExists (ALREADY_ENROLLED) in the folder of another cluster, Conflict (STATE_IN_USE),
    PermissionDenied (JOIN_REFUSED), InvalidInput, Unavailable, and RosterError or CertificateError when the
    coordinator is not the one that the token pins.
    """
    folder = settings.state_dir
    with lock_state(folder):
        check_may_join(folder, JoinToken.parse(token).root_sha256)
        return await enrol(
            token=token,
            role=Role.GATEWAY,
            signer=SoftwareSigner.load_or_create(folder / IDENTITY_KEY),
            state_dir=folder,
            name=settings.name,
        )
