"""The join code: whoever proves in a SPAKE2 exchange to know its seven digits gets a token for one node.

A wrong code is one that was guessed, as far as anybody can tell. After three there is one try a minute, and
after five nobody joins with this code any more. An attacker on the network so gets in with 5 of 10,000,000
codes, and not even the right one tells how it was found.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import structlog

from sealring.coordinator.members.tokens import JoinTokens
from sealring.coordinator.store import Store, StoredJoinCode
from sealring.mesh.clock import Clock
from sealring.mesh.crypto.spake2 import Agreed, Party
from sealring.mesh.errors import FailedPrecondition, PermissionDenied, ResourceExhausted
from sealring.mesh.member.joincode import begin, make_code, seal_token
from sealring.mesh.pki.certificates import Role
from sealring.v1 import membership_pb2

MAX_WRONG = 5
WRONG_AT_ONCE = 3
WAIT_SECONDS = 60
_TOKEN_SECONDS = 120
_BY_CODE = "join code"
log = structlog.get_logger()


@dataclass(frozen=True)
class Attempt:
    """An exchange whose caller has yet to confirm that it has the code."""

    share: bytes
    _agreed: Agreed
    _code: StoredJoinCode

    def is_of(self, code: StoredJoinCode) -> bool:
        """Whether that code is still the one that the exchange began with."""
        return (self._code.code, self._code.created) == (code.code, code.created)

    def confirmed_by(self, confirmation: bytes) -> bool:
        """As `Agreed.confirmed_by`."""
        return self._agreed.confirmed_by(confirmation)

    def answer(self, token: str) -> membership_pb2.CodeToken:
        """The last message, for a caller that has confirmed."""
        return membership_pb2.CodeToken(
            confirmation=self._agreed.own_confirmation, sealed=seal_token(self._agreed.key, token)
        )


class JoinCodes:
    """The code of this coordinator. `pin` is the hash of its root key. Use it from one event loop."""

    def __init__(self, store: Store, tokens: JoinTokens, pin: bytes, *, clock: Clock) -> None:
        self._store = store
        self._tokens = tokens
        self._pin = pin
        self._clock = clock
        self._changed = asyncio.Event()

    def create(self, actor: str, *, seconds: int, uses: int) -> StoredJoinCode:
        """A new code for `uses` nodes in place of the one before."""
        now = int(self._clock())
        code = StoredJoinCode(make_code(), now, now + seconds, uses)
        self._save(code, actor, "create_join_code", {"expires": code.expires, "uses": uses})
        return code

    def revoke(self, actor: str) -> None:
        """Ends the code, if there is one."""
        if self._store.join_codes.find() is not None:
            self._save(None, actor, "revoke_join_code", {})

    def current(self) -> StoredJoinCode | None:
        """The code if it has not expired. It may be used up by wrong tries (`is_used_up`)."""
        code = self._store.join_codes.find()
        return code if code is not None and self._clock() < code.expires else None

    def open_until(self) -> int | None:
        """The time at which the code ends with which a node could join now, in seconds since 1970."""
        code = self.current()
        return None if code is None or is_used_up(code) else code.expires

    async def changed(self) -> None:
        """Returns when a code was made or has ended otherwise than by its time."""
        await self._changed.wait()

    def begin(self, share: bytes) -> Attempt:
        """The answer to a caller's share, which tells nobody anything about the code.

        Raises FailedPrecondition (NO_CODE), ResourceExhausted (CODE_WAIT), HandshakeError (BAD_SHARE).
        """
        code = self._usable()
        exchange = begin(Party.B, code.code, self._pin)
        return Attempt(exchange.share, exchange.finish(share), code)

    def finish(self, attempt: Attempt, confirmation: bytes) -> membership_pb2.CodeToken:
        """The token for a caller that has the code.

        Raises FailedPrecondition (NO_CODE), ResourceExhausted (CODE_WAIT, TOO_MANY_TOKENS), PermissionDenied
        (WRONG_CODE), Unavailable (STATE_UNWRITABLE).
        """
        code = self._usable()
        if not attempt.is_of(code):
            raise _no_code()
        # The try is stored before anything is compared: whoever stops the coordinator in between, or fills
        # its disk, gets no other.
        now = int(self._clock())
        self._store.join_codes.save(replace(code, wrong=code.wrong + 1, wrong_at=now))
        if not attempt.confirmed_by(confirmation):
            left = MAX_WRONG - code.wrong - 1
            log.warning("join_code_wrong", tries_left=left)
            self._store.audit.append(now, _BY_CODE, "wrong_join_code", "", {"tries_left": left})
            if not left:
                self._tell()
            raise PermissionDenied(
                "the join code is wrong",
                hint=f"look at the first machine; tries left: {left}"
                if left
                else "it is used up: make a new one there with `sealring token code`",
                reason="WRONG_CODE",
                tries_left=left,
                **({"retry_after": WAIT_SECONDS} if left and code.wrong + 1 >= WRONG_AT_ONCE else {}),
            )
        with self._store.transaction():
            token, _ = self._tokens.make(
                Role.MEMBER, _BY_CODE, now=now, seconds=_TOKEN_SECONDS, note="by join code"
            )
            if code.uses > 1:
                self._store.join_codes.save(replace(code, uses=code.uses - 1))
            else:
                self._store.join_codes.clear()
        if code.uses == 1:
            self._tell()
        return attempt.answer(token.format())

    def _usable(self) -> StoredJoinCode:
        code = self.current()
        if code is None or is_used_up(code):
            raise _no_code()
        wait = code.wrong_at + WAIT_SECONDS - self._clock()
        if code.wrong >= WRONG_AT_ONCE and wait > 0:
            seconds = min(int(wait) + 1, WAIT_SECONDS)
            raise ResourceExhausted(
                f"{code.wrong} wrong join codes were typed, the last of them less than a minute ago",
                hint=f"try again in {seconds} s",
                reason="CODE_WAIT",
                retry_after=seconds,
            )
        return code

    def _save(self, code: StoredJoinCode | None, actor: str, action: str, details: dict[str, object]) -> None:
        with self._store.transaction():
            if code is None:
                self._store.join_codes.clear()
            else:
                self._store.join_codes.save(code)
            self._store.audit.append(self._clock(), actor, action, "", details)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def is_used_up(code: StoredJoinCode) -> bool:
    """Whether too many wrong codes were tried."""
    return code.wrong >= MAX_WRONG


def _no_code() -> FailedPrecondition:
    return FailedPrecondition(
        "nobody can join this cluster with a code now",
        hint="make a new one on the first machine: sealring token code",
        reason="NO_CODE",
    )
