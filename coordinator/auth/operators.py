"""Operators of the Admin service and their roles, looked up at every call.

A certificate alone is not enough: the store has to hold its name with the same key. A revocation therefore
takes effect at once, and the certificate authority's key without an operator's key is of no use. The same
holds for the programs of members, which may read.
"""

from __future__ import annotations

import functools
import hmac
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

from sealring.coordinator.auth.access import Access
from sealring.coordinator.keys import OPERATOR_ID, ClusterKeys
from sealring.coordinator.store import OperatorRole, Store, StoredOperator, StoredRoster
from sealring.mesh.clock import Clock
from sealring.mesh.errors import AlreadyExists, InvalidInput, PermissionDenied, ResourceExhausted
from sealring.mesh.names import check_name
from sealring.mesh.pki.certificates import PeerIdentity, Role, expires_at, key_hash
from sealring.mesh.rpc.interceptor import Context
from sealring.mesh.rpc.limits import Buckets
from sealring.mesh.rpc.running import RunningCalls
from sealring.mesh.rpc.tls import peer_certificate

MAX_OPERATORS = 100
MAX_OPERATOR_SECONDS = 30 * 24 * 3600
_MAX_NAME = 32
_MEMBER_PER_SECOND, _MEMBER_AT_ONCE = 10.0, 100

_RESERVED = {OPERATOR_ID, "coordinator", "init"}
_MAY: dict[str, set[OperatorRole]] = {
    OperatorRole.READ: {OperatorRole.READ},
    OperatorRole.ADMIN: {OperatorRole.READ, OperatorRole.ADMIN},
}
OperatorCall = TypeVar("OperatorCall")
Response = TypeVar("Response")
log = structlog.get_logger()


