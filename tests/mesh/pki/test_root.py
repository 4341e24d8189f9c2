"""Root metadata: the pin, the chain, and what rotation demands."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.crypto import (
    Ed25519Signer,
    SignedEnvelope,
    canonical_json,
    encode_envelope,
    key_id,
    parse_envelope,
    sign_envelope,
)
from sealring.mesh.errors import RosterError
from sealring.mesh.pki import (
    MAX_CHAIN_BYTES,
    MAX_CHAIN_LENGTH,
    MAX_PAYLOAD_BYTES,
    PAYLOAD_TYPE,
    LeafKey,
    PeerIdentity,
    Role,
    RootMetadata,
    check_root_times,
    cosign_root,
    decode_chain,
    draft_root,
    encode_chain,
    expires_at,
    follow_root,
    read_root_draft,
    root_fingerprint,
    sign_root,
    verify_root_chain,
)

NOW = 1_800_000_000


def refusal(action: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(RosterError) as error:
        action(*arguments, **options)
    return error.value.reason


def successor(root: RootMetadata, **changes: Any) -> RootMetadata:
    return dataclasses.replace(root, **{"version": root.version + 1, "chain": (), **changes})


def test_the_fingerprint_of_one_key_is_its_hash_and_of_several_covers_the_threshold() -> None:
    keys = [Ed25519Signer.generate().public_key for _ in range(3)]
    assert root_fingerprint(keys[:1], 1) == hashlib.sha256(keys[0]).digest()
    assert root_fingerprint(keys, 2) == root_fingerprint(keys[::-1], 2)
    assert root_fingerprint(keys, 2) != root_fingerprint(keys, 1)
    assert root_fingerprint(keys[:2], 2) != root_fingerprint(keys, 2)


def test_a_chain_of_rotations(make_authority: Callable[..., Any]) -> None:
    first = make_authority(roots=3, root_threshold=2)
    fresh = [Ed25519Signer.generate() for _ in range(2)]
    keys = tuple(signer.public_key for signer in fresh)
    draft = successor(first.root, root_keys=keys, root_threshold=2)
    second = sign_root(draft, [*first.root_signers[:2], *fresh], previous=first.root)
    third = sign_root(successor(second), fresh, previous=second)
    assert len(third.chain) == 3
    pin = first.root.fingerprint
    assert verify_root_chain(third.chain, pin, now=NOW) == third
    assert verify_root_chain(third.chain[1:], second.fingerprint, now=NOW).version == 3
    assert (
        verify_root_chain(decode_chain(encode_chain(third.chain)), first.root.fingerprint, now=NOW) == third
    )
    assert refusal(verify_root_chain, third.chain, bytes(32), now=NOW) == "ROOT_PIN"
    assert refusal(verify_root_chain, third.chain[::2], pin, now=NOW) == "THRESHOLD_NOT_MET"


def test_rotation_needs_a_threshold_of_old_and_new(make_authority: Callable[..., Any]) -> None:
    authority = make_authority(roots=3, root_threshold=2)
    old, fresh = authority.root_signers, [Ed25519Signer.generate() for _ in range(2)]
    draft = successor(
        authority.root, root_keys=tuple(signer.public_key for signer in fresh), root_threshold=2
    )
    for signers in (old, fresh, [*old[:1], *fresh], [*old, *fresh[:1]]):
        assert refusal(sign_root, draft, signers, previous=authority.root) == "THRESHOLD_NOT_MET"
    sign_root(draft, [*old[:2], *fresh], previous=authority.root)


def test_versions_go_up_by_one_within_one_cluster(authority: Any) -> None:
    signers = authority.root_signers
    for version in (1, 3):
        draft = successor(authority.root, version=version)
        assert refusal(sign_root, draft, signers, previous=authority.root) == "ROOT_VERSION"
    draft = successor(authority.root, cluster="other")
    assert refusal(sign_root, draft, signers, previous=authority.root) == "ROOT_CLUSTER"


def test_times(authority: Any) -> None:
    root = authority.root
    for now in (root.issued - 60, root.expires + 59):
        check_root_times(root, now=now)
    assert refusal(check_root_times, root, now=root.issued - 61) == "ROOT_NOT_YET_VALID"
    with pytest.raises(RosterError, match=r"signed 2 minutes after .*clocks"):
        check_root_times(root, now=root.issued - 61)
    assert refusal(check_root_times, root, now=root.expires + 60) == "ROOT_EXPIRED"
    assert refusal(verify_root_chain, root.chain, root.fingerprint, now=root.expires + 60) == "ROOT_EXPIRED"


def test_only_the_last_of_a_chain_has_to_be_alive(authority: Any) -> None:
    old = sign_root(
        dataclasses.replace(authority.root, issued=NOW - 900, expires=NOW - 800, chain=()),
        authority.root_signers,
    )
    new = sign_root(successor(old, issued=NOW, expires=NOW + 900), authority.root_signers, previous=old)
    assert verify_root_chain(new.chain, old.fingerprint, now=NOW) == new


def test_chain_bounds(authority: Any) -> None:
    envelope = authority.root.chain[0]
    assert refusal(verify_root_chain, [], bytes(32), now=NOW) == "ROOT_CHAIN_LENGTH"
    too_many = [envelope] * (MAX_CHAIN_LENGTH + 1)
    assert refusal(verify_root_chain, too_many, authority.root.fingerprint, now=NOW) == "ROOT_CHAIN_LENGTH"
    assert refusal(encode_chain, too_many) == "ROOT_CHAIN_LENGTH"
    assert refusal(encode_chain, [bytes(MAX_CHAIN_BYTES - 3)]) == "ROOT_CHAIN_LENGTH"
    largest = [bytes(MAX_CHAIN_BYTES - 4)]
    assert decode_chain(encode_chain(largest)) == largest
    assert encode_chain([envelope] * MAX_CHAIN_LENGTH)
    assert refusal(decode_chain, bytes(MAX_CHAIN_BYTES + 1)) == "ROOT_CHAIN_LENGTH"
    assert refusal(decode_chain, bytes(4) * (MAX_CHAIN_LENGTH + 1)) == "ROOT_MALFORMED"
    assert len(decode_chain(bytes(4) * MAX_CHAIN_LENGTH)) == MAX_CHAIN_LENGTH


@given(st.lists(st.binary(max_size=30), max_size=5))
def test_chain_round_trip(envelopes: list[bytes]) -> None:
    data = encode_chain(envelopes)
    assert decode_chain(data) == envelopes
    for cut in range(len(data)):
        try:
            part = decode_chain(data[:cut])
        except RosterError:
            continue
        assert part == envelopes[: len(part)]


def edited(authority: Any, change: Callable[[dict[str, Any]], object]) -> bytes:
    opened = parse_envelope(authority.root.chain[0], payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES)
    document = json.loads(opened.payload)
    change(document)
    return sign_envelope(PAYLOAD_TYPE, canonical_json(document), authority.root_signers)


MALFORMED: list[Callable[[dict[str, Any]], object]] = [
    lambda d: d.update(extra=1),
    lambda d: d.pop("issued"),
    lambda d: d.update(type="roster"),
    lambda d: d.update(spec_version=2),
    lambda d: d.update(spec_version=True),
    lambda d: d.update(cluster="Demo"),
    lambda d: d.update(version=0),
    lambda d: d.update(root_threshold=0),
    lambda d: d.update(root_threshold=2),
    lambda d: d.update(roster_threshold=0),
    lambda d: d.update(roster_threshold=2),
    lambda d: d.update(root_keys=[]),
    lambda d: d.update(root_keys=d["root_keys"] * 2),
    lambda d: d.update(root_keys=["AAAA"]),
    lambda d: d.update(root_keys=[None]),
    lambda d: d.update(roster_keys=d["root_keys"]),
    lambda d: d.update(roster_keys=[]),
    lambda d: d.update(authorities=[]),
    lambda d: d.update(authorities=["AAAA"]),
    lambda d: d.update(authorities=d["authorities"] * 5),
    lambda d: d.update(expires=d["issued"]),
    lambda d: d.update(issued=-1),
]


@pytest.mark.parametrize("index", range(len(MALFORMED)))
def test_malformed_roots(authority: Any, index: int) -> None:
    assert refusal(follow_root, edited(authority, MALFORMED[index]), None) == "ROOT_MALFORMED"


def test_a_root_signed_by_other_keys_or_as_something_else(authority: Any) -> None:
    draft = dataclasses.replace(authority.root, chain=())
    assert refusal(sign_root, draft, [Ed25519Signer.generate()]) == "THRESHOLD_NOT_MET"
    opened = parse_envelope(authority.root.chain[0], payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES)
    as_roster = sign_envelope("application/x", opened.payload, authority.root_signers)
    assert refusal(follow_root, as_roster, None) == "ENVELOPE_TYPE"
    other = parse_envelope(as_roster, payload_type="application/x", max_payload=MAX_PAYLOAD_BYTES)
    renamed = encode_envelope(dataclasses.replace(other, payload_type=PAYLOAD_TYPE))
    assert refusal(follow_root, renamed, None) == "BAD_SIGNATURE"


def test_a_chain_may_be_as_long_as_its_limit(authority: Any) -> None:
    root = authority.root
    while len(root.chain) < MAX_CHAIN_LENGTH:
        draft = dataclasses.replace(root, version=root.version + 1, chain=())
        root = sign_root(draft, authority.root_signers, previous=root)
    assert (
        verify_root_chain(decode_chain(encode_chain(root.chain)), authority.root.fingerprint, now=NOW) == root
    )


def test_a_draft_travels_unsigned_and_gathers_signatures(make_authority: Callable[..., Any]) -> None:
    authority = make_authority(roots=2, root_threshold=2)
    root = dataclasses.replace(authority.root, chain=())
    draft = draft_root(root)
    assert read_root_draft(draft) == (root, ())
    for number, signer in enumerate(authority.root_signers, 1):
        assert refusal(follow_root, draft, None) in ("ENVELOPE_MALFORMED", "THRESHOLD_NOT_MET")
        draft = cosign_root(draft, signer)
        assert len(read_root_draft(draft)[1]) == number
    assert cosign_root(draft, authority.root_signers[0]) == draft, "one signature per key"
    assert set(read_root_draft(draft)[1]) == {key_id(key) for key in root.root_keys}
    assert follow_root(draft, None) == dataclasses.replace(root, chain=(draft,))


@pytest.mark.parametrize("payload", [b"", b"{}", b"junk", canonical_json({"type": "roster"})])
def test_nobody_signs_what_is_no_root_metadata(payload: bytes) -> None:
    """A holder's key would otherwise sign anything that it is handed."""
    envelope = encode_envelope(SignedEnvelope(PAYLOAD_TYPE, payload, ()))
    signer = Ed25519Signer.generate()
    assert refusal(cosign_root, envelope, signer) in ("ROOT_MALFORMED", "ENVELOPE_MALFORMED")
    assert refusal(read_root_draft, envelope) in ("ROOT_MALFORMED", "ENVELOPE_MALFORMED")
    other = encode_envelope(SignedEnvelope("application/vnd.sealring.roster+json", payload or b"x", ()))
    assert refusal(cosign_root, other, signer) == "ENVELOPE_TYPE"


