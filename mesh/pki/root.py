"""Root metadata: a cluster's roster keys and certificate authorities, signed by its root keys.

The chain of root metadata starts at the version whose root keys hash to the pinned fingerprint. Every later
version is signed by a threshold of the keys before it and of its own, as in TUF (specification 5.3).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sealring.mesh.clock import SKEW_SECONDS
from sealring.mesh.crypto.dsse import (
    KEY_BYTES,
    Ed25519Signer,
    SignedEnvelope,
    check_threshold,
    encode_envelope,
    key_id,
    parse_envelope,
    sign_envelope,
)
from sealring.mesh.crypto.encoding import (
    Fields,
    FormatError,
    canonical_json,
    field_names,
    pack_fields,
    parse_json_object,
    unpack_fields,
)
from sealring.mesh.errors import CertificateError, InvalidInput, RosterError
from sealring.mesh.names import check_name
from sealring.mesh.pki.certificates import expires_at, load_certificate

PAYLOAD_TYPE = "application/vnd.sealring.root+json"
SPEC_VERSION = 1
MAX_PAYLOAD_BYTES = 32 << 10
MAX_CHAIN_LENGTH = 16
MAX_CHAIN_BYTES = 64 << 10
_MAX_KEYS = 16
_SOON_SECONDS = 365 * 24 * 3600
_MAX_AUTHORITIES = 4
_MAX_CERTIFICATE_BYTES = 4096


@dataclass(frozen=True)
class RootMetadata:
    """A version of root metadata. Keys are Ed25519 (32 bytes), authorities DER, times seconds since 1970.

    `chain` holds every envelope from the pinned version to this one; it is empty in a draft not yet signed.
    """

    cluster: str
    version: int
    root_keys: tuple[bytes, ...]
    root_threshold: int
    roster_keys: tuple[bytes, ...]
    roster_threshold: int
    authorities: tuple[bytes, ...]
    issued: int
    expires: int
    chain: tuple[bytes, ...] = ()

    @property
    def fingerprint(self) -> bytes:
        """The pin of this version's root keys."""
        return root_fingerprint(self.root_keys, self.root_threshold)

    @property
    def ends(self) -> float:
        """When this version or the first of its authorities expires, and with it the cluster."""
        return min(self.expires, *map(expires_at, self.authorities))

    def ends_soon(self, now: float) -> bool:
        """Whether it is time to sign a newer version: a quarter of its life is left, at most a year."""
        return now > self.ends - min((self.ends - self.issued) / 4, _SOON_SECONDS)


_FIELDS = tuple(name for name in field_names(RootMetadata) if name != "chain")


def root_fingerprint(root_keys: Sequence[bytes], threshold: int) -> bytes:
    """The pin in a join token: SHA-256 of the only root key, or of threshold and sorted keys.

    A pin on several keys covers the threshold, so that one stolen key is not enough.
    """
    if len(root_keys) == 1:
        return hashlib.sha256(root_keys[0]).digest()
    parts = b"".join(sorted(root_keys))
    return hashlib.sha256(b"sealring/v1 root set\x00" + struct.pack(">I", threshold) + parts).digest()


def sign_root(
    draft: RootMetadata, signers: Iterable[Ed25519Signer], *, previous: RootMetadata | None = None
) -> RootMetadata:
    """Sign a version of the root metadata and append it to the chain of `previous`.

    Raises RosterError if the result would not verify (threshold, version, cluster, key rules).
    """
    envelope = sign_envelope(PAYLOAD_TYPE, _encode(draft), signers)
    return follow_root(envelope, previous)


def draft_root(draft: RootMetadata) -> bytes:
    """A version without signatures, as an envelope that travels from one key holder to the next."""
    return encode_envelope(SignedEnvelope(PAYLOAD_TYPE, _encode(draft), ()))


def read_root_draft(envelope: bytes) -> tuple[RootMetadata, tuple[str, ...]]:
    """The content of an envelope, fully signed or not, and the ids of its signing keys; unverified.

    Raises RosterError (ENVELOPE_*, ROOT_MALFORMED).
    """
    opened = _open_draft(envelope)
    return _decode(opened.payload), tuple(name for name, _ in opened.signatures)


def cosign_root(envelope: bytes, signer: Ed25519Signer) -> bytes:
    """The envelope with one more signature over the same bytes. Raises as `read_root_draft`."""
    opened = _open_draft(envelope)
    _decode(opened.payload)
    signatures = dict(opened.signatures)
    signatures[key_id(signer.public_key)] = signer.sign(opened.pae)
    return encode_envelope(replace(opened, signatures=tuple(sorted(signatures.items()))))


def _open_draft(envelope: bytes) -> SignedEnvelope:
    return parse_envelope(
        envelope, payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES, min_signatures=0
    )


def follow_root(envelope: bytes, previous: RootMetadata | None) -> RootMetadata:
    """Verify one envelope: by its own keys, and as the successor of `previous` if there is one.

    Times are not checked here. Raises RosterError (ENVELOPE_*, THRESHOLD_NOT_MET, ROOT_MALFORMED,
    ROOT_VERSION, ROOT_CLUSTER).
    """
    opened = parse_envelope(envelope, payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES)
    if previous is not None:
        check_threshold(opened, previous.root_keys, previous.root_threshold)
    root = _decode(opened.payload)
    check_threshold(opened, root.root_keys, root.root_threshold)
    if previous is None:
        return replace(root, chain=(envelope,))
    if root.cluster != previous.cluster:
        raise RosterError("root metadata is of another cluster", reason="ROOT_CLUSTER")
    if root.version != previous.version + 1:
        raise RosterError("root metadata is not the next version", reason="ROOT_VERSION")
    return replace(root, chain=(*previous.chain, envelope))


