"""Our own formats, pinned: a change of any byte here means that releases no longer understand each other."""

from __future__ import annotations

import hashlib

from mesh.dsse import Ed25519Signer, key_id
from mesh.identity import Label
from mesh.labels import signing_input
from mesh.records import Kind, Link, RecordHeader
from mesh.rootmeta import root_fingerprint
from mesh.session import LinkContext, SessionKeys
from mesh.suites import Suite


def session(own_rank: int, from_rank: int = 0) -> SessionKeys:
    context = LinkContext("demo", "ring-0", 7, from_rank, 1 - from_rank, own_rank, 3, b"\x55" * 32)
    return SessionKeys.derive(Suite.X25519_AES256GCM, context, bytes(range(32)), b"\x66" * 32)


def test_key_schedule() -> None:
    keys = session(0)
    assert keys.session_id.hex() == "bbb29e6b2e236aa4ec84fe1fe522cd19eefe628c46ad587b4a8d5271e97eb140"
    assert keys.export(b"x").hex() == "aa38f7d2ef5b3a86eb25cbdd547aeb881b6c56103ea5dc1b2915ddf4881eb879"
    note = keys.seal_note(b"port", b"5001")
    assert note.hex() == "d2925b93f8ee7f286a956801d2b784ed0efef214"
    assert session(1).open_note(b"port", note) == b"5001"


def test_the_initiator_is_the_lower_rank_on_either_edge() -> None:
    sends = {(own, edge): session(own, edge).take()[0].key for own in (0, 1) for edge in (0, 1)}
    assert sends[0, 0] == sends[0, 1] != sends[1, 0] == sends[1, 1]
    assert session(0).context.initiates
    assert not session(1, from_rank=1).context.initiates


def test_carrier_keys_and_records() -> None:
    carried = session(0).to_carrier()
    assert hashlib.sha256(carried).hexdigest() == (
        "36ed0bdb8cb9f06b314cc4a05f5c656ad72e188e39a73ce0168a0a46978aa81e"
    )
    link = Link(SessionKeys.from_carrier(carried))
    assert link.sealer.seal_confirmation().hex() == (
        "21137326bc0ad3edca7afc840e66d7c2b55cf45e94c6e6d79ae75592bbfe8e7fbd3a25aa0ada2576e214da14c7055b9d"
    )
    out = bytearray(20)
    link.sealer.seal_into(b"abcd", out, RecordHeader(Kind.TOKENS, 5, bytes(range(32)), "int32", (1,), 4))
    assert out.hex() == "92d6bd159724f0bcd5faa6476e151260006a8931"


def test_names_of_keys() -> None:
    key = Ed25519Signer(bytes(32)).public_key
    assert key_id(key) == hashlib.sha256(key).hexdigest()
    assert root_fingerprint([key], 1) == hashlib.sha256(key).digest()
    other = bytes(32)
    parts = b"sealring/v1 root set\x00" + b"\x00\x00\x00\x02" + b"".join(sorted([key, other]))
    assert root_fingerprint([key, other], 2) == hashlib.sha256(parts).digest()


def test_signing_input() -> None:
    expected = b" " * 64 + b"sealring/v1 join" + b"\x00" + hashlib.sha256(b"x").digest()
    assert signing_input(Label.JOIN, b"x") == expected
    assert [label.value.decode().removeprefix("sealring/v1 ") for label in Label] == [
        "join",
        "attestation",
        "challenge",
        "handshake",
        "csr",
        "root",
        "roster",
    ]