def drafted(root: RootMetadata, **changes: Any) -> RootMetadata:
    """The metadata with these changes, as its signers read it."""
    return read_root_draft(draft_root(dataclasses.replace(root, chain=(), **changes)))[0]


def test_keys_and_thresholds_have_bounds(authority: Any) -> None:
    keys = tuple(Ed25519Signer.generate().public_key for _ in range(17))
    for kind in ("root", "roster"):
        for count, threshold in ((16, 16), (16, 1), (1, 1)):
            changes = {f"{kind}_keys": keys[:count], f"{kind}_threshold": threshold}
            assert getattr(drafted(authority.root, **changes), f"{kind}_keys") == keys[:count]
        for count, threshold in ((17, 1), (16, 17), (17, 17), (16, 0), (2, 3), (0, 1)):
            changes = {f"{kind}_keys": keys[:count], f"{kind}_threshold": threshold}
            assert refusal(drafted, authority.root, **changes) == "ROOT_MALFORMED"


def test_authorities_are_few_and_small(authority: Any) -> None:
    own = authority.ca.certificate
    assert drafted(authority.root, authorities=(own,) * 4).authorities == (own,) * 4
    assert refusal(drafted, authority.root, authorities=(own,) * 5) == "ROOT_MALFORMED"

    def certificate(size: int) -> bytes:
        """A certificate of `size` bytes, padded by the bytes that the last one lacked.

        A signature has 70 to 72 bytes by chance, so some tries miss.
        """
        leaf, padding = PeerIdentity("demo", Role.COORDINATOR, "main"), 3500
        for _ in range(1000):
            one = authority.ca.issue(LeafKey().csr(), leaf, lifetime=60, now=NOW, root_chain=bytes(padding))
            if len(one) == size:
                return one
            padding += size - len(one)
        raise AssertionError(f"no certificate has {size} bytes")

    largest = certificate(4096)
    assert drafted(authority.root, authorities=(largest,)).authorities == (largest,)
    assert refusal(drafted, authority.root, authorities=(certificate(4097),)) == "ROOT_MALFORMED"


@pytest.mark.parametrize(
    ("life", "left"),
    [(400, 100), (4 * 365 * 86400, 365 * 86400), (9 * 365 * 86400, 365 * 86400)],
)
def test_it_ends_soon_when_a_quarter_of_its_life_is_left_or_a_year(
    authority: Any, life: int, left: int
) -> None:
    root = dataclasses.replace(authority.root, expires=authority.root.issued + life)
    assert root.ends == root.expires
    assert not root.ends_soon(root.ends - left)
    assert root.ends_soon(root.ends - left + 1)


def test_it_ends_with_its_first_authority(authority: Any) -> None:
    authorities = (authority.ca.certificate,)
    ends = expires_at(authority.ca.certificate)
    assert dataclasses.replace(authority.root, expires=int(ends) + 1, authorities=authorities).ends == ends
    assert (
        dataclasses.replace(authority.root, expires=int(ends) - 1, authorities=authorities).ends == ends - 1
    )
