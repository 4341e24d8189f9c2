"""The reader's checks of a roster, in their order, each with a reason of its own.

size -> threshold of signatures over the raw bytes -> type, cluster, root version -> version -> previous hash
-> times against one clock reading -> ids, keys, ranks, layers -> own key -> trust recomputed -> persisted
-> used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from sealring.mesh.clock import SKEW_SECONDS, Clock, boot_clock, wall_clock
from sealring.mesh.crypto.dsse import check_threshold, parse_envelope
from sealring.mesh.errors import FailedPrecondition, RosterError
from sealring.mesh.pki.root import RootMetadata, check_root_times, follow_root
from sealring.mesh.roster.codec import MAX_PAYLOAD_BYTES, PAYLOAD_TYPE, parse_roster
from sealring.mesh.roster.memory import RosterMemory, RosterState, RosterStateFile
from sealring.mesh.roster.model import Roster, term_of
from sealring.mesh.roster.rules import check_lifetime, check_structure, check_trust

JOIN_AGAIN = (
    "unless it was banned, it may join again: `sealring token code` on the cluster's first machine, then "
    "`sealring join` here"
)
"""What an evicted machine's owner can do."""

MAX_VERSION_JUMP = 1 << 40
"""A newer roster may skip versions (the machine was away), but not so far that versions could run out."""

_log = structlog.get_logger()


@dataclass(frozen=True)
class Equivocation:
    """Proof that the roster keys signed two histories: the version and both hashes."""

    cluster: str
    version: int
    known: bytes
    seen: bytes


class RosterReader:
    """Verifies rosters for one machine and remembers the newest. Safe to use from several threads."""

    def __init__(
        self,
        root: RootMetadata,
        state: Path | RosterMemory,
        own_id: str | None = None,
        *,
        clock: Clock = wall_clock,
        boot: Clock = boot_clock,
        on_equivocation: Callable[[Equivocation], None] | None = None,
    ) -> None:
        """`state` is the file made by `RosterStateFile.create`, or the memory of this process alone.

        Raises RosterError (ROSTER_STATE_*) if the machine has no usable memory of earlier rosters.
        """
        self._lock = threading.RLock()
        self._root = root
        self._own_id = own_id
        self._clock = clock
        self._boot = boot
        self._on_equivocation = on_equivocation
        self.memory = state if isinstance(state, RosterMemory) else RosterStateFile(state)
        self._state = self.memory.load()
        self._begun_at = self._learned_at = boot()  # when the roster of `_state` became known
        self._current: Roster | None = None
        if self._state.cluster != root.cluster:
            raise RosterError("roster state is of another cluster", reason="ROSTER_STATE_CLUSTER")
        if self._state.root_version > root.version:
            raise RosterError("root metadata is older than one used before", reason="ROOT_ROLLBACK")

    @property
    def root(self) -> RootMetadata:
        """The root metadata in use."""
        return self._root

    @property
    def current(self) -> Roster:
        """The roster in use. Raises FailedPrecondition (NO_ROSTER, ROSTER_EXPIRED)."""
        roster = self._current
        if roster is None:
            raise FailedPrecondition("no roster is in use", reason="NO_ROSTER")
        if self.expired():
            raise self.lapse()
        return roster

    def lapse(self) -> FailedPrecondition:
        """The error to raise once the roster has expired."""
        if ahead := self.ahead:
            message = f"the roster has expired by this machine's clock, which is {ahead} s ahead of it"
            return FailedPrecondition(message, reason="ROSTER_EXPIRED", hint="set the machine's clock")
        hint = "check that the coordinator can be reached"
        return FailedPrecondition("the roster has expired", reason="ROSTER_EXPIRED", hint=hint)

    @property
    def used(self) -> bool:
        """Whether a roster was accepted, though it may have expired."""
        return self._current is not None

    @property
    def ahead(self) -> int:
        """Seconds by which this machine's clock is ahead of the roster in use, if that alone has made it
        expire; else 0."""
        ahead, counted = round(self._clock() - self._counted()), self._counted()
        heard, roster = self._learned_at > self._begun_at, self._current
        wrong = heard and ahead > SKEW_SECONDS and roster is not None
        return ahead if wrong and self.expired() and roster is not None and not roster.expired(counted) else 0

    def expired(self) -> bool:
        """Whether no unexpired roster is in use; handshakes then stop and open links close.

        A clock that is set back does not make an expired roster valid again.
        """
        return self._current is None or self._current.expired(self.now())

    def now(self) -> float:
        """The wall clock's time, but no less than the newest roster proves (decision 24): the time of its
        signature plus the time since its acceptance, by a clock that no program can set."""
        return max(self._clock(), self._counted())

    def _counted(self) -> float:
        return self._state.issued + self._boot() - self._learned_at

    def accept(self, envelope: bytes) -> Roster:
        """Verify a roster and use it. The one in use already is accepted again.

        Raises RosterError with the reason of the first check that failed; then nothing has changed, except
        that a newer roster without this machine's own key (ROSTER_SELF_ABSENT) takes the old one out of use.
        """
        with self._lock:
            roster = _open(envelope, self._root, self.now())
            now = self._time_for(roster)
            _check_history(roster, self._state, self._raise_alarm)
            _check_content(roster, now)
            self._check_own_key(roster)
            check_trust(roster)
            state = RosterState(
                roster.cluster, roster.root_version, roster.version, roster.hash, roster.issued
            )
            # Saved before it is used: after a crash, a machine must still know every roster that it has acted
            # on. Otherwise it would accept an older one.
            if state != self._state:
                self.memory.save(state)
                self._state, self._learned_at = state, self._boot()
            self._current = roster
            return roster

    def _time_for(self, roster: Roster) -> float:
        """The time by which a roster is judged. A later version with an earlier time says that the
        coordinator's clock was ahead: that clock's word about the time counts no more (decision 24). It does
        for root metadata, because these say how long the keys count that sign such a roster."""
        withdrawn = roster.version > self._state.version and roster.issued < self._state.issued - SKEW_SECONDS
        return self._clock() if withdrawn else self.now()

    def update_root(self, *envelopes: bytes) -> RootMetadata:
        """Follow the root's rotation; the last version has to be valid now.

        Raises RosterError (ROOT_*, THRESHOLD_NOT_MET, ...).
        """
        with self._lock:
            root = self._root
            for envelope in envelopes:
                root = follow_root(envelope, root)
            check_root_times(root, now=self.now())
            self._root = root
            return root

    def _check_own_key(self, roster: Roster) -> None:
        if self._own_id is None:
            return
        ids = {member.id for member in roster.members} | {gateway.id for gateway in roster.gateways}
        if self._own_id not in ids:
            # This roster is genuine and newer: with the old one, an evicted machine would stay in its ring.
            self._current = None
            raise RosterError(
                "roster does not list this machine",
                reason="ROSTER_SELF_ABSENT",
                hint=f"it was evicted, banned or not yet admitted; {JOIN_AGAIN}",
            )

    def _raise_alarm(self, equivocation: Equivocation) -> None:
        _log.error(
            "roster_equivocation",
            cluster=equivocation.cluster,
            version=equivocation.version,
            known=equivocation.known.hex(),
            seen=equivocation.seen.hex(),
        )
        if self._on_equivocation is not None:
            self._on_equivocation(equivocation)


