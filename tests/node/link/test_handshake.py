"""The handshake: what it gives, and everything an attacker tries against it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hmac
import pickle
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sealring.mesh.crypto import (
    DEFAULT_SUITES,
    InitiatorShare,
    Label,
    SoftwareSigner,
    Suite,
    member_id,
    pack_fields,
    unpack_fields,
)
from sealring.mesh.errors import HandshakeError, InvalidInput, NotFound, RecordError
from sealring.node.link import handshake
from sealring.node.link.handshake import (
    DEADLINE_SECONDS,
    MAX_FRAME_BYTES,
    EphemeralLedger,
    Initiator,
    Responder,
)
from sealring.node.link.keys import expand
from sealring.node.link.params import LinkParams

SHARED = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def refusal(machine: Any, frame: bytes) -> str:
    with pytest.raises(HandshakeError) as error:
        machine.on_message(frame)
    with pytest.raises(HandshakeError) as again:
        machine.on_message(frame)
    assert again.value.reason in {"OUT_OF_ORDER", "HANDSHAKE_TIMEOUT", "FRAME_TOO_LARGE"}
    return error.value.reason


def frames(pair: Any) -> tuple[list[bytes], Any, Any]:
    """The four frames of an honest handshake."""
    initiator, responder = pair.initiator(), pair.responder()
    hello = initiator.start()
    reply = responder.on_message(hello).message
    proof = initiator.on_message(reply).message
    finished = responder.on_message(proof).message
    return [hello, reply, proof, finished], initiator, responder


@pytest.mark.parametrize("suite", list(Suite))
def test_both_ends_get_the_same_keys(make_pair: Callable[..., Any], suite: Suite) -> None:
    first, second = make_pair([suite]).handshake()
    assert first.suite is second.suite is suite
    assert first.session_id == second.session_id
    assert first.transcript_hash == second.transcript_hash
    assert first.export(b"port", b"x", 40) == second.export(b"port", b"x", 40)
    assert first.export(b"port", b"x") != first.export(b"port", b"y") != first.export(b"p", b"ort")
    send, receive = first.take()
    peer_send, peer_receive = second.take()
    assert (send.key, send.iv) == (peer_receive.key, peer_receive.iv)
    assert (receive.key, receive.iv) == (peer_send.key, peer_send.iv)
    assert len({send.key, receive.key}) == 2
    assert len({send.iv, receive.iv}) == 2


def test_links_take_the_first_suite_of_the_roster(make_pair: Callable[..., Any]) -> None:
    first, _ = make_pair(DEFAULT_SUITES).handshake()
    assert first.suite is DEFAULT_SUITES[0]
    first, _ = make_pair(tuple(reversed(DEFAULT_SUITES))).handshake()
    assert first.suite is DEFAULT_SUITES[-1]


def test_a_build_without_mlkem_does_not_settle_on_less(
    make_pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Suite, "supported", property(lambda suite: "mlkem" not in suite))
    for end in ("initiator", "responder"):
        with pytest.raises(HandshakeError) as error:
            getattr(make_pair(DEFAULT_SUITES), end)()
        assert error.value.reason == "SUITE_NOT_SUPPORTED"


def test_two_handshakes_share_nothing(pair: Any) -> None:
    one, _ = pair.handshake()
    two, _ = pair.handshake()
    assert one.session_id != two.session_id
    assert one.take()[0].key != two.take()[0].key


def test_the_closing_edge_is_initiated_by_the_lower_rank(make_pair: Callable[..., Any]) -> None:
    signers = (SoftwareSigner.generate(), SoftwareSigner.generate())
    forward = make_pair(signers=signers)
    closing = make_pair(signers=signers, from_rank=1, to_rank=0)
    one, _ = forward.handshake()
    two, _ = closing.handshake()
    assert one.take()[0].key != two.take()[0].key
    with pytest.raises(HandshakeError) as error:
        Initiator(closing.params[1], closing.signers[1])
    assert error.value.reason == "WRONG_ROLE"
    with pytest.raises(HandshakeError):
        Responder(closing.params[0], closing.signers[0], EphemeralLedger())


def test_a_signer_that_is_not_this_member_is_refused(pair: Any) -> None:
    with pytest.raises(HandshakeError) as error:
        Initiator(pair.params[0], SoftwareSigner.generate())
    assert error.value.reason == "WRONG_IDENTITY"


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("cluster", "other", "WRONG_CLUSTER"),
        ("ring", "ring-1", "WRONG_RING"),
        ("epoch", 8, "WRONG_EPOCH_OR_LINK"),
        ("to_rank", 2, "WRONG_EPOCH_OR_LINK"),
        ("roster_version", 4, "WRONG_EPOCH_OR_LINK"),
        ("roster_hash", b"\x56" * 32, "ROSTER_MISMATCH"),
    ],
)
def test_ends_that_expect_different_things_refuse(pair: Any, field: str, value: object, reason: str) -> None:
    assert refusal(pair.responder(), pair.initiator(**{field: value}).start()) == reason


def test_a_hello_for_another_responder_is_refused(pair: Any) -> None:
    other = SoftwareSigner.generate().public_key
    hello = pair.initiator(peer_id=member_id(other), peer_key=other).start()
    assert refusal(pair.responder(), hello) == "NOT_FOR_ME"


def test_rewriting_the_hello_in_flight_is_found_by_the_initiator(pair: Any) -> None:
    """A responder that was lied to about the hello signs another transcript."""
    initiator = pair.initiator()
    fields = unpack_fields(initiator.start()[1:], count=9, max_bytes=MAX_FRAME_BYTES)
    fields[8] = secrets.token_bytes(32)
    reply = pair.responder().on_message(b"\x01" + pack_fields(*fields)).message
    assert refusal(initiator, reply) == "BAD_PROOF"


def test_another_valid_member_in_the_place_of_the_expected_responder(
    make_pair: Callable[..., Any], pair: Any
) -> None:
    """The expected peer is replaced by a member whose own keys are fine: even with the wire ids rewritten."""
    third = SoftwareSigner.generate()
    honest = pair.initiator()
    fields = unpack_fields(honest.start()[1:], count=9, max_bytes=MAX_FRAME_BYTES)
    fields[5] = member_id(third.public_key).encode()
    params = dataclasses.replace(pair.params[1], own_id=member_id(third.public_key))
    impostor = Responder(params, third, EphemeralLedger(), clock=pair.clock)
    reply = impostor.on_message(b"\x01" + pack_fields(*fields)).message
    assert reply is not None
    assert refusal(honest, reply) == "BAD_PROOF"


def test_a_share_that_comes_twice_at_once_gets_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handshakes run in threads: the second may look before the first has noted what it took."""
    together, taken = threading.Barrier(2), list[bytes]()

    class Seen(OrderedDict[bytes, None]):
        def __contains__(self, name: object) -> bool:
            known = super().__contains__(name)
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(1.0)
            return known

    monkeypatch.setattr(handshake, "OrderedDict", Seen)
    ledger = EphemeralLedger()

    def claim() -> None:
        with contextlib.suppress(HandshakeError):
            ledger.claim(b"share")
            taken.append(b"share")

    threads = [threading.Thread(target=claim) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1


class Thief:
    """A signer that claims one key and signs with another, or lets a test forge each part of a proof."""

    key_type = "software"

    def __init__(self, claimed: bytes, signer: SoftwareSigner, label: Label | None = None) -> None:
        self.public_key = claimed
        self._signer = signer
        self._label = label

    def sign(self, label: Label, content: bytes) -> bytes:
        return self._signer.sign(self._label or label, content)


def test_claiming_the_expected_key_without_having_it_is_refused(pair: Any) -> None:
    initiator = pair.initiator()
    thief = Thief(pair.signers[1].public_key, SoftwareSigner.generate())
    impostor = Responder(pair.params[1], thief, EphemeralLedger(), clock=pair.clock)
    reply = impostor.on_message(initiator.start()).message
    assert refusal(initiator, reply) == "BAD_SIGNATURE"


def test_key_compromise_impersonation(pair: Any) -> None:
    """A thief of the initiator's key still cannot pose as the responder towards it."""
    initiator = pair.initiator()
    thief = Thief(pair.signers[1].public_key, pair.signers[0])
    impostor = Responder(pair.params[1], thief, EphemeralLedger(), clock=pair.clock)
    assert refusal(initiator, impostor.on_message(initiator.start()).message) == "BAD_SIGNATURE"


@pytest.mark.parametrize("label", [label for label in Label if label is not Label.HANDSHAKE])
def test_a_signature_under_another_label_is_refused(pair: Any, label: Label) -> None:
    initiator = pair.initiator()
    thief = Thief(pair.signers[1].public_key, pair.signers[1], label)
    responder = Responder(pair.params[1], thief, EphemeralLedger(), clock=pair.clock)
    assert refusal(initiator, responder.on_message(initiator.start()).message) == "BAD_SIGNATURE"


def test_identity_misbinding(pair: Any) -> None:
    """An attacker who presents a third identity of its own inside a proof is not the expected peer."""
    responder = pair.responder()
    third = SoftwareSigner.generate()
    signer = Thief(pair.signers[0].public_key, third)
    attacker = Initiator(pair.params[0], signer, clock=pair.clock)
    signer.public_key = third.public_key
    proof = attacker.on_message(responder.on_message(attacker.start()).message).message
    assert refusal(responder, proof) == "WRONG_PEER"


def test_a_peer_with_our_own_identity_is_refused(pair: Any) -> None:
    initiator = pair.initiator()
    signer = Thief(pair.signers[1].public_key, pair.signers[0])
    mirror = Responder(pair.params[1], signer, EphemeralLedger(), clock=pair.clock)
    signer.public_key = pair.signers[0].public_key
    assert refusal(initiator, mirror.on_message(initiator.start()).message) == "OWN_IDENTITY"


def reseal(
    machine: Any, suite: Suite, role: bytes, sealed: bytes, change: Callable[[list[bytes]], None]
) -> bytes:
    """Open a proof with the secrets of the machine that made it (an insider), change it, seal it again."""
    aead = suite.aead(expand(machine.secret, role + b" handshake key", machine.transcript))
    fields = unpack_fields(aead.decrypt(bytes(12), sealed, machine.transcript), count=3, max_bytes=512)
    change(fields)
    plain = pack_fields(*fields) if len(fields) == 3 else fields[0]
    return aead.encrypt(bytes(12), plain, machine.transcript)


class LeakyResponder(Responder):
    """A responder that remembers what its proof was sealed with, and shows what it keeps."""

    def _prove(self, suite: Suite, role: bytes) -> bytes:
        self.secret, self.transcript = self._secret, self._transcript
        return super()._prove(suite, role)

    @property
    def kept(self) -> bytes:
        return self._secret


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda fields: fields.__setitem__(2, bytes(32)), "BAD_MAC"),
        (lambda fields: fields.__setitem__(2, b""), "BAD_MAC"),
        (lambda fields: fields.__setitem__(1, b""), "BAD_MAC"),
        (lambda fields: fields.__setitem__(1, fields[1] + b"\x00"), "BAD_MAC"),
        (lambda fields: fields.__setitem__(0, b""), "WRONG_PEER"),
        (lambda fields: fields.append(b""), "MALFORMED"),
        (lambda fields: fields.pop(), "MALFORMED"),
    ],
)
def test_mac_only_signature_only_and_malformed_proofs(
    pair: Any, change: Callable[[list[bytes]], None], reason: str
) -> None:
    initiator = pair.initiator()
    responder = LeakyResponder(pair.params[1], pair.signers[1], EphemeralLedger(), clock=pair.clock)
    reply = responder.on_message(initiator.start()).message
    assert reply is not None
    fields = unpack_fields(reply[1:], count=4, max_bytes=MAX_FRAME_BYTES)
    suite = Suite.from_code(fields[0][0])
    fields[3] = reseal(responder, suite, b"responder", fields[3], change)
    assert refusal(initiator, b"\x02" + pack_fields(*fields)) == reason


