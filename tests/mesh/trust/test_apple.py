"""Apple's device attestation, tried with a certificate authority of the tests' own."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from appletest import SERIAL, DeviceAuthority
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sealring.mesh.crypto import SoftwareSigner
from sealring.mesh.errors import AttestationError
from sealring.mesh.trust import apple as device
from sealring.mesh.trust.apple import APPLE_ROOT, device_nonce, verify_device

NOW = 1_800_000_000
KEY = SoftwareSigner.generate().public_key
APPLE = DeviceAuthority(NOW)
DAY = 86400


def reason(chain: object, *, key: bytes = KEY, now: float = NOW, root: bytes = APPLE.root) -> str:
    with pytest.raises(AttestationError) as caught:
        verify_device(chain, key, now=now, root=root)  # type: ignore[arg-type]
    return caught.value.reason


def test_the_pinned_root_is_apples() -> None:
    root = x509.load_der_x509_certificate(APPLE_ROOT)
    published = "ccf59ef8fcb3017d97f8b5fa6fa90e7a3f9283f76b55ac6cf6eda8b8b949f05b"
    assert hashlib.sha256(APPLE_ROOT).hexdigest() == published
    assert "Apple Enterprise Attestation Root CA" in root.subject.rfc4514_string()
    root.verify_directly_issued_by(root)


def test_a_good_chain_names_the_device() -> None:
    found = verify_device(APPLE.chain(KEY), KEY, now=NOW, root=APPLE.root)
    assert found.serial == SERIAL


def test_values_may_be_wrapped() -> None:
    wrapped = {
        device.SERIAL: b"\x0c\x0c" + SERIAL.encode(),
        device.FRESHNESS: b"\x04\x20" + device_nonce(KEY),
        device.SECURE_BOOT_STATUS: b"\x0c\x0dFull Security",
    }
    assert verify_device(APPLE.chain(KEY, wrapped), KEY, now=NOW, root=APPLE.root).serial == SERIAL


@pytest.mark.parametrize(
    ("value", "held"),
    [
        (b"", b""),
        (b"\x0c", b"\x0c"),
        (b"\x0c\x00", b""),
        (b"\x0c\x01a", b"a"),
        (b"\x04\x01a", b"\x04\x01a"),
        (b"\x0c\x02a", b"\x0c\x02a"),
        (b"\x0c\x01ab", b"\x0c\x01ab"),
        (b"\x0c\x7f" + b"a" * 127, b"a" * 127),
        (b"\x0c\x80" + b"a" * 128, b"\x0c\x80" + b"a" * 128),
    ],
)
def test_only_what_is_wrapped_and_short_is_unwrapped(value: bytes, held: bytes) -> None:
    assert device.unwrap(value, 0x0C) == held


def test_another_root_is_refused() -> None:
    chain = APPLE.chain(KEY)
    assert reason(chain, root=APPLE_ROOT) == "DEVICE_CHAIN"
    assert reason(chain, root=DeviceAuthority(NOW).root) == "DEVICE_CHAIN"
    with pytest.raises(AttestationError):
        verify_device(chain, KEY, now=NOW)


@pytest.mark.parametrize("now", [NOW - 2 * DAY, NOW + 400 * DAY])
def test_a_chain_is_valid_for_its_time_only(now: float) -> None:
    assert reason(APPLE.chain(KEY), now=now) == "DEVICE_CHAIN"


def test_a_chain_is_valid_from_a_minute_before_its_time_to_the_end_of_it() -> None:
    chain = APPLE.chain(KEY)
    found = [x509.load_der_x509_certificate(der) for der in (*chain, APPLE.root)]
    start = max(one.not_valid_before_utc.timestamp() for one in found) - 60
    end = min(one.not_valid_after_utc.timestamp() for one in found)
    for now in (start, end):
        verify_device(chain, KEY, now=now, root=APPLE.root)
    for now in (start - 1, end + 1):
        assert reason(chain, now=now) == "DEVICE_CHAIN"


def test_a_chain_for_another_identity_is_refused() -> None:
    other = SoftwareSigner.generate().public_key
    assert reason(APPLE.chain(other)) == "DEVICE_FRESHNESS"
    assert reason(APPLE.chain(KEY), key=other) == "DEVICE_FRESHNESS"


@pytest.mark.parametrize("case", range(5))
def test_a_missing_or_wrong_freshness_code_is_refused(case: int) -> None:
    value = (None, b"", bytes(32), device_nonce(KEY)[:-1], hashlib.sha256(KEY).digest())[case]
    assert reason(APPLE.chain(KEY, {device.FRESHNESS: value})) == "DEVICE_FRESHNESS"


@pytest.mark.parametrize("value", [None, b"", b"\x00", b"a" * 65, "ä".encode(), b"a\nb"])
def test_a_missing_or_malformed_serial_is_refused(value: bytes | None) -> None:
    assert reason(APPLE.chain(KEY, {device.SERIAL: value})) == "DEVICE_CHAIN"


@pytest.mark.parametrize(
    ("oid", "values"),
    [
        (device.SIP_STATUS, [b"\x02\x01\x01", b"\x01\x01\xff", b"\x01\x01\x00", b"\x00", b"0", b"", None]),
        (device.KERNEL_EXTENSIONS, [b"\x02\x01\x02", b"\x01\x01\x00", b"\x02\x02\x00\x00", b"", None]),
        (device.SECURE_BOOT_STATUS, [b"Reduced Security", b"\x0c\x13Permissive Security", b"full", None]),
    ],
)
def test_a_posture_that_is_not_said_to_be_good_is_refused(oid: str, values: list[bytes | None]) -> None:
    for value in values:
        assert reason(APPLE.chain(KEY, {oid: value})) == "DEVICE_POSTURE", value


def test_only_macs_that_are_allowed_count() -> None:
    chain = APPLE.chain(KEY)
    assert verify_device(chain, KEY, now=NOW, root=APPLE.root, serials={"C02OTHER", SERIAL}).serial == SERIAL
    with refused("DEVICE_NOT_ALLOWED", AttestationError):
        verify_device(chain, KEY, now=NOW, root=APPLE.root, serials={"C02OTHER"})


def test_a_leaf_cannot_be_an_issuer() -> None:
    leaf_key, forged_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    leaf = APPLE.certificate("device", "sub", leaf_key, APPLE.key, ca=False)
    said = {device.SERIAL: b"STOLEN", device.FRESHNESS: device_nonce(KEY)}
    forged = APPLE.certificate("forged", "device", forged_key, leaf_key, ca=False, extensions=said)
    chain = [one.public_bytes(Encoding.DER) for one in (forged, leaf, APPLE.intermediate)]
    assert reason(chain) == "DEVICE_CHAIN"


def test_an_intermediate_below_the_allowed_depth_is_refused() -> None:
    key, leaf_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    deeper = APPLE.certificate("deeper", "sub", key, APPLE.key, ca=True)
    said = {device.SERIAL: b"DEEP", device.FRESHNESS: device_nonce(KEY)}
    leaf = APPLE.certificate("device", "deeper", leaf_key, key, ca=False, extensions=said)
    chain = [one.public_bytes(Encoding.DER) for one in (leaf, deeper, APPLE.intermediate)]
    assert reason(chain) == "DEVICE_CHAIN"


def test_an_authority_as_leaf_is_refused() -> None:
    assert reason([APPLE.intermediate.public_bytes(Encoding.DER)]) == "DEVICE_CHAIN"


@pytest.mark.parametrize("chain", [(), (b"",), (b"x" * 5000,), (b"junk",), (b"junk",) * 5])
def test_malformed_chains_are_refused(chain: tuple[bytes, ...]) -> None:
    assert reason(chain) == "DEVICE_CHAIN"


def test_order_and_gaps_matter() -> None:
    leaf, intermediate = APPLE.chain(KEY)
    for chain in ((leaf,), (intermediate, leaf), (leaf, leaf, intermediate)):
        assert reason(chain) == "DEVICE_CHAIN"


@given(st.integers(0, 1), st.data())
def test_any_flipped_bit_is_refused(which: int, data: st.DataObject) -> None:
    chain = list(_CHAIN)
    spoiled = bytearray(chain[which])
    at = data.draw(st.integers(0, len(spoiled) * 8 - 1))
    spoiled[at // 8] ^= 1 << at % 8
    chain[which] = bytes(spoiled)
    with pytest.raises(AttestationError):
        verify_device(chain, KEY, now=NOW, root=APPLE.root)


_CHAIN = APPLE.chain(KEY)


def test_chains_are_bounded_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    def parse(der: bytes) -> Any:
        parsed.append(der)
        raise ValueError("no certificate")

    monkeypatch.setattr(x509, "load_der_x509_certificate", parse)
    largest = bytes(device.MAX_CERTIFICATE_BYTES)
    for chain in ([], [largest] * (device.MAX_CHAIN + 1), [largest + b"x"], [b"x", largest + b"x"]):
        assert reason(chain) == "DEVICE_CHAIN"
    assert parsed == []
    for count in (1, device.MAX_CHAIN):
        assert reason([largest] * count) == "DEVICE_CHAIN"
    assert parsed == [largest] * 2
