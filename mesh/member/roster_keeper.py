"""The roster that an enrolled machine uses: verified, stored on disk, and watched for its expiry."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.errors import ConfigError, FailedPrecondition, NotFound, PermissionDenied, RosterError
from sealring.mesh.member.proof import HeldRoster
from sealring.mesh.member.state import ROSTER, ROSTER_STATE, MachineState
from sealring.mesh.pki.root import RootMetadata, encode_chain
from sealring.mesh.roster.codec import issued_unverified
from sealring.mesh.roster.model import Roster
from sealring.mesh.roster.reader import JOIN_AGAIN, Equivocation, RosterReader, check_roster
from sealring.mesh.system.files import read_bounded, write_atomic

log = structlog.get_logger()

MAY_PASS = frozenset({"ROSTER_STATE_UNWRITABLE", "ROSTER_EXPIRED", "ROSTER_NOT_YET_VALID"})
"""Reasons to refuse a roster that may be over at the next look: a disk gets room, a clock is set right."""

_MAX_ENVELOPE = 2 << 20


class RosterKeeper:
    """Accepts rosters through the reader with its anti-rollback memory, and in no other way."""

    def __init__(self, folder: Path, state: MachineState, *, clock: Clock = wall_clock) -> None:
        """Raises RosterError (ROSTER_STATE_*) when the memory of earlier rosters is not usable."""
        self._file = folder / ROSTER
        self._reader = RosterReader(
            state.root, folder / ROSTER_STATE, state.peer.id, clock=clock, on_equivocation=self._alarm
        )
        self.equivocation: Equivocation | None = None
        self._cluster = state.peer.cluster
        self._accepting = threading.Lock()
        self._revoked: frozenset[str] = frozenset()
        self._envelope = b""
        self.lapsed: Roster | None = None
        """The stored roster, if it had expired at the start: what there was. Nothing may run by it."""

        self.coordinators: tuple[str, ...] = ()
        """Addresses of coordinators in the roster: hints only, for a coordinator proves itself at each."""

    def _alarm(self, equivocation: Equivocation) -> None:
        """Notes that two histories were signed. The reader refuses the second; this object's owner reports
        it."""
        self.equivocation = equivocation

    def load(self) -> None:
        """Uses the stored roster if it is still valid. Raises PermissionDenied (REMOVED)."""
        try:
            envelope = read_bounded(self._file, max_bytes=_MAX_ENVELOPE)
            self._learn(self._reader.accept(envelope), envelope)
        except FileNotFoundError:
            log.info("stored_roster_missing")
        except (OSError, ConfigError) as error:  # ConfigError: it is too large
            log.warning("stored_roster_unreadable", error=str(error))
        except RosterError as error:
            self._check_removed(error)
            log.info("stored_roster_refused", reason=error.reason)
            with contextlib.suppress(RosterError):  # an expired roster still says where coordinators may be
                then = issued_unverified(envelope)
                self.lapsed = check_roster(envelope, self._reader.root, now=then)
                self.coordinators = self.lapsed.coordinators

    async def accept(self, envelope: bytes, newer_root: Callable[[], Awaitable[None]]) -> Roster:
        """Verifies, stores and uses a roster; calls `newer_root` first if a newer root version signed it.

        Raises RosterError, PermissionDenied (REMOVED) when this machine is no longer in it.
        """
        try:
            roster = await asyncio.to_thread(self._accept, envelope)
        except RosterError as error:
            self._check_removed(error)
            if error.reason != "ROSTER_ROOT_VERSION":
                raise
            await newer_root()
            roster = await asyncio.to_thread(self._accept, envelope)
        log.info(
            "roster_accepted", version=roster.version, members=len(roster.members), rings=len(roster.rings)
        )
        return roster

    def follow_root(self, root: RootMetadata) -> None:
        """Follows the newer versions of a verified chain. Raises RosterError."""
        newer = root.version - self._reader.root.version
        self._reader.update_root(*root.chain[len(root.chain) - newer :])

    @property
    def current(self) -> Roster:
        """The roster in use. Raises FailedPrecondition (NO_ROSTER, ROSTER_EXPIRED)."""
        return self._reader.current

    @property
    def valid(self) -> Roster | None:
        """The roster in use, if there is one and it has not expired."""
        try:
            return self._reader.current
        except FailedPrecondition:
            return None

    def signed(self) -> tuple[bytes, bytes]:
        """The roster's envelope and the chain of its root metadata, for others to verify.

        Raises FailedPrecondition (NO_ROSTER, ROSTER_EXPIRED).
        """
        _ = self.current  # raises if the roster may not be shown
        return self._envelope, encode_chain(self._reader.root.chain)

    @property
    def version(self) -> int:
        """The version in use, 0 without one."""
        valid = self.valid
        return valid.version if valid else 0

    @property
    def held(self) -> HeldRoster:
        """The roster in use, as proofs state it."""
        valid = self.valid
        return HeldRoster(valid.version, valid.hash) if valid else HeldRoster()

    @property
    def root(self) -> RootMetadata:
        """The newest root metadata that was followed."""
        return self._reader.root

    def now(self) -> float:
        """The time of day, which a clock that is set back does not turn back."""
        return self._reader.now()

    @property
    def expired(self) -> bool:
        return self._reader.expired()

    @property
    def ahead(self) -> int:
        """As RosterReader's."""
        return self._reader.ahead

    @property
    def lapses(self) -> bool:
        """Whether there is a roster, and it has expired."""
        return self.expired and self._reader.used

    def lapse(self) -> FailedPrecondition:
        """The error to raise once the roster has expired."""
        return self._reader.lapse()

    def revoked(self, identifier: str) -> bool:
        """Whether the newest roster, even if it has expired, lists this id as revoked."""
        return identifier in self._revoked

    def gateway_key(self, cluster: str, identifier: str) -> bytes:
        """The identity key of a gateway of the roster in use.

        Raises PermissionDenied (GATEWAY_NOT_ALLOWED), FailedPrecondition without a roster.
        """
        with contextlib.suppress(NotFound):
            gateway = self.current.gateway(identifier)
            if cluster == self._cluster:
                return gateway.identity_key
        raise PermissionDenied(
            "this gateway is not in the roster", hint="enrol it first", reason="GATEWAY_NOT_ALLOWED"
        )

    def _accept(self, envelope: bytes) -> Roster:
        with self._accepting:  # two threads use and store their rosters in the order of acceptance
            roster = self._reader.accept(envelope)
            self._learn(roster, envelope)
            try:
                write_atomic(self._file, envelope)
            except OSError as error:  # goes on: only a restart needs the file, or else the coordinator
                log.warning("roster_not_stored", errno=error.errno)
            return roster

    def _learn(self, roster: Roster, envelope: bytes) -> None:
        self._envelope = envelope
        members = {member.id for member in roster.members}  # some were evicted, and are back
        self._revoked = frozenset(entry.id for entry in roster.revoked if entry.id not in members)
        self.coordinators = roster.coordinators

    def _check_removed(self, error: RosterError) -> None:
        if error.reason == "ROSTER_SELF_ABSENT":
            # After a restart, an evicted machine must not use the old roster again.
            self._file.unlink(missing_ok=True)
            raise removed() from None


def removed() -> PermissionDenied:
    """The error for a machine that was evicted or banned."""
    return PermissionDenied(
        "this machine is not in the roster any more",
        hint=f"it was evicted or banned; {JOIN_AGAIN}",
        reason="REMOVED",
    )
