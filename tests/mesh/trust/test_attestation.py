"""Attestation statements: one encoding, every check, and never more trust than the evidence proves."""

from __future__ import annotations

import dataclasses
import json
import secrets

import pytest
from appletest import GOOD
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.crypto import KeyType, Label, SoftwareSigner, encode_base64
from sealring.mesh.errors import AttestationError
from sealring.mesh.trust.apple import Device
from sealring.mesh.trust.attestation import (
    MAX_AGE_SECONDS,
    MAX_STATEMENT_BYTES,
    Expected,
    Posture,
    Statement,
    check_continuity,
    decode_statement,
    derive_level,
    encode_statement,
    has_forgotten,
    sign_sealing_key,
    sign_statement,
    verify_sealing_key,
    verify_statement,
)
from sealring.mesh.trust.levels import TrustLevel

NOW = 1_800_000_000
SIGNER = SoftwareSigner.generate()
STATEMENT = Statement(
    cluster="demo",
    nonce=b"n" * 32,
    timestamp=NOW,
    identity_key=SIGNER.public_key,
    key_type=KeyType.SOFTWARE,
    sealing_key=b"s" * 32,
    manifest_hash=b"m" * 32,
)
EXPECTED = Expected("demo", b"n" * 32, SIGNER.public_key, "software", b"s" * 32)


def statement(**changes: object) -> Statement:
    return dataclasses.replace(STATEMENT, **changes)  # type: ignore[arg-type]


def reason_of(data: bytes, signature: bytes, expected: Expected = EXPECTED, now: float = NOW) -> str:
    with pytest.raises(AttestationError) as caught:
        verify_statement(data, signature, expected, now=now)
    return caught.value.reason


@pytest.mark.parametrize("posture", [STATEMENT.posture, GOOD])
def test_a_software_key_earns_the_software_level_whatever_its_posture(posture: Posture) -> None:
    said = statement(posture=posture)
    verdict = verify_statement(*sign_statement(SIGNER, said), EXPECTED, now=NOW)
    assert (verdict.level, verdict.trust, verdict.statement) == (TrustLevel.SOFTWARE, 10, said)


def test_a_claim_of_an_enclave_key_with_a_good_posture_is_self_signed_and_no_more() -> None:
    """Made here by a key in a file: nobody can tell without Apple's attestation."""
    said = statement(key_type=KeyType.SECURE_ENCLAVE, posture=GOOD)
    expected = dataclasses.replace(EXPECTED, key_type="secure_enclave")
    verdict = verify_statement(*sign_statement(SIGNER, said), expected, now=NOW)
    assert (verdict.level, verdict.trust) == (TrustLevel.SELF_SIGNED, 20)


SERIAL = "C02TEST12345"
ENCLAVE = dataclasses.replace(
    STATEMENT, key_type=KeyType.SECURE_ENCLAVE, posture=dataclasses.replace(GOOD, serial=SERIAL)
)


def test_a_verified_chain_for_the_machine_makes_it_hardware() -> None:
    assert derive_level(ENCLAVE, Device(SERIAL)) is TrustLevel.HARDWARE
    assert derive_level(ENCLAVE) is TrustLevel.SELF_SIGNED


@pytest.mark.parametrize(
    ("said", "device"),
    [
        (ENCLAVE, Device("C02OTHER")),
        (dataclasses.replace(ENCLAVE, posture=GOOD), Device(SERIAL)),
        (dataclasses.replace(ENCLAVE, posture=dataclasses.replace(GOOD, serial=None)), Device("")),
    ],
)
def test_a_chain_whose_serial_does_not_agree_adds_nothing(said: Statement, device: Device) -> None:
    assert derive_level(said, device) is TrustLevel.SELF_SIGNED


def test_a_chain_does_not_make_up_for_a_software_key_or_a_poor_posture() -> None:
    in_a_file = dataclasses.replace(ENCLAVE, key_type=KeyType.SOFTWARE)
    poor = dataclasses.replace(ENCLAVE, posture=dataclasses.replace(ENCLAVE.posture, filevault=False))
    for said in (in_a_file, poor):
        assert derive_level(said, Device(SERIAL)) is TrustLevel.SOFTWARE


def test_an_answer_to_a_challenge_is_no_attestation_and_the_other_way_round() -> None:
    answer = sign_statement(SIGNER, STATEMENT, Label.CHALLENGE)
    assert reason_of(*answer) == "STATEMENT_SIGNATURE"
    assert verify_statement(*answer, EXPECTED, now=NOW, label=Label.CHALLENGE).trust == 10
    with pytest.raises(AttestationError) as caught:
        attested = sign_statement(SIGNER, STATEMENT)
        verify_statement(*attested, EXPECTED, now=NOW, label=Label.CHALLENGE)
    assert caught.value.reason == "STATEMENT_SIGNATURE"


