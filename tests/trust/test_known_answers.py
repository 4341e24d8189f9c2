"""Our own formats, pinned: a change of any byte here means that releases no longer understand each other."""

from __future__ import annotations

import base64
import hashlib
import struct

import pytest
from cryptography.hazmat.primitives import hashes, hpke
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from sealring.mesh.crypto import (
    Ed25519Signer,
    Group,
    Label,
    Suite,
    encode_public_key,
    key_id,
    member_id,
    pack_fields,
    signing_input,
)
from sealring.mesh.member import (
    Connection,
    JoinToken,
    Purpose,
    join_content,
    proof,
    renewal_content,
    transcript,
)
from sealring.mesh.member.proof import Side
from sealring.mesh.pki import MAX_CHAIN_BYTES, MAX_CHAIN_LENGTH, MAX_PAYLOAD_BYTES, root_fingerprint
from sealring.mesh.prompt import sealed as envelope
from sealring.mesh.prompt.sealed import ReplayGuard, ReplyOpener, RequestInfo, SealingKey, seal_request
from sealring.mesh.roster import MAX_VERSION_JUMP
from sealring.mesh.roster import codec as roster_codec
from sealring.mesh.rpc import own_release
from sealring.mesh.trust.apple import device_nonce
from sealring.mesh.trust.attestation import sign_sealing_key, verify_sealing_key
from sealring.node.link import handshake as sigma
from sealring.node.link import keys as session_module
from sealring.node.link import records
from sealring.node.link.handshake import EphemeralLedger, Initiator, Responder
from sealring.node.link.keys import LinkContext, SessionKeys
from sealring.node.link.params import LinkParams
from sealring.node.link.records import Link
from sealring.node.wire.channel import MAX_RECORD_BYTES, Kind, RecordHeader
from sealring.v1 import membership_pb2, proof_pb2


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
    assert session(1).seal_note(b"port", b"5001").hex() == "64b043005e40cd7c8912ef4f981aa691546e85b0"


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
        "identity csr",
        "connection",
        "renewal",
        "receipt",
    ]