class OperatorAccess:
    """Admits the calls of operators; adds, rotates and revokes operators."""

    def __init__(self, access: Access, store: Store, keys: ClusterKeys, *, clock: Clock) -> None:
        self._access = access
        self._store = store
        self._keys = keys
        self._clock = clock
        self._running = RunningCalls(_revoked)
        self.members = Buckets(_MEMBER_PER_SECOND, _MEMBER_AT_ONCE)
        """The calls of each member's programs."""

    @property
    def running(self) -> list[str]:
        """The operators of the calls that are running, one name for each call."""
        return self._running.callers

    @asynccontextmanager
    async def calling(self, context: Context, needs: OperatorRole, members: int) -> AsyncIterator[str]:
        """One call, by its caller's name. Revoking or evicting that ends it with OPERATOR_REVOKED. A call of
        a member's program counts as `members` calls, and is refused for 0.

        Raises Unauthenticated (NO_CLIENT_CERTIFICATE, OTHER_CLUSTER), PermissionDenied (WRONG_ROLE,
        OPERATOR_REVOKED, OPERATOR_EXPIRED, OPERATOR_ROLE, MEMBERS_READ), ResourceExhausted (RATE_LIMITED).
        """
        name = self._require(context, needs, members)
        with self._running.one(name):
            yield name

    def is_member(self, caller: str) -> bool:
        """Whether a caller is a member's program, by its name."""
        return self._store.members.find(caller) is not None

    def add(self, name: str, role: OperatorRole, csr: bytes, seconds: int, actor: str) -> bytes:
        """A new operator's certificate, DER.

        Raises InvalidInput (BAD_NAME, BAD_TTL), AlreadyExists (OPERATOR_EXISTS), ResourceExhausted
        (TOO_MANY_OPERATORS), CertificateError (BAD_CSR).
        """
        check_name(name, "operator")
        if len(name) > _MAX_NAME or name in _RESERVED:
            raise InvalidInput(
                f"an operator's name cannot be this: it has at most {_MAX_NAME} characters and is none of "
                f"{', '.join(sorted(_RESERVED))}",
                reason="BAD_NAME",
                param="name",
            )
        known = self._store.operators.all()
        if any(one.name == name for one in known):
            raise AlreadyExists(
                f"there is an operator {name} already",
                hint="rotate its key, or revoke it first",
                reason="OPERATOR_EXISTS",
                param="name",
            )
        if len(known) >= MAX_OPERATORS:
            raise ResourceExhausted(
                f"there are {MAX_OPERATORS} operators already", hint="revoke one", reason="TOO_MANY_OPERATORS"
            )
        return self._issue("add_operator", name, role, csr, seconds, actor)

    def rotate(self, name: str, csr: bytes, seconds: int, actor: str) -> bytes:
        """A certificate for another key of an operator, DER; the old key is refused from now on.

        Raises NotFound (UNKNOWN_OPERATOR), InvalidInput (OPERATOR_OF_THE_COORDINATOR, BAD_TTL),
        CertificateError (BAD_CSR).
        """
        known = self._store.operators.get(name)
        if name == OPERATOR_ID:
            raise InvalidInput(
                "the bundle in the coordinator's own folder cannot be rotated over the network",
                hint="on its machine, with the coordinator stopped: sealring coordinator new-operator",
                reason="OPERATOR_OF_THE_COORDINATOR",
                param="name",
            )
        if known.role not in _MAY:
            raise PermissionDenied(f"operator {name} has an unknown role", reason="OPERATOR_ROLE")
        certificate = self._issue("rotate_operator", name, OperatorRole(known.role), csr, seconds, actor)
        self._running.end(name)
        return certificate

    def revoke(self, name: str, actor: str) -> None:
        """Refuses an operator from now on, and ends its running calls. Raises NotFound (UNKNOWN_OPERATOR)."""
        known = self._store.operators.get(name)
        with self._store.transaction():
            self._store.operators.remove(name)
            details = {"role": known.role, "key": known.key_hash.hex()}
            self._store.audit.append(self._clock(), actor, "revoke_operator", name, details)
        self._running.end(name)

    def _issue(
        self, action: str, name: str, role: OperatorRole, csr: bytes, seconds: int, actor: str
    ) -> bytes:
        if seconds > MAX_OPERATOR_SECONDS:
            raise InvalidInput(
                f"an operator's certificate lives for at most {MAX_OPERATOR_SECONDS} s",
                reason="BAD_TTL",
                param="ttl_seconds",
            )
        now = self._clock()
        peer = PeerIdentity(self._keys.root.cluster, Role.OPERATOR, name)
        certificate = self._keys.ca.issue(csr, peer, lifetime=seconds or MAX_OPERATOR_SECONDS, now=now)
        operator = stored_operator(name, role, certificate, now)
        with self._store.transaction():
            self._store.operators.save(operator)
            details = {"role": role, "key": operator.key_hash.hex(), "expires": operator.expires}
            self._store.audit.append(now, actor, action, name, details)
        return certificate

    def _require(self, context: Context, needs: OperatorRole, members: int) -> str:
        peer = self._access.identify(context, Role.OPERATOR, Role.CLIENT)
        name, certificate = peer.id, peer_certificate(context)
        if peer.role == Role.CLIENT:
            return self._require_member(name, certificate, members)
        known = self._store.operators.find(name)
        if known is None or not hmac.compare_digest(known.key_hash, key_hash(certificate)):
            log.warning("operator_refused", operator=name, why="revoked or another key")
            raise _revoked()
        if self._clock() >= min(known.expires, expires_at(certificate)):
            raise PermissionDenied(
                "the operator's certificate has expired",
                hint="an operator of role admin makes another: sealring operator rotate",
                reason="OPERATOR_EXPIRED",
            )
        if needs not in _MAY.get(known.role, ()):
            log.warning("operator_refused", operator=name, role=known.role, needs=needs)
            raise PermissionDenied(
                f"operator {name} may not do this",
                hint=f"it takes the role {needs}",
                reason="OPERATOR_ROLE",
            )
        return name

    def _require_member(self, identifier: str, certificate: bytes, count: int) -> str:
        """As `_require`, for a program of a member. Raises ResourceExhausted (RATE_LIMITED) as well."""
        member = self._store.members.find(identifier)
        known = member is not None and hmac.compare_digest(member.client_key, key_hash(certificate))
        if not known or self._clock() >= expires_at(certificate):
            log.warning("operator_refused", operator=identifier, why="no member, another key, or its end")
            raise _revoked()
        if not count:
            machine = socket.gethostname()
            raise PermissionDenied(
                "a member may look at its cluster, and change nothing",
                hint=f"on the coordinator's machine, {machine}, it may be done",
                reason="MEMBERS_READ",
                machine=machine,
            )
        self.members.check(identifier, count)
        return identifier

    def roster_published(self, roster: StoredRoster) -> None:
        """Ends the calls of members that are members no more."""
        for name in set(self._running.callers):
            if not (self._store.members.find(name) or self._store.operators.find(name)):
                self._running.end(name)


def needs(
    role: OperatorRole, members: int | None = None
) -> Callable[
    [Callable[[Any, OperatorCall, str], Awaitable[Response]]],
    Callable[[Any, OperatorCall, Any], Coroutine[Any, Any, Response]],
]:
    """Marks a handler of the Admin service with the role that it needs. The handler gets the caller's name
    instead of gRPC's context.

    A call by a member's program counts as `members` calls; for 0 it is refused. By default it may read.
    """
    counts = int(role == OperatorRole.READ) if members is None else members

    def wrap(
        handler: Callable[[Any, OperatorCall, str], Awaitable[Response]],
    ) -> Callable[[Any, OperatorCall, Any], Coroutine[Any, Any, Response]]:
        @functools.wraps(handler)
        async def guarded(self: Any, request: OperatorCall, context: Any) -> Response:
            async with self.operators.calling(context, role, counts) as actor:
                return await handler(self, request, actor)

        guarded.__dict__["needs"] = role
        return guarded

    return wrap


def stored_operator(name: str, role: OperatorRole, certificate: bytes, now: float) -> StoredOperator:
    """The stored form of an operator with this certificate (DER)."""
    return StoredOperator(
        name=name,
        role=role,
        key_hash=key_hash(certificate),
        added=int(now),
        expires=int(expires_at(certificate)),
    )


def _revoked() -> PermissionDenied:
    return PermissionDenied(
        "the caller is no longer an operator of this cluster",
        hint="it was revoked, or its key was replaced",
        reason="OPERATOR_REVOKED",
    )