@pytest.mark.parametrize("name", ["sip", "secure_boot"])
@pytest.mark.parametrize(("after", "reason"), [(False, "PROTECTION_LOST"), (None, "PROTECTION_UNKNOWN")])
def test_a_protection_that_was_there_is_not_lost_in_silence_and_unknown_is_not_lost(
    name: str, after: bool | None, reason: str
) -> None:
    before = statement(posture=GOOD)
    with pytest.raises(AttestationError) as caught:
        check_continuity(before, statement(posture=dataclasses.replace(GOOD, **{name: after})))
    assert (caught.value.reason, caught.value.metadata["protection"]) == (reason, name)


def test_a_lost_protection_is_found_beside_one_that_is_unknown() -> None:
    after = statement(posture=dataclasses.replace(GOOD, sip=None, secure_boot=False))
    with pytest.raises(AttestationError) as caught:
        check_continuity(statement(posture=GOOD), after)
    assert caught.value.reason == "PROTECTION_LOST"


@pytest.mark.parametrize("name", ["chip", "boot_session", "sip", "filevault", "authenticated_root"])
def test_only_a_fact_that_was_known_or_on_is_forgotten(name: str) -> None:
    unknown = statement(posture=dataclasses.replace(GOOD, **{name: None}))
    assert has_forgotten(statement(posture=GOOD), unknown)
    assert not has_forgotten(unknown, unknown)
    assert not has_forgotten(unknown, statement(posture=GOOD))
    if isinstance(getattr(GOOD, name), bool):
        off = statement(posture=dataclasses.replace(GOOD, **{name: False}))
        assert not has_forgotten(statement(posture=GOOD), off)
        assert not has_forgotten(off, unknown)


def test_what_was_never_there_cannot_be_lost() -> None:
    bad = statement(posture=dataclasses.replace(GOOD, sip=False, secure_boot=None))
    check_continuity(bad, bad)
    check_continuity(STATEMENT, statement(posture=GOOD))
    check_continuity(statement(posture=GOOD), statement(posture=dataclasses.replace(GOOD, boot_session="B")))


def test_software_that_changes_under_a_running_node_is_found() -> None:
    with pytest.raises(AttestationError) as caught:
        check_continuity(STATEMENT, statement(manifest_hash=b"x" * 32))
    assert caught.value.reason == "MANIFEST_CHANGED"
    check_continuity(STATEMENT, statement(manifest_hash=b"x" * 32, sealing_key=b"t" * 32))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, None) for name in ("hardware_model", "chip", "os_version", "boot_session")),
        *(
            (name, off)
            for name in ("sip", "secure_boot", "authenticated_root", "filevault")
            for off in (None, False)
        ),
    ],
)
def test_an_unknown_fact_or_a_missing_protection_is_never_good(name: str, value: bool | None) -> None:
    posture = dataclasses.replace(GOOD, **{name: value})  # type: ignore[arg-type]
    assert derive_level(statement(key_type=KeyType.SECURE_ENCLAVE, posture=GOOD)) is TrustLevel.SELF_SIGNED
    assert derive_level(statement(key_type=KeyType.SECURE_ENCLAVE, posture=posture)) is TrustLevel.SOFTWARE


def test_unknown_is_null_and_never_true() -> None:
    document = json.loads(encode_statement(STATEMENT))
    assert set(document["posture"].values()) == {None}


def test_another_key_or_label_is_refused() -> None:
    data, _ = sign_statement(SIGNER, STATEMENT)
    assert reason_of(data, SoftwareSigner.generate().sign(Label.ATTESTATION, data)) == "STATEMENT_SIGNATURE"
    for label in Label:
        if label is not Label.ATTESTATION:
            assert reason_of(data, SIGNER.sign(label, data)) == "STATEMENT_SIGNATURE"
    assert reason_of(data, b"") == "STATEMENT_SIGNATURE"


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster": "other"},
        {"nonce": b"x" * 32},
        {"identity_key": SoftwareSigner.generate().public_key},
        {"key_type": KeyType.SECURE_ENCLAVE},
        {"sealing_key": b"x" * 32},
    ],
)
def test_a_statement_about_something_else_is_refused(changes: dict[str, object]) -> None:
    assert reason_of(*sign_statement(SIGNER, statement(**changes))) == "STATEMENT_MISMATCH"


def test_stale_and_future_statements_are_refused() -> None:
    signed = sign_statement(SIGNER, STATEMENT)
    for now in (NOW - MAX_AGE_SECONDS, NOW + MAX_AGE_SECONDS):
        verify_statement(*signed, EXPECTED, now=now)
    assert reason_of(*signed, now=NOW + MAX_AGE_SECONDS + 1) == "STATEMENT_STALE"
    assert reason_of(*signed, now=NOW - MAX_AGE_SECONDS - 1) == "STATEMENT_FROM_FUTURE"


def refused(document: dict[str, object]) -> None:
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(AttestationError) as caught:
        decode_statement(data)
    assert caught.value.reason == "STATEMENT_MALFORMED"


