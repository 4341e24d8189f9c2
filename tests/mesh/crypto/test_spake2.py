"""SPAKE2: the RFC's transcript and points, an independent slow computation, and shares that attack it."""

from __future__ import annotations

import copy
import hashlib
import pickle
from typing import TypeAlias

import pytest
from cryptography.hazmat.primitives import hashes
from hypothesis import given, settings
from hypothesis import strategies as st
from nacl import bindings as sodium

from sealring.mesh.crypto import Exchange, Party
from sealring.mesh.crypto.spake2 import SHARE_BYTES, M, N, derive
from sealring.mesh.errors import HandshakeError, RecordError

Point: TypeAlias = tuple[int, int]

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
NEUTRAL = (0, 1)
IDENTITIES = (b"newcomer", b"coordinator")


def add(one: Point, other: Point) -> Point:
    """The affine addition law of RFC 8032, section 5.1.4, which is complete."""
    (x1, y1), (x2, y2) = one, other
    product = D * x1 * x2 * y1 * y2
    x = (x1 * y2 + y1 * x2) * pow(1 + product, -1, P) % P
    return x, (y1 * y2 + x1 * x2) * pow(1 - product, -1, P) % P


def times(scalar: int, point: Point) -> Point:
    result = NEUTRAL
    for bit in bin(scalar)[2:]:
        result = add(result, result)
        if bit == "1":
            result = add(result, point)
    return result


def negated(point: Point) -> Point:
    return -point[0] % P, point[1]


def encoded(point: Point) -> bytes:
    return (point[1] | (point[0] & 1) << 255).to_bytes(32, "little")


def decoded(data: bytes) -> Point | None:
    """RFC 8032, section 5.1.3."""
    number = int.from_bytes(data, "little")
    sign, y = number >> 255, number & ((1 << 255) - 1)
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if y >= P or (x * x - square) % P or (x == 0 and sign):
        return None
    return (P - x if x & 1 != sign else x), y


def test_m_and_n_come_from_their_seeds_and_have_prime_order() -> None:
    """RFC 9382, appendix A: the first hash that is a point of the subgroup."""
    for name, expected in ("M", M), ("N", N):
        found = hashlib.sha256(f"edwards25519 point generation seed ({name})".encode()).digest()
        while (point := decoded(found)) is None or times(L, point) != NEUTRAL:
            found = hashlib.sha256(found).digest()
        assert found == expected


VECTORS = [
    (
        (b"server", b"client"),
        "04a56fa807caaa53a4d28dbb9853b9815c61a411118a6fe516a8798434751470f9010153ac33d0d5f2047ffdb1a3e42c9b4"
        "e6be662766e1eeb4116988ede5f912c",
        "0406557e482bd03097ad0cbaa5df82115460d951e3451962f1eaf4367a420676d09857ccbc522686c83d1852abfa8ed6e4a"
        "1155cf8f1543ceca528afb591a1e0b7",
        "0412af7e89717850671913e6b469ace67bd90a4df8ce45c2af19010175e37eed69f75897996d539356e2fa6a406d528501f"
        "907e04d97515fbe83db277b715d3325",
        "2ee57912099d31560b3a44b1184b9b4866e904c49d12ac5042c97dca461b1a5f",
        "0e0672dc86f8e45565d338b0540abe69",
        "58ad4aa88e0b60d5061eb6b5dd93e80d9c4f00d127c65b3b35b1b5281fee38f0",
        "d3e2e547f1ae04f2dbdbf0fc4b79f8ecff2dff314b5d32fe9fcef2fb26dc459b",
    )
]


@pytest.mark.parametrize(("identities", "share_a", "share_b", "secret", "w", "key", "a", "b"), VECTORS)
def test_transcript_and_keys_are_the_rfcs(
    identities: tuple[bytes, bytes],
    share_a: str,
    share_b: str,
    secret: str,
    w: str,
    key: str,
    a: str,
    b: str,
) -> None:
    """RFC 9382, appendix B, whose vectors are of P-256 and SHA-256."""
    fields = [*identities, *map(bytes.fromhex, (share_a, share_b, secret, w))]
    found = derive(fields, b"", hashes.SHA256())
    assert [one.hex() for one in found] == [key, a, b]


