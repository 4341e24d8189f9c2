"""Attestation: a member's statement about itself, signed by its identity key, and its verification.

The statement is canonical JSON. A fact that the machine does not know is null, never true. The verifier
derives the trust level from evidence; a member's own claims never raise it above the level that they can
prove.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from sealring.mesh.crypto.encoding import (
    Fields,
    FormatError,
    Json,
    JsonObject,
    canonical_json,
    field_names,
    pack_fields,
    parse_json_object,
)
from sealring.mesh.crypto.identity import PUBLIC_KEY_BYTES, SEALING_KEY_SIZES, Signer, verify
from sealring.mesh.crypto.keys import KeyType, Label
from sealring.mesh.errors import AttestationError, SealringError
from sealring.mesh.trust.apple import Device
from sealring.mesh.trust.levels import TrustLevel, ceiling

STATEMENT_VERSION = 1
MAX_STATEMENT_BYTES = 8192
NONCE_BYTES = 32
MAX_AGE_SECONDS = 120
"""Largest difference between the statement's clock and the verifier's, either way."""

MAX_MODELS = 8
_HASH_BYTES = 32
_MAX_TEXT = 128


@dataclass(frozen=True)
class Posture:
    """Facts about the machine; None for an unknown one."""

    hardware_model: str | None = None
    chip: str | None = None
    os_version: str | None = None
    boot_session: str | None = None
    serial: str | None = None
    sip: bool | None = None
    secure_boot: bool | None = None
    authenticated_root: bool | None = None
    filevault: bool | None = None

    @property
    def complete_and_good(self) -> bool:
        """Whether everything but the serial is known and every protection is on."""
        known = (self.hardware_model, self.chip, self.os_version, self.boot_session)
        protections = (self.sip, self.secure_boot, self.authenticated_root, self.filevault)
        return all(known) and all(protection is True for protection in protections)


UNKNOWN_POSTURE = Posture()
"""The posture of a machine that knows nothing about itself."""

_FLAGS = ("sip", "secure_boot", "authenticated_root", "filevault")
_NEVER_LOST = ("sip", "secure_boot")
"""Protections whose loss puts a member out; the loss of others lowers its level."""


@dataclass(frozen=True)
class Statement:
    """One attestation. `nonce` is the verifier's, `timestamp` in seconds since 1970.

    `manifest_hash` covers the installed software. `models` has, for each ring served, the digest of the model
    files as they are now. Together they are the runtime's manifest.
    """

    cluster: str
    nonce: bytes
    timestamp: int
    identity_key: bytes
    key_type: KeyType
    sealing_key: bytes
    manifest_hash: bytes
    posture: Posture = UNKNOWN_POSTURE
    models: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Expected:
    """The verifier's own knowledge, which the statement has to match."""

    cluster: str
    nonce: bytes
    identity_key: bytes
    key_type: str
    sealing_key: bytes


@dataclass(frozen=True)
class Verdict:
    """A verified statement, its bytes, and the trust that its evidence earns."""

    statement: Statement
    level: TrustLevel
    trust: int
    data: bytes


def encode_statement(statement: Statement) -> bytes:
    """The canonical bytes that the identity key signs."""
    return canonical_json({"type": "attestation", "version": STATEMENT_VERSION, **vars(statement)})


def decode_statement(data: bytes) -> Statement:
    """Parse strictly: one canonical encoding only. Raises AttestationError (STATEMENT_MALFORMED)."""
    try:
        document = Fields(
            parse_json_object(data, max_bytes=MAX_STATEMENT_BYTES),
            ("type", "version", *field_names(Statement)),
        )
        if document.text("type") != "attestation" or document.integer("version") != STATEMENT_VERSION:
            raise FormatError("it is of another type or version")
        statement = Statement(
            cluster=document.text("cluster", max_length=63),
            nonce=document.binary("nonce", sizes=(NONCE_BYTES,)),
            timestamp=document.integer("timestamp"),
            identity_key=document.binary("identity_key", sizes=(PUBLIC_KEY_BYTES,)),
            key_type=KeyType(document.text("key_type")),
            sealing_key=document.binary("sealing_key", sizes=SEALING_KEY_SIZES),
            manifest_hash=document.binary("manifest_hash", sizes=(_HASH_BYTES,)),
            models=tuple(
                one.binary("item", sizes=(_HASH_BYTES,))
                for one in document.each("models", max_items=MAX_MODELS)
            ),
            posture=_posture(parse_json_object(data, max_bytes=MAX_STATEMENT_BYTES)["posture"]),
        )
        if encode_statement(statement) != data:
            raise FormatError("it is not in canonical form")
    except ValueError as error:  # FormatError, and an unknown key type
        raise AttestationError(
            f"attestation statement is malformed: {error}", reason="STATEMENT_MALFORMED"
        ) from None
    return statement


def sign_statement(
    signer: Signer, statement: Statement, label: Label = Label.ATTESTATION
) -> tuple[bytes, bytes]:
    """The encoded statement and the identity key's signature; an answer to a challenge has another label."""
    data = encode_statement(statement)
    return data, signer.sign(label, data)