def test_every_field_has_to_be_there_and_no_other() -> None:
    document = json.loads(encode_statement(STATEMENT))
    for name in document:
        refused({key: value for key, value in document.items() if key != name})
    for name in document["posture"]:
        posture = {key: value for key, value in document["posture"].items() if key != name}
        refused(document | {"posture": posture})
    refused(document | {"more": 1})
    refused(document | {"posture": document["posture"] | {"more": True}})
    refused(document | {"version": 2})
    refused(document | {"type": "roster"})
    refused(document | {"key_type": "magic"})
    refused(document | {"posture": []})
    refused(document | {"posture": document["posture"] | {"sip": 1}})
    refused(document | {"posture": document["posture"] | {"chip": True}})
    refused(document | {"posture": document["posture"] | {"chip": ""}})
    digest = encode_base64(bytes(32))
    for models in (None, "", digest, [1], [""], [encode_base64(bytes(31))], [digest] * 9, [[digest]]):
        refused(document | {"models": models})


def test_the_bounds_of_texts() -> None:
    document = json.loads(encode_statement(STATEMENT))
    for chip, cluster, holds in ((128, 63, True), (129, 1, False), (1, 64, False)):
        posture = document["posture"] | {"chip": "x" * chip}
        changed = document | {"cluster": "c" * cluster, "posture": posture}
        if holds:
            data = json.dumps(changed, sort_keys=True, separators=(",", ":")).encode()
            assert decode_statement(data).cluster == "c" * cluster
        else:
            refused(changed)


def test_only_the_canonical_encoding_is_taken() -> None:
    data = encode_statement(STATEMENT)
    spaced = json.dumps(json.loads(data), sort_keys=True).encode()
    unsorted = json.dumps(dict(reversed(json.loads(data).items())), separators=(",", ":")).encode()
    for other in (spaced, unsorted, data + b" ", b" " + data, data[:-1], b"", data + data):
        with pytest.raises(AttestationError):
            decode_statement(other)


texts = st.none() | st.text(
    st.characters(min_codepoint=0x20, exclude_categories=["Cs"]), min_size=1, max_size=128
)
flags = st.none() | st.booleans()
postures = st.builds(
    Posture,
    hardware_model=texts,
    chip=texts,
    os_version=texts,
    boot_session=texts,
    serial=texts,
    sip=flags,
    secure_boot=flags,
    authenticated_root=flags,
    filevault=flags,
)


@given(
    posture=postures,
    timestamp=st.integers(0, (1 << 63) - 1),
    nonce=st.binary(min_size=32, max_size=32),
    key_type=st.sampled_from(KeyType),
    models=st.lists(st.binary(min_size=32, max_size=32), max_size=8),
)
def test_what_is_encoded_comes_back(
    posture: Posture, timestamp: int, nonce: bytes, key_type: KeyType, models: list[bytes]
) -> None:
    said = statement(
        posture=posture, timestamp=timestamp, nonce=nonce, key_type=key_type, models=tuple(models)
    )
    assert decode_statement(encode_statement(said)) == said


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parser(data: bytes) -> None:
    with pytest.raises(AttestationError):
        decode_statement(data)


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_survives(at: int, bit: int) -> None:
    data, signature = sign_statement(SIGNER, STATEMENT)
    changed = bytearray(data)
    changed[at % len(data)] ^= 1 << bit
    assert reason_of(bytes(changed), signature) == "STATEMENT_SIGNATURE"


def test_a_sealing_key_is_bound_to_identity_and_cluster() -> None:
    key = secrets.token_bytes(32)
    signature = sign_sealing_key(SIGNER, "demo", key)
    verify_sealing_key(SIGNER.public_key, "demo", key, signature)
    other = SoftwareSigner.generate().public_key
    for attempt in (
        (other, "demo", key, signature),
        (SIGNER.public_key, "other", key, signature),
        (SIGNER.public_key, "demo", secrets.token_bytes(32), signature),
        (SIGNER.public_key, "demo", key[:31], sign_sealing_key(SIGNER, "demo", key[:31])),
        (SIGNER.public_key, "demo", key, b""),
    ):
        with pytest.raises(AttestationError) as caught:
            verify_sealing_key(*attempt)
        assert caught.value.reason == "SEALING_KEY_SIGNATURE"


def test_a_statement_is_no_sealing_key_signature_and_the_other_way_round() -> None:
    data, signature = sign_statement(SIGNER, STATEMENT)
    with pytest.raises(AttestationError):
        verify_sealing_key(SIGNER.public_key, "demo", STATEMENT.sealing_key, signature)
    assert reason_of(data, sign_sealing_key(SIGNER, "demo", STATEMENT.sealing_key)) == "STATEMENT_SIGNATURE"


def test_the_largest_statement_is_looked_at() -> None:
    """One byte more is refused for its size alone, also where the signature would hold."""
    for size in (MAX_STATEMENT_BYTES, MAX_STATEMENT_BYTES + 1):
        data = b"{" + b" " * (size - 2) + b"}"
        other = SoftwareSigner.generate().sign(Label.ATTESTATION, data)
        found = reason_of(data, other)
        assert (found == "STATEMENT_MALFORMED") == (size > MAX_STATEMENT_BYTES), found
