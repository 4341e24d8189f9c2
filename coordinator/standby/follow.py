"""The standby: fetches copies of the coordinator's state until it is promoted, and starts from the last."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path

import grpc
import grpc.aio
import structlog

from sealring.coordinator.backup import STANDBY_MARK, recover
from sealring.coordinator.keys import CA_CERTIFICATE, OPERATOR_DIR, ROOT_METADATA, ClusterKeys
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.standby.copies import NONCE_BYTES, OPERATOR_CERTIFICATE, unpacked
from sealring.coordinator.store import DATABASE_NAME
from sealring.coordinator.store.database import check_image, take_lock
from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.errors import ConfigError, RosterError, SealringError
from sealring.mesh.member.state import load_machine_state
from sealring.mesh.pki.certificates import Role, role_server_name
from sealring.mesh.rpc.server import MAX_MESSAGE
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.rpc.tls import channel_options, secure_channel
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.system.files import unwritable, write_atomic
from sealring.v1 import admin_pb2, admin_pb2_grpc

LOOK_SECONDS = 1.0
_BYTES_PER_SECOND = 1 << 20
"""The most that a standby writes to its disk in the long run: a large state is fetched more rarely."""

_CALL_SECONDS = 30.0
_PROMOTED = b"promoted"
log = structlog.get_logger()


def promote(settings: CoordinatorSettings) -> None:
    """Marks the standby in this folder for promotion, which its process carries out. Raises ConfigError
    (NO_STANDBY)."""
    mark = settings.state_dir / STANDBY_MARK
    if not mark.is_file():
        raise ConfigError(
            f"{settings.state_dir} holds no standby",
            hint="make one from a backup: sealring coordinator standby FILE",
            reason="NO_STANDBY",
        )
    try:
        write_atomic(mark, _PROMOTED)
    except OSError as error:
        raise unwritable(mark, error) from None


async def stand_by(settings: CoordinatorSettings, *, clock: Clock = wall_clock) -> None:
    """Follow the coordinator for as long as the folder is a standby's.

    Returns when it is a coordinator's, after the promotion or all along. Raises ConfigError (STATE_*).
    """
    mark = settings.state_dir / STANDBY_MARK
    if not mark.is_file():
        return
    lock = take_lock(settings.state_dir / DATABASE_NAME)
    try:
        follower = Follower(settings, clock=clock)
        while mark.read_bytes() != _PROMOTED:
            await follower.look(asyncio.get_running_loop().time())
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        os.close(lock)
    recover(settings, instead_of=follower.address, clock=clock)
    mark.unlink()
    log.info("standby_promoted", instead_of=follower.address)


class Follower:
    """Keeps one folder as the coordinator's is."""

    def __init__(self, settings: CoordinatorSettings, *, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._folder = settings.state_dir
        self.address = load_machine_state(self._folder / OPERATOR_DIR).coordinator
        self._known = b""
        self._newest = 0
        self._not_before = 0.0
        self._trouble = ""

    async def look(self, now: float) -> None:
        """Fetches the changes if it is time; `now` in seconds. A failure is logged once and tried again."""
        if now < self._not_before:
            return
        try:
            size = await self.fetch()
            self._not_before = now + size / _BYTES_PER_SECOND
            if size:
                log.info("state_copied", version=self._newest, bytes=size)
            self._trouble = ""
        except SealringError as error:
            if error.reason != self._trouble:
                log.error("state_not_copied", reason=error.reason, why=error.message, hint=error.hint)
            self._trouble = error.reason

    async def fetch(self) -> int:
        """Makes the folder as the coordinator's is; returns the bytes written, 0 if nothing has changed."""
        tls = load_machine_state(self._folder / OPERATOR_DIR).tls
        root = ClusterKeys.load(self._settings, now=self._clock()).root
        options = [
            *channel_options(role_server_name(Role.COORDINATOR)),
            ("grpc.max_receive_message_length", MAX_MESSAGE),
        ]
        nonce = secrets.token_bytes(NONCE_BYTES)
        own = self._settings.main_address()
        own = own if parse_address(own)[1] else ""
        request = admin_pb2.CopyStateRequest(nonce=nonce, known=self._known, address=own)
        async with secure_channel(self.address, tls, options) as channel:
            try:
                response = await admin_pb2_grpc.AdminStub(channel).CopyState(request, timeout=_CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None
        digest, copy = unpacked(response, nonce, self._known, root)
        if copy is None:
            return 0
        newest = check_image(copy.database)
        if newest < self._newest:
            raise RosterError("the copy is older than the one before", reason="ROSTER_ROLLBACK")
        await asyncio.to_thread(write_copy, self._folder, copy)
        self._known, self._newest = digest, newest
        return len(copy.database)


def write_copy(folder: Path, copy: admin_pb2.StateCopy) -> None:
    """Writes the files of a copy, the database last: newer files beside an older database are valid.

    Raises ConfigError (STATE_UNWRITABLE).
    """
    try:
        for name, data in (
            (ROOT_METADATA, copy.root_metadata),
            (CA_CERTIFICATE, copy.authority),
            (OPERATOR_CERTIFICATE, copy.operator_certificate),
        ):
            path: Path = folder / name
            if path.read_bytes() != data:
                write_atomic(path, data, mode=0o600 if name == OPERATOR_CERTIFICATE else 0o644)
        write_atomic(folder / DATABASE_NAME, copy.database)
    except OSError as error:
        raise unwritable(folder, error) from None
