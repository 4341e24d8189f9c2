"""The roster that an enrolled machine goes by: verified, remembered on disk, and watched for its end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from sealring.mesh.errors import ConfigError, FailedPrecondition, NotFound, PermissionDenied, RosterError
from sealring.mesh.member.proof import HeldRoster
from sealring.mesh.member.state import ROSTER, ROSTER_STATE, MachineState
from sealring.mesh.pki.root import RootMetadata, encode_chain
from sealring.mesh.roster.codec import issued_unverified
from sealring.mesh.roster.model import Roster
from sealring.mesh.roster.reader import Equivocation, RosterReader, check_roster
from sealring.mesh.system.files import read_bounded, write_atomic

log = structlog.get_logger()

_MAX_ENVELOPE = 2 << 20


class RosterKeeper:
    """Accepts rosters through the reader with its anti-rollback memory, and in no other way."""

    def __init__(self, folder: Path, state: MachineState) -> None:
        """Raises RosterError (ROSTER_STATE_*) when the memory of earlier rosters is not usable."""
        self._file = folder / ROSTER
        self._reader = RosterReader(
            state.root, folder / ROSTER_STATE, state.peer.id, on_equivocation=self._alarm
        )
        self.equivocation: Equivocation | None = None
        self._cluster = state.peer.cluster
        self._accepting = threading.Lock()
        self._revoked: frozenset[str] = frozenset()
        self._envelope = b""
        self.coordinators: tuple[str, ...] = ()
        """Where the roster says that a coordinator is or may be; they prove themselves wherever they are."""

    def _alarm(self, equivocation: Equivocation) -> None:
        """Two histories were signed: the other one is refused, and whoever owns this says so to others."""
        self.equivocation = equivocation

    def load(self) -> None:
        """Takes up the stored roster, if it still holds. Raises PermissionDenied (REMOVED)."""
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
            with contextlib.suppress(RosterError):  # too old to go by, not to look for a coordinator
                then = issued_unverified(envelope)
                self.coordinators = check_roster(envelope, self._reader.root, now=then).coordinators

    async def accept(self, envelope: bytes, newer_root: Callable[[], Awaitable[None]]) -> Roster:
        """Verifies, stores and uses a roster; fetches the root metadata first when it was made under newer.

        Raises RosterError, PermissionDenied (REMOVED) when this machine is not in it any more.
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
        """Takes up the newer versions of a verified chain. Raises RosterError."""
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
        _ = self.current  # which raises where it may not be shown
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

    def lapse(self) -> FailedPrecondition:
        """Of a roster that has expired: the error that says why."""
        return self._reader.lapse()

    def revoked(self, identifier: str) -> bool:
        """Whether the roster in use names this id as thrown out; also one that has expired meanwhile."""
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
        """One after another: what two threads accepted is learned and stored in the same order."""
        with self._accepting:
            roster = self._reader.accept(envelope)
            self._learn(roster, envelope)
            try:
                write_atomic(self._file, envelope)
            except OSError as error:  # without it, a restart waits for the coordinator
                log.warning("roster_not_stored", errno=error.errno)
            return roster

    def _learn(self, roster: Roster, envelope: bytes) -> None:
        self._envelope = envelope
        self._revoked = frozenset(entry.id for entry in roster.revoked)
        self.coordinators = roster.coordinators

    def _check_removed(self, error: RosterError) -> None:
        """Who was thrown out must not take up the old roster when it is started again."""
        if error.reason == "ROSTER_SELF_ABSENT":
            self._file.unlink(missing_ok=True)
            raise removed() from None


def removed() -> PermissionDenied:
    """This machine was thrown out."""
    return PermissionDenied(
        "this machine is not in the roster any more",
        hint="it was evicted or banned: ask the operator, then join again with a new token",
        reason="REMOVED",
    )
