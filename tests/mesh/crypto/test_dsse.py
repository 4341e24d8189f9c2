"""Signed envelopes: raw bytes are verified, then parsed."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sealring.mesh.crypto import (
    Ed25519Signer,
    SignedEnvelope,
    canonical_json,
    check_threshold,
    encode_envelope,
    key_id,
    parse_envelope,
    sign_envelope,
    verify_ed25519,
)
from sealring.mesh.errors import ConfigError, RosterError

SIGNERS = [Ed25519Signer.generate() for _ in range(3)]
KEYS = [signer.public_key for signer in SIGNERS]
TYPE = "application/vnd.sealring.test+json"


def reopen(data: bytes, max_payload: int = 1000) -> SignedEnvelope:
    return parse_envelope(data, payload_type=TYPE, max_payload=max_payload)


def refusal(action: Any, *arguments: Any) -> str:
    with pytest.raises(RosterError) as error:
        action(*arguments)
    return error.value.reason


def test_pae_is_that_of_the_specification() -> None:
    """The example of the DSSE protocol."""
    envelope = SignedEnvelope("http://example.com/HelloWorld", b"hello world", ())
    assert envelope.pae == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


def test_another_tool_for_dsse_verifies_an_envelope() -> None:
    """By the words of the protocol alone: PAE = "DSSEv1" SP LEN(type) SP type SP LEN(body) SP body."""
    document = json.loads(sign_envelope(TYPE, b"{}", SIGNERS[:1]))
    kind, body = document["payloadType"].encode(), base64.b64decode(document["payload"])
    signed = b" ".join([b"DSSEv1", str(len(kind)).encode(), kind, str(len(body)).encode(), body])
    key = Ed25519PublicKey.from_public_bytes(KEYS[0])
    key.verify(base64.b64decode(document["signatures"][0]["sig"]), signed)


@given(st.binary(min_size=1, max_size=300))
def test_round_trip(payload: bytes) -> None:
    envelope = reopen(sign_envelope(TYPE, payload, SIGNERS))
    assert envelope.payload == payload
    check_threshold(envelope, KEYS, 3)
    assert encode_envelope(envelope) == sign_envelope(TYPE, payload, reversed(SIGNERS))


def test_one_signer_twice_signs_once() -> None:
    envelope = reopen(sign_envelope(TYPE, b"x", [SIGNERS[0], SIGNERS[0]]))
    assert len(envelope.signatures) == 1
    assert refusal(check_threshold, envelope, KEYS, 2) == "THRESHOLD_NOT_MET"


def test_thresholds() -> None:
    for count in range(4):
        if count:
            envelope = reopen(sign_envelope(TYPE, b"x", SIGNERS[:count]))
        else:
            envelope = reopen(sign_envelope(TYPE, b"x", [Ed25519Signer.generate()]))
        for threshold in range(1, 4):
            if count >= threshold:
                check_threshold(envelope, KEYS, threshold)
            else:
                reason = refusal(check_threshold, envelope, KEYS, threshold)
                assert reason == "THRESHOLD_NOT_MET"
    for threshold in (0, -1):
        assert refusal(check_threshold, envelope, KEYS, threshold) == "THRESHOLD_NOT_MET"


def test_a_listed_key_that_signed_wrongly_refuses_everything() -> None:
    good = reopen(sign_envelope(TYPE, b"x", SIGNERS))
    (name, signature), *rest = good.signatures
    bad = SignedEnvelope(TYPE, b"x", ((name, bytes(64)), *rest))
    assert refusal(check_threshold, bad, KEYS, 1) == "BAD_SIGNATURE"
    doubled = SignedEnvelope(TYPE, b"x", (*good.signatures, (name, signature)))
    assert refusal(check_threshold, doubled, KEYS, 1) == "DUPLICATE_KEY_ID"
    foreign = SignedEnvelope(TYPE, b"x", (("0" * 64, bytes(64)), *good.signatures))
    check_threshold(foreign, KEYS, 3)


def test_payload_and_type_are_both_signed() -> None:
    good = reopen(sign_envelope(TYPE, b"x", SIGNERS))
    for changed in (
        SignedEnvelope(TYPE, b"y", good.signatures),
        SignedEnvelope(TYPE + "x", b"x", good.signatures),
    ):
        assert refusal(check_threshold, changed, KEYS, 1) == "BAD_SIGNATURE"
    assert refusal(open_envelope_of_other_type, encode_envelope(good)) == "ENVELOPE_TYPE"


def open_envelope_of_other_type(data: bytes) -> SignedEnvelope:
    return parse_envelope(data, payload_type="other", max_payload=1000)


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"payload": None},
        {"payload": ""},
        {"payload": "QQ"},
        {"payload": "QR=="},
        {"payloadType": 1},
        {"payloadType": ""},
        {"signatures": []},
        {"signatures": {}},
        {"signatures": [{"keyid": "a"}]},
        {"signatures": [{"keyid": "a", "sig": "QQ=="}]},
        {"signatures": [{"keyid": 1, "sig": "QQ=="}]},
        {"signatures": [{"keyid": "a" * 65, "sig": "QQ=="}]},
        {"signatures": [1] * 33},
    ],
)
def test_malformed_envelopes(change: dict[str, Any]) -> None:
    document = json.loads(sign_envelope(TYPE, b"x", SIGNERS)) | change
    assert refusal(reopen, canonical_json(document)) == "ENVELOPE_MALFORMED"


def test_too_many_signatures_and_too_large_envelopes() -> None:
    document = json.loads(sign_envelope(TYPE, b"x", SIGNERS))
    document["signatures"] = [
        {"keyid": f"{n:064}", "sig": document["signatures"][0]["sig"]} for n in range(33)
    ]
    assert refusal(reopen, canonical_json(document)) == "ENVELOPE_MALFORMED"
    document["signatures"].pop()
    assert len(reopen(canonical_json(document)).signatures) == 32
    sealed = sign_envelope(TYPE, bytes(1001), SIGNERS)
    assert refusal(reopen, sealed, 1000) == "ENVELOPE_MALFORMED"
    assert refusal(reopen, sealed + b" " * 20000) == "ENVELOPE_TOO_LARGE"


@given(st.binary(max_size=400))
def test_garbage_is_refused_cleanly(data: bytes) -> None:
    assert refusal(reopen, data) == "ENVELOPE_MALFORMED"


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "root.key"
    signer = Ed25519Signer.create(path)
    assert Ed25519Signer.load(path).public_key == signer.public_key
    assert oct(path.stat().st_mode)[-4:] == "0600"
    assert key_id(signer.public_key)[:16] in repr(signer)
    with refused("KEY_EXISTS", ConfigError):
        Ed25519Signer.create(path)
    for data in (b"", bytes(31), bytes(33)):
        path.write_bytes(data)
        with refused("BAD_KEY", ConfigError):
            Ed25519Signer.load(path)


def test_signatures_by_weak_and_malformed_keys() -> None:
    signature = SIGNERS[0].sign(b"x")
    assert verify_ed25519(KEYS[0], b"x", signature)
    small_order = (1).to_bytes(32, "little")
    for key, data in (
        (KEYS[0][:-1], signature),
        (KEYS[0], signature[:-1]),
        (KEYS[0], signature + b"\x00"),
        (small_order, bytes(64)),
        (small_order, small_order + bytes(32)),
        (bytes(32), bytes(64)),
        (b"\xff" * 32, signature),
    ):
        assert not verify_ed25519(key, b"x", data)


def test_an_envelope_may_fill_its_bound_and_not_pass_it() -> None:
    data = sign_envelope(TYPE, b"x", SIGNERS[:1])
    for max_payload in (998, 999, 1000, 1001):
        bound = -(-max_payload // 3) * 4 + 8192
        assert reopen(data.ljust(bound), max_payload).payload == b"x"
        assert refusal(reopen, data.ljust(bound + 1), max_payload) == "ENVELOPE_TOO_LARGE"


def test_a_key_id_has_at_most_64_characters() -> None:
    for length, sound in ((64, True), (65, False)):
        data = encode_envelope(SignedEnvelope(TYPE, b"x", (("k" * length, bytes(64)),)))
        if sound:
            assert reopen(data).signatures[0][0] == "k" * length
        else:
            assert refusal(reopen, data) == "ENVELOPE_MALFORMED"