def test_a_valid_mac_with_a_bad_signature_is_refused(pair: Any) -> None:
    initiator = pair.initiator()
    responder = LeakyResponder(pair.params[1], pair.signers[1], EphemeralLedger(), clock=pair.clock)
    reply = responder.on_message(initiator.start()).message
    assert reply is not None
    fields = unpack_fields(reply[1:], count=4, max_bytes=MAX_FRAME_BYTES)

    def forge(proof: list[bytes]) -> None:
        proof[1] = SoftwareSigner.generate().sign(Label.HANDSHAKE, b"")
        key = expand(responder.secret, b"responder mac", responder.transcript)
        content = pack_fields(b"responder", responder.transcript, proof[0], proof[1])
        proof[2] = hmac.digest(key, content, "sha256")

    fields[3] = reseal(responder, Suite.from_code(fields[0][0]), b"responder", fields[3], forge)
    assert refusal(initiator, b"\x02" + pack_fields(*fields)) == "BAD_SIGNATURE"


def test_reflection_of_each_message(pair: Any) -> None:
    (hello, reply, proof, finished), _, _ = frames(pair)
    for frame in (hello, proof):
        initiator = pair.initiator()
        initiator.start()
        assert refusal(initiator, frame) == "OUT_OF_ORDER"
    for frame in (reply, finished, proof):
        assert refusal(pair.responder(), frame) == "OUT_OF_ORDER"
    initiator = pair.initiator()
    own_hello = initiator.start()
    assert refusal(initiator, own_hello) == "OUT_OF_ORDER"
    assert refusal(initiator, b"\x02" + own_hello[1:]) == "OUT_OF_ORDER"