def check_roster(envelope: bytes, root: RootMetadata, *, now: float, ever: bool = False) -> Roster:
    """The checks that need no memory, for tools and one-off clients. `root` must have been verified.

    `ever` is as in `parse_roster`, for what was signed long ago.

    Raises RosterError (ENVELOPE_*, DUPLICATE_KEY_ID, BAD_SIGNATURE, THRESHOLD_NOT_MET, ROSTER_*, ROOT_*).
    """
    roster = _open(envelope, root, now, ever)
    _check_content(roster, now)
    check_trust(roster)
    return roster


def _open(envelope: bytes, root: RootMetadata, now: float, ever: bool = False) -> Roster:
    opened = parse_envelope(envelope, payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES)
    check_root_times(root, now=now)
    check_threshold(opened, root.roster_keys, root.roster_threshold)
    roster = parse_roster(opened.payload, ever=ever)
    if roster.cluster != root.cluster:
        raise RosterError("roster is of another cluster", reason="ROSTER_CLUSTER")
    if roster.root_version != root.version:
        raise RosterError(
            "roster was made under another root version",
            reason="ROSTER_ROOT_VERSION",
            hint="fetch the newest root metadata",
        )
    return roster


def _check_content(roster: Roster, now: float) -> None:
    _check_times(roster, now)
    check_structure(roster)


def _check_history(roster: Roster, stored: RosterState, alarm: Callable[[Equivocation], None]) -> None:
    if roster.version < stored.version:
        deposed = term_of(roster.version) < term_of(stored.version)
        raise RosterError(
            "roster is older than one used before",
            reason="ROSTER_ROLLBACK",
            hint="a standby took over from the coordinator that signed it: stop that one" if deposed else "",
        )
    if roster.version == stored.version:
        if roster.hash != stored.hash:
            alarm(Equivocation(roster.cluster, roster.version, stored.hash, roster.hash))
            raise RosterError(
                "two different rosters have one version",
                reason="ROSTER_EQUIVOCATION",
                hint="the roster keys may be stolen: compare with other members and rotate them",
            )
        return
    if stored.version and roster.version - stored.version > MAX_VERSION_JUMP:
        raise RosterError("roster's version is too far ahead", reason="ROSTER_VERSION_JUMP")
    if roster.version == stored.version + 1 and roster.previous != stored.hash:
        alarm(Equivocation(roster.cluster, stored.version, stored.hash, roster.previous))
        raise RosterError(
            "roster does not follow the one used before",
            reason="ROSTER_PREVIOUS",
            hint="the roster keys may be stolen: compare with other members and rotate them",
        )


def _check_times(roster: Roster, now: float) -> None:
    check_lifetime(roster.issued, roster.expires)
    if roster.issued > now + SKEW_SECONDS:
        raise RosterError(
            "roster is from the future", reason="ROSTER_NOT_YET_VALID", hint="compare the clocks"
        )
    if now >= roster.expires + SKEW_SECONDS:
        raise RosterError("roster has expired", reason="ROSTER_EXPIRED", hint="compare the clocks")
