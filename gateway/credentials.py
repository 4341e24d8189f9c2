"""The gateway's own identity in its cluster."""

from __future__ import annotations

from pathlib import Path

from sealring.mesh.crypto.identity import Signer, SoftwareSigner, member_id
from sealring.mesh.errors import ConfigError
from sealring.mesh.member.state import IDENTITY_KEY, MachineState, load_machine_state
from sealring.mesh.pki.certificates import Role


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