def test_the_own_ephemeral_sent_back_is_refused(pair: Any) -> None:
    initiator = pair.initiator()
    hello = unpack_fields(initiator.start()[1:], count=9, max_bytes=MAX_FRAME_BYTES)
    fields = [bytes([Suite.X25519_CHACHA20POLY1305.code]), hello[7], hello[8], bytes(300)]
    assert refusal(initiator, b"\x02" + pack_fields(*fields)) == "OWN_EPHEMERAL"


def test_swapped_roles_cannot_use_each_others_proofs(pair: Any) -> None:
    """The responder's proof shown back to it as the initiator's."""
    initiator, responder = pair.initiator(), pair.responder()
    reply = responder.on_message(initiator.start()).message
    sealed = unpack_fields(reply[1:], count=4, max_bytes=MAX_FRAME_BYTES)[3]
    assert refusal(responder, b"\x03" + sealed) == "BAD_PROOF"


def test_replay_of_each_message_across_sessions(pair: Any) -> None:
    (hello, reply, proof, finished), _, _ = frames(pair)
    assert refusal(pair.responder(), hello) == "REPLAYED"
    initiator = pair.initiator()
    initiator.start()
    assert refusal(initiator, reply) == "BAD_PROOF"
    initiator, responder = pair.initiator(), pair.responder()
    fresh = responder.on_message(initiator.start()).message
    assert refusal(responder, proof) == "BAD_PROOF"
    initiator.on_message(fresh)
    assert refusal(initiator, finished) == "BAD_CONFIRMATION"


