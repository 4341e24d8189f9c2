"""The roster that the gateway goes by: verified by its own reader, and kept as the coordinator signed it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from mesh.errors import FailedPrecondition, PermissionDenied, RosterError
from mesh.memberstate import ROSTER, ROSTER_STATE, MemberState
from mesh.rootmeta import RootMetadata, encode_chain
from mesh.roster import Roster
from mesh.roster_reader import RosterReader
from mesh.statefiles import read_bounded, write_atomic
from sealring.v1 import inference_pb2 as inference

log = structlog.get_logger()

_MAX_ENVELOPE = 2 << 20


class RosterKeeper:
    """Takes rosters through the reader with its anti-rollback memory, and in no other way."""

    def __init__(self, folder: Path, state: MemberState) -> None:
        """Raises RosterError (ROSTER_STATE_*) when the memory of earlier rosters is not usable."""
        self._file = folder / ROSTER
        self._reader = RosterReader(state.root, folder / ROSTER_STATE, state.peer.id)
        self._envelope = b""

    @property
    def current(self) -> Roster | None:
        """The roster in use, while it has not expired."""
        try:
            return self._reader.current
        except FailedPrecondition:
            return None

    def signed(self) -> inference.GetRosterResponse:
        """What clients verify by themselves. Raises FailedPrecondition (NO_ROSTER, ROSTER_EXPIRED)."""
        assert self._reader.current
        chain = encode_chain(self._reader.root.chain)
        return inference.GetRosterResponse(roster=self._envelope, root_metadata=chain)

    def load(self) -> None:
        """Takes up the stored roster, if it still holds. Raises PermissionDenied (REMOVED)."""
        try:
            envelope = read_bounded(self._file, max_bytes=_MAX_ENVELOPE)
            self._reader.accept(envelope)
            self._envelope = envelope
        except FileNotFoundError:
            log.info("no stored roster")
        except RosterError as error:
            _check_removed(error)
            log.info("stored roster is not used", reason=error.reason)

    async def accept(self, envelope: bytes, newer_root: Callable[[], Awaitable[None]]) -> Roster:
        """Verifies, stores and uses a roster; gets the root metadata first when it was made under newer.

        Raises RosterError, and PermissionDenied (REMOVED) when this gateway is not in it any more.
        """
        try:
            roster = await asyncio.to_thread(self._accept, envelope)
        except RosterError as error:
            _check_removed(error)
            if error.reason != "ROSTER_ROOT_VERSION":
                raise
            await newer_root()
            roster = await asyncio.to_thread(self._accept, envelope)
        log.info("roster accepted", version=roster.version, rings=len(roster.rings))
        return roster

    def follow_root(self, root: RootMetadata) -> None:
        """Takes up the newer versions of a verified chain. Raises RosterError."""
        for envelope in root.chain[len(root.chain) - (root.version - self._reader.root.version) :]:
            self._reader.update_root(envelope)

    def _accept(self, envelope: bytes) -> Roster:
        roster = self._reader.accept(envelope)
        self._envelope = envelope
        write_atomic(self._file, envelope)
        return roster


def _check_removed(error: RosterError) -> None:
    if error.reason == "ROSTER_SELF_ABSENT":
        raise PermissionDenied(
            "this gateway is not in the roster any more",
            hint="it was evicted or banned: ask the operator, then join again with a new token",
            reason="REMOVED",
        ) from None
