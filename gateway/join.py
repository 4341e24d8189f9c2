"""Joins a cluster with a token: `sealring gateway join`."""

from __future__ import annotations

from gateway.settings import GatewaySettings
from mesh.certificates import Role
from mesh.enrolment import Enrolled, enrol
from mesh.errors import AlreadyExists
from mesh.identity import SoftwareSigner
from mesh.memberstate import IDENTITY_KEY, is_enrolled
from mesh.statelock import lock_state


async def join(settings: GatewaySettings, token: str, *, coordinator: str) -> Enrolled:
    """Enrols this gateway with the coordinator at `coordinator` (host:port of its join address).

    Raises AlreadyExists (ALREADY_ENROLLED), Conflict (STATE_IN_USE), PermissionDenied (JOIN_REFUSED),
    InvalidInput, Unavailable, and RosterError or CertificateError when the coordinator is not the one that
    the token pins.
    """
    folder = settings.state_dir
    with lock_state(folder):
        if is_enrolled(folder):
            raise AlreadyExists(
                f"this gateway is enrolled already, in {folder}",
                hint="name another state folder, or remove this one to join anew",
                reason="ALREADY_ENROLLED",
            )
        return await enrol(
            coordinator=coordinator,
            token=token,
            role=Role.GATEWAY,
            signer=SoftwareSigner.load_or_create(folder / IDENTITY_KEY),
            state_dir=folder,
            name=settings.name,
        )