def test_interleaved_sessions_do_not_mix(pair: Any) -> None:
    first, second = pair.initiator(), pair.initiator()
    one, two = pair.responder(), pair.responder()
    reply_one = one.on_message(first.start()).message
    reply_two = two.on_message(second.start()).message
    assert refusal(first, reply_two) == "BAD_PROOF"
    assert refusal(second, reply_one) == "BAD_PROOF"


def test_a_roster_change_in_between_ends_the_handshake(pair: Any) -> None:
    (hello, *_), _, _ = frames(pair)
    newer = pair.responder(roster_version=4, roster_hash=b"\x57" * 32)
    assert refusal(newer, hello) == "WRONG_EPOCH_OR_LINK"


def test_one_attempt_per_ephemeral(pair: Any) -> None:
    hello = pair.initiator().start()
    pair.responder().on_message(hello)
    assert refusal(pair.responder(), hello) == "REPLAYED"
    fields = unpack_fields(hello[1:], count=9, max_bytes=MAX_FRAME_BYTES)
    fields[8] = secrets.token_bytes(32)
    assert refusal(pair.responder(), b"\x01" + pack_fields(*fields)) == "REPLAYED"


def test_the_ledger_is_bounded() -> None:
    ledger = EphemeralLedger(capacity=2)
    for share in (b"a", b"b", b"c"):
        ledger.claim(share)
    with pytest.raises(HandshakeError):
        ledger.claim(b"c")
    ledger.claim(b"a")  # the oldest is forgotten


