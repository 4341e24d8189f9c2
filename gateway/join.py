"""Joins a cluster with a token (`sealring gateway join`), and loads the enrolment of a gateway that has."""

from __future__ import annotations

from pathlib import Path

from sealring.gateway.settings import GatewaySettings
from sealring.mesh.crypto.identity import Signer, SoftwareSigner, member_id
from sealring.mesh.errors import ConfigError
from sealring.mesh.member.bootstrap import JoinToken
from sealring.mesh.member.enrolment import Enrolled, enrol
from sealring.mesh.member.state import IDENTITY_KEY, MachineState, check_may_join, load_machine_state
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


def load_gateway(folder: Path) -> tuple[MachineState, Signer]:
    """The enrolment in `folder` and its identity. Raises ConfigError (NOT_ENROLLED, MEMBER_STATE_CORRUPT)."""
    state = load_machine_state(folder)
    try:
        signer = SoftwareSigner.load(folder / IDENTITY_KEY)
    except FileNotFoundError:
        raise _not_ours(folder) from None
    if state.peer.role is not Role.GATEWAY or member_id(signer.public_key) != state.peer.id:
        raise _not_ours(folder)
    return state, signer


def _not_ours(folder: Path) -> ConfigError:
    return ConfigError(
        f"the enrolment in {folder} and its identity key do not belong together, or are not a gateway's",
        hint="restore the folder from a backup, or join again in another one",
        reason="MEMBER_STATE_CORRUPT",
    )