@settings(max_examples=5)
@given(code=st.binary(min_size=1, max_size=40), seed=st.integers(1, L - 1))
def test_a_slow_computation_agrees_with_either_side(code: bytes, seed: int) -> None:
    """Python's integers and affine points stand on the other end, with the scalar `seed`."""
    w = int.from_bytes(hashlib.sha512(code).digest(), "little") % L
    base = decoded(sodium.crypto_scalarmult_ed25519_base_noclamp((1).to_bytes(32, "little")))
    points = {Party.A: decoded(M), Party.B: decoded(N)}
    for side, other in (Party.A, Party.B), (Party.B, Party.A):
        own, theirs = points[side], points[other]
        assert base is not None
        assert own is not None
        assert theirs is not None
        exchange = Exchange(other, code, IDENTITIES, b"c")
        share = encoded(add(times(seed, base), times(w, own)))
        met = decoded(exchange.share)
        assert met is not None
        secret = times(8 * seed % L, add(met, negated(times(w, theirs))))
        shares = (share, exchange.share) if side is Party.A else (exchange.share, share)
        expected = derive((*IDENTITIES, *shares, encoded(secret), w.to_bytes(32, "big")), b"c")
        agreed = exchange.finish(share)
        confirmations = {Party.A: expected[1], Party.B: expected[2]}
        assert agreed.key == expected[0]
        assert agreed.own_confirmation == confirmations[other]
        assert agreed.confirmed_by(confirmations[side])


def exchanged(
    code_a: bytes,
    code_b: bytes,
    identities_b: tuple[bytes, bytes] = IDENTITIES,
    context_b: bytes = b"c",
) -> bool:
    """Whether both sides confirm each other."""
    a, b = Exchange(Party.A, code_a, IDENTITIES, b"c"), Exchange(Party.B, code_b, identities_b, context_b)
    at_a, at_b = a.finish(b.share), b.finish(a.share)
    seen = at_a.confirmed_by(at_b.own_confirmation), at_b.confirmed_by(at_a.own_confirmation)
    assert seen[0] is seen[1]
    assert (at_a.key == at_b.key) is (seen[0] or context_b != b"c")
    return seen[0]


def test_only_the_same_code_identities_and_context_are_confirmed() -> None:
    assert exchanged(b"1234567", b"1234567")
    assert not exchanged(b"1234567", b"1234568")
    assert not exchanged(b"1234567", b"1234567", identities_b=(b"newcomer", b"another"))
    assert not exchanged(b"1234567", b"1234567", context_b=b"later")


@pytest.mark.parametrize("side", Party)
def test_a_share_that_is_sent_back_confirms_nothing(side: Party) -> None:
    exchange = Exchange(side, b"1234567", IDENTITIES, b"c")
    agreed = exchange.finish(exchange.share)
    assert not agreed.confirmed_by(agreed.own_confirmation)


SMALL_ORDER = [
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000080",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
]
"""The eight points of the torsion subgroup."""


def bad_shares() -> list[bytes]:
    torsion = [bytes.fromhex(one) for one in SMALL_ORDER]
    valid = decoded(M)
    assert valid is not None
    mixed = []
    for one in torsion[1:]:
        point = decoded(one)
        assert point is not None
        assert times(8, point) == NEUTRAL
        mixed.append(encoded(add(valid, point)))
    not_canonical = (P + 3).to_bytes(32, "little")
    no_point = next(data for y in range(2, 99) if decoded(data := y.to_bytes(32, "little")) is None)
    return [*torsion, *mixed, not_canonical, no_point, b"", bytes(SHARE_BYTES - 1), M + b"\x00"]


@pytest.mark.parametrize("side", Party)
def test_shares_outside_the_prime_order_subgroup_are_refused(side: Party) -> None:
    for share in bad_shares():
        with pytest.raises(HandshakeError) as caught:
            Exchange(side, b"1234567", IDENTITIES, b"c").finish(share)
        assert caught.value.reason == "BAD_SHARE", share.hex()


@pytest.mark.parametrize("side", Party)
def test_a_share_that_cancels_the_code_out_is_refused(side: Party) -> None:
    """The peer's blinding alone, without a public key: the secret would be the neutral element."""
    w = sodium.crypto_core_ed25519_scalar_reduce(hashlib.sha512(b"1234567").digest())
    blinding = sodium.crypto_scalarmult_ed25519_noclamp(w, N if side is Party.A else M)
    with pytest.raises(HandshakeError) as caught:
        Exchange(side, b"1234567", IDENTITIES, b"c").finish(blinding)
    assert caught.value.reason == "BAD_SHARE"


def test_an_exchange_serves_once_and_has_one_owner() -> None:
    exchange = Exchange(Party.A, b"1234567", IDENTITIES, b"c")
    exchange.finish(N)
    with pytest.raises(HandshakeError) as caught:
        exchange.finish(N)
    assert caught.value.reason == "SHARE_USED"
    for copied in copy.copy, copy.deepcopy, pickle.dumps:
        with pytest.raises(RecordError):
            copied(exchange)
    assert exchange.share != Exchange(Party.A, b"1234567", IDENTITIES, b"c").share