@pytest.mark.parametrize("stage", range(3))
def test_a_slow_peer_runs_out_of_time(pair: Any, stage: int) -> None:
    initiator, responder = pair.initiator(), pair.responder()
    machines = [responder, initiator, responder]
    frame = initiator.start()
    for index in range(stage):
        frame = machines[index].on_message(frame).message
    pair.clock.advance(DEADLINE_SECONDS)
    assert refusal(machines[stage], frame) == "HANDSHAKE_TIMEOUT"


@pytest.mark.parametrize("codes", [b"", b"\x03", b"\x02", b"\x01", b"\x09", b"\x04\x03", b"\x04\x03\x02\x01"])
def test_any_other_offer_than_the_rosters_first_suite_is_refused(
    make_pair: Callable[..., Any], codes: bytes
) -> None:
    """Whether it was altered in flight or the initiator itself would rather have less."""
    pair = make_pair(DEFAULT_SUITES)
    fields = unpack_fields(pair.initiator().start()[1:], count=9, max_bytes=MAX_FRAME_BYTES)
    fields[6] = codes
    assert refusal(pair.responder(), b"\x01" + pack_fields(*fields)) == "WRONG_SUITE"


@pytest.mark.parametrize("weak", DEFAULT_SUITES[1:])
def test_neither_end_can_settle_on_less_than_the_roster_lists_first(
    make_pair: Callable[..., Any], weak: Suite
) -> None:
    """Each of the other suites is in the roster too, later."""
    pair = make_pair(DEFAULT_SUITES)
    assert refusal(pair.responder(), pair.initiator(suites=(weak,)).start()) == "WRONG_SUITE"
    initiator = pair.initiator()
    initiator.start()
    fields = [bytes([weak.code]), InitiatorShare.generate(weak.group).public]
    assert refusal(initiator, b"\x02" + pack_fields(*fields, bytes(32), bytes(300))) == "WRONG_SUITE"


def test_version_byte_and_protocol_name_are_checked(pair: Any) -> None:
    hello = pair.initiator().start()
    fields = unpack_fields(hello[1:], count=9, max_bytes=MAX_FRAME_BYTES)
    fields[0] = b"sealring/v0 sigma"
    assert refusal(pair.responder(), b"\x01" + pack_fields(*fields)) == "WRONG_PROTOCOL"
    assert refusal(pair.responder(), b"\x00" + hello[1:]) == "OUT_OF_ORDER"
    assert refusal(pair.responder(), b"") == "OUT_OF_ORDER"