def verify_statement(
    data: bytes,
    signature: bytes,
    expected: Expected,
    *,
    now: float | None,
    label: Label = Label.ATTESTATION,
    device: Device | None = None,
) -> Verdict:
    """Check signature, agreement with `expected`, and freshness; then derive the level.

    `now`: unix seconds; None where the nonce was drawn for this statement alone and is used once. That proves
    freshness by itself (RFC 9334, section 10.2), so a machine whose clock is wrong can answer. `device` is
    the identity key's machine according to a verified chain. Raises AttestationError
    (STATEMENT_SIGNATURE, STATEMENT_MALFORMED, STATEMENT_MISMATCH, STATEMENT_STALE, STATEMENT_FROM_FUTURE).
    """
    if len(data) > MAX_STATEMENT_BYTES:
        raise AttestationError("attestation statement is too large", reason="STATEMENT_MALFORMED")
    try:
        verify(expected.identity_key, label, data, signature)
    except SealringError:
        raise AttestationError(
            "attestation is not signed by the identity key", reason="STATEMENT_SIGNATURE"
        ) from None
    statement = decode_statement(data)
    agrees = (
        statement.cluster == expected.cluster
        and hmac.compare_digest(statement.nonce, expected.nonce)
        and statement.identity_key == expected.identity_key
        and statement.key_type == expected.key_type
        and statement.sealing_key == expected.sealing_key
    )
    if not agrees:
        raise AttestationError("attestation is about something else", reason="STATEMENT_MISMATCH")
    ahead = 0.0 if now is None else statement.timestamp - now
    if ahead > MAX_AGE_SECONDS:
        raise AttestationError(
            "attestation is from the future", reason="STATEMENT_FROM_FUTURE", hint="compare the clocks"
        )
    if ahead < -MAX_AGE_SECONDS:
        raise AttestationError("attestation is stale", reason="STATEMENT_STALE", hint="compare the clocks")
    level = derive_level(statement, device)
    return Verdict(statement, level, ceiling(level, statement.key_type), data)


def derive_level(statement: Statement, device: Device | None = None) -> TrustLevel:
    """The level that a verified, fresh statement earns; `device` comes from a verified chain.

    Each level includes the requirements of the one below. Without a chain the level is `self_signed` at most,
    since kind of key and posture are the member's own claims. A chain counts only for a claimed key in the
    enclave, on the machine with the statement's serial number.
    """
    if statement.key_type is not KeyType.SECURE_ENCLAVE or not statement.posture.complete_and_good:
        return TrustLevel.SOFTWARE
    if device is None or statement.posture.serial is None or device.serial != statement.posture.serial:
        return TrustLevel.SELF_SIGNED
    return TrustLevel.HARDWARE


def check_continuity(before: Statement, after: Statement) -> None:
    """Require that a machine has lost no protection, and that its process still runs the same software.

    Every start makes a new sealing key; with another key, the machine may have been updated meanwhile.

    Raises AttestationError (PROTECTION_LOST, MANIFEST_CHANGED; PROTECTION_UNKNOWN for a protection that was
    on and could not be measured this time).
    """
    was_on = [name for name in _NEVER_LOST if getattr(before.posture, name) is True]
    for name in was_on:
        if getattr(after.posture, name) is False:
            raise AttestationError(f"the machine has lost {name}", reason="PROTECTION_LOST", protection=name)
    if after.sealing_key == before.sealing_key and after.manifest_hash != before.manifest_hash:
        raise AttestationError(
            "the installed software has changed under the running node", reason="MANIFEST_CHANGED"
        )
    for name in was_on:
        if getattr(after.posture, name) is None:
            raise AttestationError(
                f"the machine does not know its {name}", reason="PROTECTION_UNKNOWN", protection=name
            )


def has_forgotten(before: Statement, after: Statement) -> bool:
    """Whether a fact that was known, or a protection that was on, could not be measured this time."""
    return any(
        getattr(before.posture, name) and getattr(after.posture, name) is None
        for name in field_names(Posture)
    )


def sign_sealing_key(signer: Signer, cluster: str, sealing_key: bytes) -> bytes:
    """The signature for `Hello`: binds a fresh sealing key to the identity between two attestations."""
    return signer.sign(Label.ATTESTATION, _sealing_content(cluster, sealing_key))


def verify_sealing_key(identity_key: bytes, cluster: str, sealing_key: bytes, signature: bytes) -> None:
    """Raises AttestationError (SEALING_KEY_SIGNATURE)."""
    try:
        if len(sealing_key) not in SEALING_KEY_SIZES:
            raise AttestationError("sealing key has a wrong length", reason="SEALING_KEY_SIGNATURE")
        verify(identity_key, Label.ATTESTATION, _sealing_content(cluster, sealing_key), signature)
    except SealringError:
        raise AttestationError(
            "sealing key is not signed by the identity key", reason="SEALING_KEY_SIGNATURE"
        ) from None


def _sealing_content(cluster: str, sealing_key: bytes) -> bytes:
    """The signed bytes, which are never a statement: those begin with a brace."""
    return pack_fields(b"sealring sealing key v1", cluster.encode(), sealing_key)


def _posture(value: Json) -> Posture:
    names = field_names(Posture)
    document = Fields(value, names)
    known: JsonObject = value if isinstance(value, dict) else {}
    values: dict[str, str | bool | None] = {}
    for name in names:
        if known[name] is None:
            values[name] = None
        elif name in _FLAGS:
            values[name] = _flag(known[name])
        else:
            values[name] = document.text(name, max_length=_MAX_TEXT)
    return Posture(**values)  # type: ignore[arg-type]  # each was read by the type of its name above


def _flag(value: Json) -> bool:
    if not isinstance(value, bool):
        raise FormatError("a posture flag is neither true, false nor null")
    return value