def verify_root_chain(envelopes: Sequence[bytes], fingerprint: bytes, *, now: float) -> RootMetadata:
    """The newest root metadata of a chain whose first link has the pinned root keys, if it is valid now.

    Raises as `follow_chain`, and RosterError (ROOT_EXPIRED, ROOT_NOT_YET_VALID).
    """
    root = follow_chain(envelopes, fingerprint)
    check_root_times(root, now=now)
    return root


def follow_chain(envelopes: Sequence[bytes], fingerprint: bytes) -> RootMetadata:
    """`verify_root_chain` without its check of times, for machines that were off while the root expired.

    Raises RosterError (ROOT_CHAIN_LENGTH, ROOT_PIN, and those of `follow_root`).
    """
    if not 1 <= len(envelopes) <= MAX_CHAIN_LENGTH:
        raise RosterError("root metadata chain has a wrong length", reason="ROOT_CHAIN_LENGTH")
    root = follow_root(envelopes[0], None)
    if root.fingerprint != fingerprint:
        raise RosterError(
            "root keys are not the pinned ones",
            reason="ROOT_PIN",
            hint="the address belongs to another cluster, or someone is on the path",
        )
    for envelope in envelopes[1:]:
        root = follow_root(envelope, root)
    return root


def check_root_times(root: RootMetadata, *, now: float) -> None:
    """Require that the root metadata is valid now. Raises RosterError (ROOT_EXPIRED, ROOT_NOT_YET_VALID)."""
    if now < root.issued - SKEW_SECONDS:
        ahead = f"{math.ceil((root.issued - now) / 60):,} minutes"
        raise RosterError(
            f"root metadata is from the future: it was signed {ahead} after the time of this clock",
            reason="ROOT_NOT_YET_VALID",
            hint="compare the clocks of this machine and of the one that made the cluster",
        )
    if now >= root.expires + SKEW_SECONDS:
        raise RosterError(
            "root metadata has expired", reason="ROOT_EXPIRED", hint="sign a new version with the root key"
        )


def encode_chain(envelopes: Sequence[bytes]) -> bytes:
    """A chain as one byte string: each envelope behind its length (4 bytes, big endian)."""
    data = pack_fields(*envelopes)
    if len(envelopes) > MAX_CHAIN_LENGTH or len(data) > MAX_CHAIN_BYTES:
        raise RosterError(
            "root metadata chain is too long",
            reason="ROOT_CHAIN_LENGTH",
            hint="start a new pin at a newer version",
        )
    return data


def decode_chain(data: bytes) -> list[bytes]:
    """The inverse of `encode_chain`. Raises RosterError (ROOT_CHAIN_LENGTH, ROOT_MALFORMED)."""
    if len(data) > MAX_CHAIN_BYTES:
        raise RosterError("root metadata chain is too long", reason="ROOT_CHAIN_LENGTH")
    try:
        envelopes = unpack_fields(data, max_bytes=MAX_CHAIN_BYTES)
        if len(envelopes) > MAX_CHAIN_LENGTH:
            raise FormatError("it has too many links")
        return envelopes
    except FormatError as error:
        raise RosterError(f"root metadata chain is malformed: {error}", reason="ROOT_MALFORMED") from None


def _encode(root: RootMetadata) -> bytes:
    content = {name: getattr(root, name) for name in _FIELDS}
    return canonical_json({"type": "root", "spec_version": SPEC_VERSION, **content})


def _decode(payload: bytes) -> RootMetadata:
    try:
        fields = Fields(
            parse_json_object(payload, max_bytes=MAX_PAYLOAD_BYTES), ("type", "spec_version", *_FIELDS)
        )
        if fields.text("type") != "root" or fields.integer("spec_version") != SPEC_VERSION:
            raise FormatError("it is of another type or version")
        root = RootMetadata(
            cluster=check_name(fields.text("cluster"), "cluster"),
            version=fields.integer("version", low=1),
            root_keys=_keys(fields, "root_keys"),
            root_threshold=fields.integer("root_threshold", low=1, high=_MAX_KEYS),
            roster_keys=_keys(fields, "roster_keys"),
            roster_threshold=fields.integer("roster_threshold", low=1, high=_MAX_KEYS),
            authorities=_authorities(fields),
            issued=fields.integer("issued"),
            expires=fields.integer("expires"),
        )
        _check_consistent(root)
    except (FormatError, InvalidInput, CertificateError) as error:
        raise RosterError(f"root metadata is malformed: {error}", reason="ROOT_MALFORMED") from None
    return root


def _check_consistent(root: RootMetadata) -> None:
    if root.root_threshold > len(root.root_keys) or root.roster_threshold > len(root.roster_keys):
        raise FormatError("a threshold is above the number of keys")
    if set(root.root_keys) & set(root.roster_keys):
        raise FormatError("a key is both root and roster key")
    if root.expires <= root.issued:
        raise FormatError("it expires before it is issued")


def _keys(fields: Fields, name: str) -> tuple[bytes, ...]:
    found = fields.each(name, min_items=1, max_items=_MAX_KEYS)
    keys = tuple(one.binary("item", sizes=(KEY_BYTES,)) for one in found)
    if len(set(keys)) != len(keys):
        raise FormatError(f"field {name} has a key twice")
    return keys


def _authorities(fields: Fields) -> tuple[bytes, ...]:
    found = fields.each("authorities", min_items=1, max_items=_MAX_AUTHORITIES)
    authorities = tuple(one.blob("item", max_bytes=_MAX_CERTIFICATE_BYTES) for one in found)
    for der in authorities:
        load_certificate(der)
    return authorities
