"""One coordinator at a time: a promotion begins a term, and a coordinator shown a later term stops for good.

Members need none of this to be safe: they refuse every roster below the newest they have seen, and all of a
term are below all of the next.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import structlog

from sealring.coordinator.backup import PREDECESSOR
from sealring.coordinator.keys import OPERATOR_DIR
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.store import Store
from sealring.mesh.errors import ConfigError, FailedPrecondition, SealringError
from sealring.mesh.member.state import load_machine_state
from sealring.mesh.pki.certificates import Role, role_server_name
from sealring.mesh.roster.model import Roster, term_of
from sealring.mesh.rpc.tls import channel_options, secure_channel
from sealring.v1 import admin_pb2, admin_pb2_grpc

_DEPOSED = "deposed"
_RETRY_SECONDS = 5.0
log = structlog.get_logger()


def deposed_by(folder: Path) -> bytes | None:
    """The signed roster of the coordinator that has taken over from the one with this state `folder`, which
    does not run; None if none has.

    Raises ConfigError (STATE_*).
    """
    store = Store.open(folder)
    try:
        return store.get_meta(_DEPOSED)
    finally:
        store.close()


def check_term(store: Store) -> None:
    """Raises ConfigError (DEPOSED) where another coordinator has taken over."""
    if store.get_meta(_DEPOSED) is not None:
        raise ConfigError(
            "a standby has taken over from this coordinator",
            hint="move its state folder aside, as `sealring up` and `sealring join` do; for a standby here, "
            "make a backup on the machine that took over: sealring coordinator standby FILE",
            reason="DEPOSED",
        )


def depose(store: Store, version: int, roster: Roster, envelope: bytes) -> None:
    """Stores the `envelope` of a verified roster of the coordinator that took over: it says where this is.

    Raises FailedPrecondition (NO_LATER_TERM).
    """
    if term_of(roster.version) <= term_of(version):
        raise FailedPrecondition("the roster is of no later term", reason="NO_LATER_TERM")
    log.error("coordinator_deposed", term=term_of(version), later=term_of(roster.version))
    store.set_meta(_DEPOSED, envelope)


async def tell_predecessor(store: Store, publisher: RosterPublisher, folder: Path, own: str) -> None:
    """Shows the coordinator before this one that it is over, as soon as it can be reached. Never returns."""
    while (address := (store.get_meta(PREDECESSOR) or b"").decode()) not in ("", own):
        try:
            await _tell(address, publisher.current.envelope, store, folder)
        except SealringError as error:  # a full disk, which may have room again
            log.error("predecessor_not_told", address=address, reason=error.reason, why=error.message)
            await asyncio.sleep(_RETRY_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.debug("predecessor_not_told", address=address, code=error.code().name)
            await asyncio.sleep(_RETRY_SECONDS)
    await asyncio.Event().wait()


async def _tell(address: str, roster: bytes, store: Store, folder: Path) -> None:
    """Raises AioRpcError, Unavailable (STATE_UNWRITABLE), ConfigError (MEMBER_STATE_CORRUPT)."""
    tls = load_machine_state(folder / OPERATOR_DIR).tls
    options = channel_options(role_server_name(Role.COORDINATOR))
    async with secure_channel(address, tls, options) as channel:
        request = admin_pb2.StandDownRequest(roster=roster)
        await admin_pb2_grpc.AdminStub(channel).StandDown(request, timeout=_RETRY_SECONDS)
    store.delete_meta(PREDECESSOR)
    log.info("predecessor_told", address=address)
