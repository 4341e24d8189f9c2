"""Rosters from the coordinator, on their way to the parts of the node that follow them."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from sealring.mesh.errors import SealringError
from sealring.mesh.member.roster_keeper import MAY_PASS, RosterKeeper
from sealring.node.daemon.awake import Awake
from sealring.node.daemon.plan import EpochPlan, plan_epoch
from sealring.node.daemon.sealed_rows import Unsealer
from sealring.node.daemon.seats import Seats
from sealring.node.link.exchange import Handshakes
from sealring.v1 import membership_pb2

_UNWRITABLE = "ROSTER_STATE_UNWRITABLE"


class RosterIntake:
    """Accepts rosters, and applies each accepted one to prompts, links, seats and sleep.

    A roster that is refused for a reason of MAY_PASS waits until `retry` can use it: the coordinator sends it
    once. That is also one that came while this machine's clock was wrong. Where it could not be remembered,
    for want of space on the disk, it could be rolled back later, and `error` refuses new epochs. Use it from
    one event loop.
    """

    def __init__(
        self,
        rosters: RosterKeeper,
        newer_root: Callable[[], Awaitable[None]],
        send: Callable[[membership_pb2.MemberMessage], None],
        on_removed: Callable[[], None],
        *,
        unsealer: Unsealer,
        handshakes: Handshakes,
        seats: Seats,
        awake: Awake,
    ) -> None:
        """`newer_root` fetches the newest root metadata; `send` queues a message to the coordinator.

        `on_removed` is called when a valid roster does not name this node.
        """
        self._rosters = rosters
        self._newer_root = newer_root
        self._send = send
        self._on_removed = on_removed
        self._unsealer = unsealer
        self._handshakes = handshakes
        self._seats = seats
        self._awake = awake
        self._waiting: tuple[bytes, SealringError] | None = None

    @property
    def error(self) -> SealringError | None:
        """The error that keeps the newest roster from use, if it could not be remembered."""
        error = self._waiting[1] if self._waiting is not None else None
        return error if error is not None and error.reason == _UNWRITABLE else None

    def plan(self, prepare: membership_pb2.PrepareEpoch) -> EpochPlan:
        """As `plan_epoch`, by the newest roster. Raises the `error`, if there is one."""
        if self.error is not None:
            raise self.error
        return plan_epoch(prepare, self._rosters.current, self._seats.own_id)

    async def accept(self, envelope: bytes) -> None:
        """Verifies a roster and applies it.

        Raises RosterError, ConfigError (ROSTER_STATE_UNWRITABLE), and PermissionDenied (REMOVED) for a roster
        without this node.
        """
        try:
            roster = await self._rosters.accept(envelope, self._newer_root)
        except SealringError as error:
            if error.reason == "REMOVED":
                self._on_removed()
            elif error.reason in MAY_PASS and (self.error is None or error.reason == _UNWRITABLE):
                self._waiting = envelope, error
            self._report_equivocation()
            raise
        self._waiting = None
        # What the roster forbids ends here before the coordinator learns that the roster was seen.
        self._unsealer.learn(roster)
        self._handshakes.close_revoked()
        self._report_seen(roster.version, roster.hash)
        self._seats.follow(roster)
        await self._awake.follow(bool(roster.rings_of(self._seats.own_id)))

    async def retry(self) -> None:
        """Accepts the roster that waits, if the disk has space for it by now, or the clock is right."""
        if self._waiting is not None:
            with contextlib.suppress(SealringError):
                await self.accept(self._waiting[0])

    def _report_equivocation(self) -> None:
        """Reports which roster this node holds of a version that was signed twice."""
        found = self._rosters.equivocation
        if found is not None:
            self._report_seen(found.version, found.known)

    def _report_seen(self, version: int, digest: bytes) -> None:
        seen = membership_pb2.RosterSeen(version=version, hash=digest)
        self._send(membership_pb2.MemberMessage(roster_seen=seen))
