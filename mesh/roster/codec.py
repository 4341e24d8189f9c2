"""Rosters as bytes: one canonical payload and strict parsing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from sealring.mesh.crypto.dsse import Ed25519Signer, parse_envelope, sign_envelope
from sealring.mesh.crypto.encoding import (
    Fields,
    FormatError,
    Json,
    canonical_json,
    field_names,
    parse_json_object,
)
from sealring.mesh.crypto.identity import PUBLIC_KEY_BYTES, SEALING_KEY_SIZES
from sealring.mesh.crypto.keys import KeyType
from sealring.mesh.crypto.suites import Suite, parse_suites
from sealring.mesh.errors import RosterError, SealringError
from sealring.mesh.names import check_deployment_name, check_name
from sealring.mesh.roster.model import (
    PIPELINE,
    TENSOR,
    Gateway,
    Revoked,
    Ring,
    RingMember,
    Roster,
    RosterMember,
    cluster_min_trust,
    ring_min_trust,
)
from sealring.mesh.roster.rules import check_lifetime, check_structure, check_trust
from sealring.mesh.trust.levels import MAX_SCORE, TrustLevel, parse_level

PAYLOAD_TYPE = "application/vnd.sealring.roster+json"
SPEC_VERSION = 1
MAX_MEMBERS = 1000
MAX_RINGS = 1000
BYTES_PER_HUNDRED = 64 << 10
HASH_BYTES = 32
_MAX_ADDRESSES = 8
MAX_COORDINATORS = 5
"""Four addresses of the coordinator, and its standby."""

_MAX_LAYERS = 10_000
_MAX_CONTEXT = 1 << 24
_FIELDS = tuple(name for name in field_names(Roster) if name != "hash")


def size_cap(members: int) -> int:
    """The largest payload of a roster with this many members, in bytes: 64 KiB per hundred begun."""
    return BYTES_PER_HUNDRED * (members // 100 + 1)


MAX_PAYLOAD_BYTES = size_cap(MAX_MEMBERS)


def sign_roster(roster: Roster, signers: Iterable[Ed25519Signer]) -> bytes:
    """Encode and sign a roster. A roster that no reader would take is not signed.

    Raises RosterError with the reason that a reader would give.
    """
    payload = encode_roster(roster)
    complete = parse_roster(payload)
    check_lifetime(complete.issued, complete.expires)
    check_structure(complete)
    check_trust(complete)
    return sign_envelope(PAYLOAD_TYPE, payload, signers)


def roster_hash(payload: bytes) -> bytes:
    """The hash by which rosters name each other and handshakes compare them: SHA-256 of the payload bytes."""
    return hashlib.sha256(payload).digest()


def issued_unverified(envelope: bytes) -> int:
    """The time at which a signed roster claims to be issued. Raises RosterError (ENVELOPE_*, ROSTER_*)."""
    opened = parse_envelope(envelope, payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES)
    return parse_roster(opened.payload).issued


def parse_roster(payload: bytes, *, ever: bool = False) -> Roster:
    """The roster of a payload whose signatures were verified: typed, its rules not yet checked.

    With `ever` it may be of protocol 10, which does not say since when members are `enrolled`: 0 then.

    Raises RosterError (ROSTER_MALFORMED, ROSTER_TYPE, ROSTER_TOO_LARGE, ROSTER_TRUST).
    """
    try:
        document = parse_json_object(payload, max_bytes=MAX_PAYLOAD_BYTES)
        spec_version = document.get("spec_version")
        if document.get("type") != "roster" or spec_version is True or spec_version != SPEC_VERSION:
            raise RosterError(
                "document is no roster of this specification",
                reason="ROSTER_TYPE",
                hint="run the same release everywhere",
            )
        fields = Fields(document, ("type", "spec_version", *_FIELDS))
        members = fields.items("members", max_items=MAX_MEMBERS)
        if len(payload) > size_cap(len(members)):
            raise RosterError("roster is too large for its members", reason="ROSTER_TOO_LARGE")
        return Roster(
            cluster=fields.text("cluster"),
            root_version=fields.integer("root_version", low=1),
            version=fields.integer("version", low=1),
            previous=fields.binary("previous", sizes=(HASH_BYTES,)),
            issued=fields.integer("issued"),
            expires=fields.integer("expires"),
            suites=parse_suites(_texts(fields, "suites", len(Suite))),
            trust_floor=fields.integer("trust_floor", high=MAX_SCORE),
            min_trust=fields.integer("min_trust", high=MAX_SCORE),
            members=tuple(_member(item, ever) for item in members),
            rings=tuple(_ring(item) for item in fields.items("rings", max_items=MAX_RINGS)),
            gateways=tuple(_gateway(item) for item in fields.items("gateways", max_items=100)),
            revoked=tuple(_revoked(item, ever) for item in fields.items("revoked", max_items=MAX_MEMBERS)),
            coordinators=tuple(_address(text) for text in _texts(fields, "coordinators", MAX_COORDINATORS)),
            hash=roster_hash(payload),
        )
    except RosterError:
        raise
    except (SealringError, ValueError) as error:  # FormatError, and an unknown key type
        raise RosterError(f"roster is malformed: {error}", reason="ROSTER_MALFORMED") from None


def encode_roster(roster: Roster) -> bytes:
    """The canonical payload of a roster. Raises RosterError (ROSTER_TOO_LARGE)."""
    content = {name: getattr(roster, name) for name in _FIELDS}
    content["rings"] = [
        _written(ring) | {"members": list(map(_written, ring.members))} for ring in roster.rings
    ]
    payload = canonical_json({"type": "roster", "spec_version": SPEC_VERSION, **content})
    most = size_cap(len(roster.members))
    if len(payload) > most or len(roster.rings) > MAX_RINGS:
        raise RosterError(
            f"the roster of {len(roster.members)} nodes and {len(roster.rings)} rings would have "
            f"{len(payload)} bytes, and no machine takes one of more than {most} bytes or {MAX_RINGS} rings",
            reason="ROSTER_TOO_LARGE",
            hint="end deployments, or have fewer rings; use X25519 sealing keys, and fewer addresses",
            size=len(payload),
            limit=most,
        )
    return payload


def _written(value: Ring | RingMember) -> dict[str, object]:
    """The fields that are written: releases that know no `prompts` read what has none."""
    names = field_names(Ring if isinstance(value, Ring) else RingMember)
    return {name: one for name in names if (one := getattr(value, name)) is not None}


def fits(roster: Roster) -> bool:
    """Whether readers would take a roster of this size."""
    try:
        encode_roster(roster)
    except RosterError:
        return False
    return True


def complete_roster(draft: Roster) -> Roster:
    """A draft with all entries sorted and every trust minimum computed, ready for `sign_roster`."""
    members = tuple(sorted(draft.members, key=lambda member: member.id))
    rings = tuple(
        replace(
            ring,
            members=tuple(sorted(ring.members, key=lambda member: member.rank)),
            min_trust=ring_min_trust(ring.members, members),
        )
        for ring in sorted(draft.rings, key=lambda ring: ring.id)
    )
    return replace(
        draft,
        members=members,
        rings=rings,
        min_trust=cluster_min_trust(rings, members),
        gateways=tuple(sorted(draft.gateways, key=lambda gateway: gateway.id)),
        revoked=tuple(sorted(draft.revoked, key=lambda entry: (entry.id, entry.enrolled))),
    )


def _member(item: Json, ever: bool) -> RosterMember:
    item = _since(item) if ever else item
    fields = Fields(item, field_names(RosterMember))
    return RosterMember(
        id=fields.text("id"),
        identity_key=fields.binary("identity_key", sizes=(PUBLIC_KEY_BYTES,)),
        key_type=KeyType(fields.text("key_type")),
        sealing_key=fields.binary("sealing_key", sizes=SEALING_KEY_SIZES),
        level=_level(fields.text("level")),
        trust=fields.integer("trust", high=MAX_SCORE),
        attestation_hash=fields.binary("attestation_hash", sizes=(HASH_BYTES,)),
        attested_at=fields.integer("attested_at"),
        challenged_at=fields.integer("challenged_at"),
        manifest_hash=fields.binary("manifest_hash", sizes=(HASH_BYTES,)),
        addresses=tuple(_address(text) for text in _texts(fields, "addresses", _MAX_ADDRESSES)),
        enrolled=fields.integer("enrolled"),
    )


def _ring(item: Json) -> Ring:
    fields = Fields(item, field_names(Ring))
    strategy = fields.text("strategy")
    if strategy not in (PIPELINE, TENSOR):
        raise FormatError("strategy is unknown")
    return Ring(
        id=check_name(fields.text("id"), "ring"),
        deployment=check_deployment_name(fields.text("deployment")),
        replica=fields.integer("replica", high=MAX_MEMBERS),
        model=fields.text("model"),
        model_digest=fields.binary("model_digest", sizes=(HASH_BYTES,)),
        strategy=strategy,
        context=fields.integer("context", low=1, high=_MAX_CONTEXT),
        total_layers=fields.integer("total_layers", low=1, high=_MAX_LAYERS),
        plan_hash=fields.binary("plan_hash", sizes=(HASH_BYTES,)),
        trust_floor=fields.integer("trust_floor", high=MAX_SCORE),
        min_trust=fields.integer("min_trust", high=MAX_SCORE),
        members=tuple(_ring_member(entry) for entry in fields.items("members", max_items=MAX_MEMBERS)),
    )


def _ring_member(item: Json) -> RingMember:
    cut = isinstance(item, dict) and "prompts" in item
    fields = Fields(item, field_names(RingMember) if cut else ("id", "rank", "layers"))
    layers = _range(fields, "layers")
    prompts = _range(fields, "prompts") if cut else None
    return RingMember(fields.text("id"), fields.integer("rank", high=MAX_MEMBERS), layers, prompts)


def _range(fields: Fields, name: str) -> tuple[int, int]:
    low, high = (
        edge.integer("item", high=_MAX_LAYERS) for edge in fields.each(name, min_items=2, max_items=2)
    )
    return low, high


def _gateway(item: Json) -> Gateway:
    fields = Fields(item, field_names(Gateway))
    return Gateway(fields.text("id"), fields.binary("identity_key", sizes=(PUBLIC_KEY_BYTES,)))


def _revoked(item: Json, ever: bool) -> Revoked:
    item = _since(item) if ever else item
    fields = Fields(item, field_names(Revoked))
    key = fields.binary("identity_key", sizes=(PUBLIC_KEY_BYTES,))
    return Revoked(fields.text("id"), key, fields.integer("enrolled"), fields.integer("at"))


def _since(item: Json) -> Json:
    return {"enrolled": 0, **item} if isinstance(item, dict) else item


def _level(name: str) -> TrustLevel:
    try:
        return parse_level(name)
    except SealringError:
        raise RosterError(
            "a trust level is unknown", reason="ROSTER_TRUST", hint="run the same release everywhere"
        ) from None


def _texts(fields: Fields, name: str, max_items: int) -> list[str]:
    return [one.text("item", max_length=260) for one in fields.each(name, max_items=max_items)]


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise FormatError("address is not host:port")
    return text
