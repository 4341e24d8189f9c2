"""Makes join tokens, for operators and for nodes whose users type the join code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sealring.coordinator.store import Store, StoredToken
from sealring.mesh.errors import ResourceExhausted
from sealring.mesh.member.bootstrap import JoinToken
from sealring.mesh.pki.certificates import Role

MAX_OPEN_TOKENS = 1000


class JoinTokens:
    """`pin` is the hash of the root key. `addresses` gives those of the coordinator's join port as host:port,
    the best first."""

    def __init__(self, store: Store, pin: bytes, addresses: Callable[[], Sequence[str]]) -> None:
        self._store = store
        self._pin = pin
        self._addresses = addresses

    def make(
        self, role: Role, actor: str, *, now: int, seconds: int, note: str = "", uses: int = 1
    ) -> tuple[JoinToken, int]:
        """A stored token for `uses` machines, and when it ends, `seconds` from `now`.

        Raises ResourceExhausted (TOO_MANY_TOKENS).
        """
        if len(self._store.tokens.open(now=now)) >= MAX_OPEN_TOKENS:
            raise ResourceExhausted(
                f"there are {MAX_OPEN_TOKENS} open join tokens already",
                hint="revoke some, or wait until they expire",
                reason="TOO_MANY_TOKENS",
            )
        token = JoinToken.generate(self._pin, self._addresses())
        expires = now + seconds
        with self._store.transaction():
            stored = StoredToken(
                id=token.token_id, role=role, created=now, expires=expires, note=note, uses=uses
            )
            self._store.tokens.add(stored, token.secret)
            details = {"role": role, "expires": expires, "note": note, "uses": uses}
            self._store.audit.append(now, actor, "create_join_token", token.token_id, details)
        return token, expires