@pytest.mark.parametrize("stage", range(4))
def test_truncation_at_every_offset_and_one_byte_more(pair: Any, stage: int) -> None:
    def reach() -> tuple[Any, bytes]:
        initiator, responder = pair.initiator(), pair.responder()
        machines = [responder, initiator, responder, initiator]
        frame = initiator.start()
        for index in range(stage):
            frame = machines[index].on_message(frame).message
        return machines[stage], frame

    machine, frame = reach()
    cuts = range(len(frame)) if len(frame) < 400 else [*range(0, len(frame), 7), len(frame) - 1]
    for cut in cuts:
        with pytest.raises(HandshakeError):
            machine.on_message(frame[: min(cut, len(frame) - 1)])
        machine, frame = reach()
    with pytest.raises(HandshakeError):
        machine.on_message(frame + b"\x00")


def test_a_huge_length_is_refused_before_parsing(pair: Any) -> None:
    assert refusal(pair.responder(), b"\x01\xff\xff\xff\xff") == "MALFORMED"


@SHARED
@given(data=st.data())
def test_any_flipped_bit_ends_the_handshake(pair: Any, data: st.DataObject) -> None:
    initiator, responder = pair.initiator(), pair.responder()
    stage = data.draw(st.integers(0, 3))
    place = data.draw(st.integers(0, 1 << 16))
    frame = initiator.start()
    order = [responder, initiator, responder, initiator]
    with pytest.raises(HandshakeError):
        for index, machine in enumerate(order):
            if index == stage:
                position = place % (len(frame) * 8)
                mutable = bytearray(frame)
                mutable[position // 8] ^= 1 << position % 8
                frame = bytes(mutable)
            outcome = machine.on_message(frame)
            frame = outcome.message or b""


@SHARED
@given(garbage=st.binary(max_size=600), kind=st.integers(0, 5))
def test_garbage_never_raises_anything_else(pair: Any, garbage: bytes, kind: int) -> None:
    initiator = pair.initiator()
    initiator.start()
    for machine in (pair.responder(), initiator):
        with pytest.raises(HandshakeError):
            machine.on_message(bytes([kind]) + garbage)


def test_machines_are_single_use(pair: Any) -> None:
    all_frames, initiator, responder = frames(pair)
    assert initiator.on_message(all_frames[3]).session is not None
    for machine in (initiator, responder):
        for frame in all_frames:
            with pytest.raises(HandshakeError):
                machine.on_message(frame)
    with pytest.raises(HandshakeError):
        initiator.start()


def test_a_machine_that_failed_or_was_started_cannot_be_started(pair: Any) -> None:
    initiator = pair.initiator()
    with pytest.raises(HandshakeError):
        initiator.on_message(b"\x02")
    started = pair.initiator()
    started.start()
    for machine in (initiator, started):
        with pytest.raises(HandshakeError) as error:
            machine.start()
        assert error.value.reason == "OUT_OF_ORDER"


def test_errors_and_the_end_drop_the_secret(pair: Any) -> None:
    for whole in (False, True):
        initiator = pair.initiator()
        responder = LeakyResponder(pair.params[1], pair.signers[1], EphemeralLedger(), clock=pair.clock)
        reply = responder.on_message(initiator.start()).message
        assert responder.kept
        if whole:
            responder.on_message(initiator.on_message(reply).message)
        else:
            refusal(responder, b"\x03")
        assert not responder.kept


def test_a_signer_that_fails_ends_the_handshake_with_its_reason(pair: Any) -> None:
    class Broken(Thief):
        def sign(self, label: Label, content: bytes) -> bytes:
            raise InvalidInput("enclave is locked", reason="ENCLAVE_LOCKED")

    broken = Broken(pair.signers[1].public_key, pair.signers[1])
    responder = Responder(pair.params[1], broken, EphemeralLedger(), clock=pair.clock)
    assert refusal(responder, pair.initiator().start()) == "ENCLAVE_LOCKED"


def test_machines_and_keys_cannot_be_copied_or_pickled(pair: Any) -> None:
    first, _ = pair.handshake()
    for thing in (pair.initiator(), pair.responder(), first, first.take()[0]):
        for action in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(RecordError):
                action(thing)
        assert "b'" not in repr(thing), "no bytes, and so no key"


def test_params_come_from_a_verified_roster(make_signed_cluster: Callable[..., Any]) -> None:
    cluster = make_signed_cluster()
    roster = cluster.verified()
    ids = [member_id(signer.public_key) for signer in cluster.signers]
    params = LinkParams.from_roster(roster, "demo-0", 4, 2, ids[0])
    assert (params.from_rank, params.to_rank, params.own_rank) == (2, 0, 0)
    assert params.initiates
    assert params.peer_id == ids[2]
    assert params.peer_key == cluster.signers[2].public_key
    assert params.roster_hash == roster.hash
    with pytest.raises(NotFound):
        LinkParams.from_roster(roster, "demo-0", 4, 0, ids[2])
    with pytest.raises(NotFound):
        LinkParams.from_roster(roster, "ring-9", 4, 0, ids[0])


def test_a_ring_of_one_has_no_links(make_signed_cluster: Callable[..., Any]) -> None:
    cluster = make_signed_cluster(1)
    own = member_id(cluster.signers[0].public_key)
    with pytest.raises(HandshakeError) as error:
        LinkParams.from_roster(cluster.verified(), "demo-0", 1, 0, own)
    assert error.value.reason == "BAD_LINK"


def test_lengths_inside_messages_are_exact(pair: Any) -> None:
    for nonce in (b"", bytes(31), bytes(33)):
        fields = unpack_fields(pair.initiator().start()[1:], count=9, max_bytes=MAX_FRAME_BYTES)
        fields[8] = nonce
        assert refusal(pair.responder(), b"\x01" + pack_fields(*fields)) == "MALFORMED"
    for index, value, reason in (
        (0, b"", "WRONG_SUITE"),
        (0, b"\x01\x01", "WRONG_SUITE"),
        (2, bytes(31), "MALFORMED"),
    ):
        initiator, responder = pair.initiator(), pair.responder()
        reply = responder.on_message(initiator.start()).message
        fields = unpack_fields(reply[1:], count=4, max_bytes=MAX_FRAME_BYTES)
        fields[index] = value
        assert refusal(initiator, b"\x02" + pack_fields(*fields)) == reason


@SHARED
@given(deliveries=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=40))
def test_any_delivery_of_any_frames_gives_only_matching_sessions(
    pair: Any, deliveries: list[tuple[int, int]]
) -> None:
    """A network that delivers every frame anywhere, in any order, any number of times."""
    initiators, responders = [pair.initiator() for _ in range(3)], [pair.responder() for _ in range(3)]
    machines = [*initiators, *responders]
    pool = [initiator.start() for initiator in initiators]
    sessions: dict[int, Any] = {}
    for who, what in deliveries:
        try:
            outcome = machines[who].on_message(pool[what % len(pool)])
        except HandshakeError:
            continue
        if outcome.message is not None:
            pool.append(outcome.message)
        if outcome.session is not None:
            assert who not in sessions
            sessions[who] = outcome.session
    for who, session in sessions.items():
        partners = [other for other, peer in sessions.items() if peer.session_id == session.session_id]
        assert len(partners) <= 2
        if who < 3:
            (partner,) = [other for other in partners if other >= 3]
            assert sessions[partner].transcript_hash == session.transcript_hash


@pytest.mark.parametrize("first", [b"", b"X", b"\x01", b"\x02", b"\x03", b"\x04"])
def test_nothing_is_heard_before_the_start(pair: Any, first: bytes) -> None:
    assert refusal(pair.initiator(), first + bytes(64)) == "OUT_OF_ORDER"


def test_the_largest_frame_is_looked_at(pair: Any) -> None:
    for length, reason in ((MAX_FRAME_BYTES, "OUT_OF_ORDER"), (MAX_FRAME_BYTES + 1, "FRAME_TOO_LARGE")):
        initiator = pair.initiator()
        initiator.start()
        assert refusal(initiator, bytes(length)) == reason
        assert refusal(pair.responder(), bytes(length)) == reason
