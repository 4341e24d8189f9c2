"""Evicts or bans a member or gateway: its streams end, and the next roster omits it."""

from __future__ import annotations

from sealring.coordinator.members.joincodes import JoinCodes
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.store import Revocation, Store, StoredMember, revocation_of
from sealring.coordinator.streams.sessions import Sessions
from sealring.coordinator.streams.watchers import Watchers
from sealring.mesh.clock import Clock
from sealring.mesh.errors import PermissionDenied


class Expulsion:
    """Evicts, which a new join token undoes, and bans, which nothing does."""

    def __init__(
        self,
        store: Store,
        publisher: RosterPublisher,
        sessions: Sessions,
        watchers: Watchers,
        codes: JoinCodes,
        *,
        clock: Clock,
    ) -> None:
        self._store = store
        self._publisher = publisher
        self._sessions = sessions
        self._watchers = watchers
        self._codes = codes
        self._clock = clock

    def evict(self, who: StoredMember, actor: str, *, why: str = "") -> None:
        """It may come back with a new token; what is left of the one that it had is revoked, and so is
        the join code.

        `why` is a reason, for the audit log and for the machine.
        """
        hint = f"it failed: {why}; " if why else ""
        error = PermissionDenied(
            "this machine was evicted",
            hint=f"{hint}ask the operator for a new join token",
            reason="EVICTED",
        )
        self._throw_out(revocation_of(who, self._now(), banned=False), actor, error, why)

    def ban(self, who: StoredMember | Revocation, actor: str) -> None:
        """This identity never comes back, be it evicted already."""
        error = PermissionDenied("this machine was banned", hint="ask the operator", reason="BANNED")
        self._throw_out(revocation_of(who, self._now(), banned=True), actor, error, "")

    def _throw_out(self, revocation: Revocation, actor: str, error: PermissionDenied, why: str) -> None:
        identifier = revocation.id

        def end_streams() -> None:
            """Once it is stored: the machine leaves for good. Before the roster: the error says more."""
            self._sessions.throw_out(identifier, error.reason.lower(), error)
            self._watchers.throw_out(identifier, error)

        action = "ban_node" if revocation.banned else "evict_node"
        with self._publisher.change(stored=end_streams):
            self._store.members.revoke(revocation)
            self._store.audit.append(revocation.at, actor, action, identifier, {"why": why} if why else {})
            self._revoke_tokens(identifier, revocation.at, actor)

    def _revoke_tokens(self, identifier: str, at: int, actor: str) -> None:
        """What is left of the tokens that it joined with, and the join code, which it may have seen: it would
        come back by them, under any identity."""
        self._codes.revoke(actor)
        for token in self._store.audit.tokens_of(identifier):
            if self._store.tokens.is_open(token):
                self._store.tokens.revoke(token)
                self._store.audit.append(at, actor, "revoke_join_token", token, {"joined": identifier})

    def _now(self) -> int:
        return int(self._clock())