def test_the_whole_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every label and the order of every field, through the session that comes out of fixed randomness."""
    signers = [FixedSigner(number) for number in (1, 2)]
    ids = [member_id(signer.public_key) for signer in signers]
    ephemerals = iter([b"\x11" * 32, b"\x22" * 32])

    class FixedEphemeral:
        @staticmethod
        def generate() -> X25519PrivateKey:
            return X25519PrivateKey.from_private_bytes(next(ephemerals))

    monkeypatch.setattr("sealring.mesh.crypto.suites.X25519PrivateKey", FixedEphemeral)
    monkeypatch.setattr("sealring.node.link.handshake.secrets.token_bytes", lambda size: b"\x33" * size)

    def params(own: int) -> LinkParams:
        peer = signers[1 - own].public_key
        suites = (Suite.X25519_CHACHA20POLY1305,)
        return LinkParams(
            "demo", "ring-0", 7, 0, 1, own, 3, b"\x55" * 32, ids[own], ids[1 - own], peer, suites
        )

    initiator = Initiator(params(0), signers[0])
    responder = Responder(params(1), signers[1], EphemeralLedger())
    hello = initiator.start()
    reply = responder.on_message(hello).message
    proof = initiator.on_message(reply).message
    last = responder.on_message(proof)
    keys = initiator.on_message(last.message).session
    frames = hashlib.sha256(hello + reply + proof + last.message).hexdigest()
    assert frames == "675c9bd217ce1e300c9b35a7fe864a893f663482588fbf73f16c86db858e1732"
    assert keys.session_id.hex() == "065a324ade6e8768ed195d22dc24858bd60e40d7d5b05a28c76d753e5687d649"


class FixedSigner:
    """A signer whose signatures are the same every time (RFC 6979)."""

    key_type = "software"

    def __init__(self, number: int) -> None:
        self._key = ec.derive_private_key(number, ec.SECP256R1())
        self.public_key = encode_public_key(self._key.public_key())

    def sign(self, label: Label, content: bytes) -> bytes:
        algorithm = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
        return self._key.sign(signing_input(label, content), algorithm)


def test_a_sealed_request_and_its_reply() -> None:
    """Sealed and opened by hand, with nothing of ours but the length prefixes; then by both ends."""
    suite = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.CHACHA20_POLY1305)
    key = SealingKey()
    bound = RequestInfo("demo", b"\x01" * 16, 1_800_000_060, b"\x07" * 32)
    info = pack_fields(
        b"sealring/v1 envelope", b"demo", b"\x01" * 16, struct.pack(">Q", 1_800_000_060), b"\x07" * 32
    )
    assert bound.encode() == info
    reply_key = X25519PrivateKey.generate()
    plain = pack_fields(reply_key.public_key().public_bytes_raw(), b"body")
    sealed = suite.encrypt(plain, X25519PublicKey.from_public_bytes(key.public_key), info)
    opened = key.open_request(sealed, bound, ReplayGuard(clock=lambda: 1_800_000_000.0))
    assert opened.body == b"body"
    chunks = [opened.reply.seal(b"one"), opened.reply.seal(b"two", last=True)]
    reply_info = pack_fields(b"sealring/v1 reply", info, hashlib.sha256(sealed).digest())
    stream = ChaCha20Poly1305(suite.decrypt(chunks[0][:80], reply_key, reply_info))
    assert stream.decrypt(bytes(12), chunks[0][80:], reply_info) == b"\x00one"
    assert stream.decrypt(bytes(11) + b"\x01", chunks[1], reply_info) == b"\x01two"
    opener = ReplyOpener(reply_key, bound, hashlib.sha256(sealed).digest())
    assert [opener.open(chunk) for chunk in chunks] == [(b"one", False), (b"two", True)]
    sealed, _ = seal_request(key.public_key, bound, b"body")
    assert key.open_request(sealed, bound, ReplayGuard(clock=lambda: 1_800_000_000.0)).body == b"body"


def test_codes_and_bounds() -> None:
    """Codes and bounds that both ends of a connection share; an older release would refuse others."""
    assert {suite.value: suite.code for suite in Suite} == {
        "x25519-chacha20poly1305": 1,
        "x25519-aes256gcm": 2,
        "x25519mlkem768-chacha20poly1305": 3,
        "x25519mlkem768-aes256gcm": 4,
    }
    assert [group.value for group in Group] == [1, 2]
    assert [group.initiator_share_bytes for group in Group] == [32, 32 + 1184]
    assert [group.responder_share_bytes for group in Group] == [32, 32 + 1088]
    assert [kind.value for kind in Kind] == [1, 2, 3, 4, 5, 6]
    assert (sigma.MAX_FRAME_BYTES, sigma.DEADLINE_SECONDS, sigma.HELLO_NONCE_BYTES) == (16384, 10.0, 32)
    assert (MAX_RECORD_BYTES, records.CONFIRMATION_BYTES) == (16777216, 48)
    assert (MAX_PAYLOAD_BYTES, MAX_CHAIN_BYTES, MAX_CHAIN_LENGTH) == (
        32768,
        65536,
        16,
    )
    assert (session_module.MAX_NOTE_BYTES, roster_codec.SEALING_KEY_SIZES) == (4096, (32, 1216))
    assert (envelope.MAX_ENVELOPE_BYTES, envelope.MAX_CHUNK_BYTES) == (33554432, 1048576)
    assert envelope.MAX_LIFETIME_SECONDS == 300
    assert (roster_codec.MAX_MEMBERS, roster_codec.BYTES_PER_HUNDRED) == (1000, 65536)
    assert MAX_VERSION_JUMP == 2**40


def test_what_both_ends_of_a_stream_sign() -> None:
    """Field by field, for each side of each kind of stream."""
    offer = proof_pb2.ProofOffer(
        nonce=b"\x01" * 32,
        roster_version=7,
        roster_hash=b"\x02" * 32,
        release=proof_pb2.Release(software="1.2", protocol=3, oldest=2),
    )
    answer = proof_pb2.ProofAnswer(
        nonce=b"\x03" * 32, roster_version=8, roster_hash=b"\x04" * 32, root_version=5
    )
    said = [
        *(b"\x01" * 32, struct.pack(">Q", 7), b"\x02" * 32),
        pack_fields(b"1.2", struct.pack(">Q", 3), struct.pack(">Q", 2)),
        *(b"\x03" * 32, struct.pack(">Q", 8), b"\x04" * 32, struct.pack(">Q", 5)),
        pack_fields(b"", bytes(8), bytes(8)),
    ]
    purposes = {
        Purpose.SCHEDULE: b"gateway schedules member",
        Purpose.SESSION: b"member reports to coordinator",
        Purpose.WATCH: b"gateway watches coordinator",
    }
    sides = {
        Side.CALLER: b"caller",
        Side.CALLED: b"called",
        Side.RENEWED: b"caller with another certificate",
    }
    assert (set(purposes), set(sides)) == (set(Purpose), set(Side))
    for purpose, stream in purposes.items():
        for side, whose in sides.items():
            head = (b"sealring/v1 connection", whose, stream, b"demo", b"one", b"two", b"\x05" * 32)
            found = transcript(Connection(purpose, "demo", "one", "two", b"\x05" * 32), offer, answer, side)
            assert found == pack_fields(*head, *said)


async def test_what_a_caller_signs_with_another_certificate() -> None:
    connection = Connection(Purpose.SCHEDULE, "demo", "one", "two", b"\x05" * 32)
    caller = proof.CallerProof(connection, proof.HeldRoster())
    answer = proof_pb2.ProofAnswer(nonce=b"\x03" * 32, proof=b"x", release=own_release())
    caller.check(answer, lambda content, given: None)
    renewal = await caller.renew(b"der", lambda content: content)
    signed = transcript(connection, caller.offer, answer, Side.RENEWED)
    assert renewal.proof == pack_fields(signed, hashlib.sha256(b"der").digest())


def test_what_is_signed_when_a_machine_joins_and_when_it_renews() -> None:
    digest = hashlib.sha256(b"csr").digest()
    request = membership_pb2.EnrolRequest(
        token_id="id",
        role=membership_pb2.ROLE_NODE,
        nonce=b"nonce",
        identity_key=b"key",
        csr=b"csr",
        sealing_key=b"sealing",
        name="alpha",
        addresses=["a:1", "b:2"],
    )
    head = (b"sealring join v1", b"demo", b"id", b"member", b"nonce", b"key", digest)
    assert join_content("demo", request) == pack_fields(*head, b"sealing", b"alpha", b"a:1", b"b:2")
    renewal = {"cluster": "demo", "nonce": b"nonce", "server_key": b"hash", "identity_key": b"key"}
    fields = (b"sealring renewal v1", b"demo", b"nonce", b"hash", b"key", digest)
    assert renewal_content(**renewal, csr=b"csr") == pack_fields(*fields)
    answered = pack_fields(b"csr", b"chain", b"root")
    assert proof.renewal(b"csr", b"chain", b"root") == hashlib.sha256(answered).digest()
    refused = pack_fields(b"csr", b"", b"not enrolled", b"key")
    assert proof.refusal(b"csr", b"key") == hashlib.sha256(refused).digest()
    signer, sealing_key = FixedSigner(1), bytes(32)
    bound = pack_fields(b"sealring sealing key v1", b"demo", sealing_key)
    signature = signer.sign(Label.ATTESTATION, bound)
    assert sign_sealing_key(signer, "demo", sealing_key) == signature
    verify_sealing_key(signer.public_key, "demo", sealing_key, signature)
    assert device_nonce(b"key") == hashlib.sha256(b"sealring/v1 device\x00key").digest()


def test_the_text_of_a_join_token() -> None:
    token = JoinToken(bytes(range(32)), "a" * 16, b"\x07" * 32, ("10.0.0.1:7701", "[fe80::1]:7701"))
    head, _, tail = token.format().rpartition(".")
    version, *parts = head.split(".")

    def raw(text: str) -> bytes:
        return base64.b32decode(text.upper() + "=" * (-len(text) % 8))

    assert (version, [raw(part) for part in parts]) == ("sr2", [bytes(range(32)), bytes(10), b"\x07" * 32])
    addresses = b"10.0.0.1:7701,[fe80::1]:7701"
    check = hashlib.sha256(b"sealring join token v2\x00" + head.encode() + addresses).digest()[:4]
    assert raw(tail) == check + addresses
    assert JoinToken.parse(token.format()) == token
