"""Admits machines to the cluster: checks what a join brings, and spends its token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sealring.coordinator.members.evidence import Verifier
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.store import Store, StoredMember
from sealring.mesh.clock import Clock
from sealring.mesh.crypto.encoding import FormatError, decode_base32
from sealring.mesh.crypto.identity import (
    MAX_SIGNATURE_BYTES,
    PUBLIC_KEY_BYTES,
    SEALING_KEY_SIZES,
    member_id,
    verify,
)
from sealring.mesh.crypto.keys import KeyType, Label
from sealring.mesh.errors import InvalidInput, PermissionDenied
from sealring.mesh.member.bootstrap import TOKEN_SECRET_BYTES
from sealring.mesh.member.enrolment import join_content
from sealring.mesh.names import check_name
from sealring.mesh.pki.authority import MAX_CSR_BYTES
from sealring.mesh.pki.certificates import ROLES, Role
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.trust.apple import MAX_CERTIFICATE_BYTES, MAX_CHAIN
from sealring.mesh.trust.attestation import MAX_STATEMENT_BYTES, NONCE_BYTES
from sealring.mesh.trust.levels import TrustLevel
from sealring.v1 import membership_pb2

MAX_ADDRESSES = 8


class Enrolment:
    """Decides on joins."""

    def __init__(
        self, cluster: str, store: Store, publisher: RosterPublisher, verifier: Verifier, *, clock: Clock
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._publisher = publisher
        self._verifier = verifier
        self._clock = clock

    def holds_token(self, request: membership_pb2.EnrolRequest) -> bool:
        """Whether a request holds a token that is still valid."""
        try:
            secret = decode_base32(request.token_secret, size=TOKEN_SECRET_BYTES)
        except FormatError:
            secret = b""
        return self._store.tokens.holds(request.token_id, secret, now=self._clock())

    def admit(self, request: membership_pb2.EnrolRequest, role: Role) -> StoredMember:
        """The member that a request describes, once everything but its token is checked.

        Raises PermissionDenied (BANNED, OTHER_ROLE), Unauthenticated (BAD_SIGNATURE), AttestationError.
        """
        content = join_content(self._cluster, request)
        verify(request.identity_key, Label.JOIN, content, request.signature)
        identifier = member_id(request.identity_key)
        if self._store.members.banned(identifier):
            raise refused("BANNED", "this identity is banned from the cluster")
        known = self._store.members.find(identifier)
        if known is not None and known.role != role:
            raise refused("OTHER_ROLE", f"this identity is enrolled as a {known.role}")
        now = int(self._clock())
        name = self._free_name(request.name, role, identifier)
        member = StoredMember(
            id=identifier,
            role=role,
            name=name,
            identity_key=request.identity_key,
            key_type=request.key_type,
            enrolled_at=now,
            level=TrustLevel.NONE,
        )
        if role is Role.MEMBER:
            verdict = self._verifier.judge_join(request, now)
            member.level, member.trust = verdict.level, verdict.trust
            member.manifest_hash = verdict.statement.manifest_hash
            member.attestation = member.evidence = request.attestation
            member.attested_at = member.challenged_at = now
            member.sealing_key = request.sealing_key
            member.addresses[:], member.device_chain[:] = request.addresses, request.device_chain
        return member

    def _free_name(self, wanted: str, role: Role, identifier: str) -> str:
        """The name that the machine asks for, with a number if another one of its role has it."""
        taken = {one.name for one in self._store.members.all(role) if one.id != identifier}
        numbered = (f"{wanted[: 62 - len(str(number))]}-{number}" for number in itertools.count(2))
        return next(name for name in itertools.chain([wanted], numbered) if name not in taken)

    def spend(self, request: membership_pb2.EnrolRequest, role: Role, member: StoredMember) -> None:
        """Stores token, member, audit entry and roster, all or none. Raises PermissionDenied (TOKEN)."""
        # The token is spent last: a join that fails for another reason leaves it usable.
        secret = _secret(request.token_secret)
        with self._publisher.change(grows=True):
            now = self._clock()
            if not self._store.tokens.spend(request.token_id, secret, role, now=now):
                raise refused("TOKEN", "the token is of another role", f"make one for a {role}")
            self._store.members.enrol(member)
            self._store.audit.append(
                now,
                member.id,
                "enrol",
                member.id,
                {"role": role, "name": member.name, "level": member.level, "token_id": request.token_id},
            )


def check_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    """A daemon's addresses, bounded. Raises InvalidInput (BAD_ADDRESS)."""
    if not 1 <= len(addresses) <= MAX_ADDRESSES:
        raise InvalidInput(f"addresses are not 1 to {MAX_ADDRESSES}", reason="BAD_ADDRESS", param="addresses")
    for address in addresses:
        try:
            port = parse_address(address)[1]
        except InvalidInput as error:
            error.metadata["param"] = "addresses"
            raise
        if port == 0:
            raise InvalidInput("address has port 0", reason="BAD_ADDRESS", param="addresses")
    return tuple(addresses)


def check_form(request: membership_pb2.EnrolRequest) -> Role:
    """The role that a request asks for, once its fields have their sizes. Raises InvalidInput (BAD_JOIN)."""
    role = ROLES.get(request.role)
    if role is None:
        raise _malformed("role")
    sizes = (
        ("token_id", len(request.token_id), 1, 64),
        ("token_secret", len(request.token_secret), 1, 128),
        ("identity_key", len(request.identity_key), PUBLIC_KEY_BYTES, PUBLIC_KEY_BYTES),
        ("csr", len(request.csr), 1, MAX_CSR_BYTES),
        ("nonce", len(request.nonce), NONCE_BYTES, NONCE_BYTES),
        ("signature", len(request.signature), 1, MAX_SIGNATURE_BYTES),
        ("attestation", len(request.attestation), 0, MAX_STATEMENT_BYTES),
        ("attestation_signature", len(request.attestation_signature), 0, MAX_SIGNATURE_BYTES),
    )
    for param, size, low, high in sizes:
        if not low <= size <= high:
            raise _malformed(param)
    if request.key_type not in set(KeyType):
        raise _malformed("key_type")
    check_name(request.name, "name")
    if len(request.device_chain) > MAX_CHAIN or any(
        len(der) > MAX_CERTIFICATE_BYTES for der in request.device_chain
    ):
        raise _malformed("device_chain")
    if role is Role.MEMBER:
        check_addresses(request.addresses)
        if len(request.sealing_key) not in SEALING_KEY_SIZES:
            raise _malformed("sealing_key")
    elif request.addresses or request.sealing_key or request.attestation or request.device_chain:
        raise _malformed("sealing_key")
    return role


def _secret(text: str) -> bytes:
    try:
        return decode_base32(text, size=TOKEN_SECRET_BYTES)
    except FormatError:
        raise refused("TOKEN", "the token's secret is malformed") from None


def _malformed(param: str) -> InvalidInput:
    return InvalidInput(
        f"field {param} of the join is missing or has a wrong length",
        hint="run the same release everywhere",
        reason="BAD_JOIN",
        param=param,
    )


def refused(check: str, what: str, hint: str = "") -> PermissionDenied:
    """The error of a check that failed: its name as the reason."""
    return PermissionDenied(what, hint=hint, reason=check)
