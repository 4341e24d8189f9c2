"""Suites and key agreement."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.mesh.crypto import (
    DEFAULT_SUITES,
    Group,
    InitiatorShare,
    Suite,
    parse_suites,
    respond_to_share,
    suites,
)
from sealring.mesh.errors import HandshakeError, InvalidInput

PRIME = (1 << 255) - 19
LOW_ORDER = [
    0,
    1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    PRIME - 1,
]


def refusal(action: Any, *arguments: Any) -> str:
    with pytest.raises(HandshakeError) as error:
        action(*arguments)
    return error.value.reason


def test_names_and_codes_round_trip() -> None:
    assert len({suite.code for suite in Suite}) == len(Suite)
    for suite in Suite:
        assert Suite.from_code(suite.code) is suite
        assert suite.supported
    assert parse_suites([suite.value for suite in DEFAULT_SUITES]) == DEFAULT_SUITES
    for code in (0, 5, 255):
        assert refusal(Suite.from_code, code) == "UNKNOWN_SUITE"
    for names in ([], ["x"], ["x25519-aes256gcm"] * 2, ["X25519-AES256GCM"]):
        with pytest.raises(InvalidInput):
            parse_suites(names)


def test_aead_keys_are_32_bytes() -> None:
    for suite in Suite:
        aead = suite.aead(bytes(32))
        assert type(aead).__name__ == ("ChaCha20Poly1305" if "chacha20" in suite else "AESGCM")
        for length in (0, 16, 24, 31, 33):
            with pytest.raises(InvalidInput):
                suite.aead(bytes(length))


@pytest.mark.parametrize("group", list(Group))
def test_agreement(group: Group) -> None:
    share = InitiatorShare.generate(group)
    assert len(share.public) == group.initiator_share_bytes
    answer, secret = respond_to_share(group, share.public)
    assert len(answer) == group.responder_share_bytes
    assert share.agree(answer) == secret
    assert len(secret) == (32 if group is Group.X25519 else 64)
    assert refusal(share.agree, answer) == "BAD_SHARE"


def test_both_secrets_of_the_hybrid_count() -> None:
    share = InitiatorShare.generate(Group.X25519_MLKEM768)
    other = InitiatorShare.generate(Group.X25519_MLKEM768)
    answer, secret = respond_to_share(share.group, share.public[:32] + other.public[32:])
    with_x25519, with_mlkem = share.agree(answer), other.agree(answer)
    assert (with_x25519[:32] != secret[:32], with_x25519[32:]) == (True, secret[32:])
    assert (with_mlkem[:32], with_mlkem[32:] != secret[32:]) == (secret[:32], True)


@pytest.mark.parametrize("group", list(Group))
@pytest.mark.parametrize(
    "value", [*LOW_ORDER, PRIME, PRIME + 1, PRIME + 9, (1 << 255) - 1, 1 << 255, (1 << 255) + 9]
)
def test_low_order_and_non_canonical_points(group: Group, value: int) -> None:
    point = value.to_bytes(32, "little")
    rest = InitiatorShare.generate(group).public[32:]
    assert refusal(respond_to_share, group, point + rest) == "BAD_SHARE"
    tail = respond_to_share(group, InitiatorShare.generate(group).public)[0][32:]
    assert refusal(InitiatorShare.generate(group).agree, point + tail) == "BAD_SHARE"


@pytest.mark.parametrize("group", list(Group))
def test_lengths_are_exact(group: Group) -> None:
    share = InitiatorShare.generate(group).public
    for bad in (b"", share[:-1], share + b"\x00"):
        assert refusal(respond_to_share, group, bad) == "BAD_SHARE"
        assert refusal(InitiatorShare.generate(group).agree, bad) == "BAD_SHARE"


def test_the_own_ephemeral_is_refused() -> None:
    share = InitiatorShare.generate(Group.X25519)
    assert refusal(share.agree, share.public) == "OWN_EPHEMERAL"


def test_malformed_mlkem_keys_are_refused() -> None:
    share = InitiatorShare.generate(Group.X25519_MLKEM768).public
    assert refusal(respond_to_share, Group.X25519_MLKEM768, share[:32] + b"\xff" * 1184) == "BAD_SHARE"


def test_a_wrong_mlkem_ciphertext_gives_another_secret() -> None:
    """Implicit rejection: the handshake's MACs then fail."""
    share = InitiatorShare.generate(Group.X25519_MLKEM768)
    answer, secret = respond_to_share(share.group, share.public)
    assert share.agree(answer[:-1] + bytes([answer[-1] ^ 1])) != secret


def test_hybrid_suites_need_a_library_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(suite.supported for suite in Suite)
    monkeypatch.setattr(type(suites.backend), "mlkem_supported", lambda self: False)
    assert {suite for suite in Suite if suite.supported} == {
        Suite.X25519_CHACHA20POLY1305,
        Suite.X25519_AES256GCM,
    }
