"""Sealed records: what is bound, what poisons, and that no nonce is ever used twice."""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sealring.mesh.crypto import Suite
from sealring.mesh.errors import RecordError
from sealring.node.link import records
from sealring.node.link.keys import MAX_U64, SessionKeys
from sealring.node.link.records import CONFIRMATION_BYTES, REKEY_BYTES, REKEY_RECORDS, REKEY_SECONDS, Link
from sealring.node.wire.channel import MAX_RECORD_BYTES, Kind, RecordHeader

SHARED = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
DIGEST = bytes(range(32))


def header(length: int = 64, **changes: Any) -> RecordHeader:
    base = RecordHeader(Kind.ACTIVATIONS, 5, DIGEST, "bfloat16", (1, length // 2), length)
    return base._replace(**changes)


def seal(link: Link, plain: bytes, head: RecordHeader | None = None) -> bytearray:
    out = bytearray(len(plain) + 16)
    assert link.sealer.seal_into(plain, out, head or header(len(plain))) == len(out)
    return out


def open_(link: Link, sealed: bytes, head: RecordHeader | None = None) -> bytes:
    out = bytearray(len(sealed) - 16)
    assert link.opener.open_into(sealed, out, head or header(len(out))) == len(out)
    return bytes(out)


def refusal(action: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(RecordError) as error:
        action(*arguments)
    return error.value.reason


def assert_dead(link: Link) -> None:
    assert link.poisoned
    assert refusal(link.sealer.seal_into, b"x", bytearray(17), header(1)) == "LINK_POISONED"
    assert refusal(link.opener.open_into, bytes(17), bytearray(1), header(1)) == "LINK_POISONED"
    assert refusal(link.install, None, 10) == "LINK_POISONED"


@pytest.mark.parametrize("suite", list(Suite))
def test_records_cross_in_both_directions(make_pair: Callable[..., Any], suite: Suite) -> None:
    sender, receiver = make_pair([suite]).link()
    sender.opener.open_confirmation(receiver.sealer.seal_confirmation())
    for step in range(5):
        for link, peer in ((sender, receiver), (receiver, sender)):
            plain = os.urandom(100 * step)
            head = header(len(plain), step=step)
            assert open_(peer, seal(link, plain, head), head) == plain


def test_the_wire_is_ciphertext_and_tag_only(pair: Any) -> None:
    sender, _ = pair.link()
    assert len(seal(sender, bytes(1000))) == 1016


def test_sealing_and_opening_in_place(pair: Any) -> None:
    sender, receiver = pair.link()
    buffer = bytearray(b"a" * 64 + bytes(16))
    sender.sealer.seal_into(memoryview(buffer)[:64], buffer, header())
    assert buffer[:64] != b"a" * 64
    receiver.opener.open_into(buffer, memoryview(buffer)[:64], header())
    assert buffer[:64] == b"a" * 64


def test_nothing_goes_before_the_confirmation(pair: Any) -> None:
    first, second = pair.handshake()
    sender, receiver = Link(first), Link(second)
    assert refusal(sender.sealer.seal_into, b"x", bytearray(17), header(1)) == "NOT_CONFIRMED"
    assert refusal(receiver.opener.open_into, bytes(17), bytearray(1), header(1)) == "NOT_CONFIRMED"
    assert_dead(sender)
    assert_dead(receiver)
    assert refusal(sender.sealer.seal_confirmation) == "LINK_POISONED"
    assert refusal(receiver.opener.open_confirmation, bytes(48)) == "LINK_POISONED"


@pytest.mark.parametrize(
    "data", [b"", bytes(CONFIRMATION_BYTES), bytes(47), bytes(49), b"GET / HTTP/1.1\r\n"]
)
def test_a_stranger_on_the_ring_port_is_found_by_the_confirmation(pair: Any, data: bytes) -> None:
    _, second = pair.handshake()
    receiver = Link(second)
    assert refusal(receiver.opener.open_confirmation, data) == "RECORD_REFUSED"
    assert_dead(receiver)


def test_the_confirmation_of_another_session_or_direction_is_refused(pair: Any) -> None:
    (one, two), (other, _) = pair.handshake(), pair.handshake()
    foreign = Link(other).sealer.seal_confirmation()
    receiver = Link(two)
    own = receiver.sealer.seal_confirmation()
    assert refusal(receiver.opener.open_confirmation, foreign) == "RECORD_REFUSED"
    assert_dead(receiver)
    reflected = Link(one)
    mine = reflected.sealer.seal_confirmation()
    assert refusal(reflected.opener.open_confirmation, mine) == "RECORD_REFUSED"
    assert own != mine


def test_confirmation_happens_once_and_only_through_its_own_call(pair: Any) -> None:
    sender, receiver = pair.link()
    assert refusal(sender.sealer.seal_confirmation) == "CONFIRMED_BEFORE"
    assert_dead(sender)
    assert refusal(receiver.opener.open_confirmation, bytes(48)) == "CONFIRMED_BEFORE"
    assert_dead(receiver)
    sender, receiver = pair.link()
    head = header(32, kind=Kind.CONFIRM)
    assert refusal(sender.sealer.seal_into, bytes(32), bytearray(48), head) == "BAD_HEADER"
    assert refusal(receiver.opener.open_into, bytes(48), bytearray(32), head) == "BAD_HEADER"


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": Kind.TOKENS},
        {"step": 6},
        {"digest": bytes(32)},
        {"dtype": "float16"},
        {"shape": (32, 1)},
        {"shape": (1, 1, 32)},
        {"shape": ()},
    ],
)
def test_every_field_of_the_header_is_bound(pair: Any, changes: dict[str, Any]) -> None:
    sender, receiver = pair.link()
    sealed = seal(sender, bytes(64))
    out = bytearray(b"\xee" * 64)
    assert refusal(receiver.opener.open_into, sealed, out, header(**changes)) == "RECORD_REFUSED"
    assert out == bytes(64)
    assert_dead(receiver)


def test_length_is_bound(pair: Any) -> None:
    for length in (63, 65):
        sender, receiver = pair.link()
        sealed = seal(sender, bytes(64))
        with pytest.raises(RecordError):
            receiver.opener.open_into(sealed, bytearray(64), header(length=length, shape=(1, 32)))
        assert_dead(receiver)


def test_the_length_is_checked_even_where_the_tag_agrees(pair: Any) -> None:
    """Both ends announce the same wrong length: still refused, at the sealer already."""
    sender, _ = pair.link()
    out = bytearray(80)
    assert refusal(sender.sealer.seal_into, bytes(64), out, header()._replace(length=60)) == "BAD_LENGTH"
    assert_dead(sender)
    assert out == bytes(80)


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": bytes(31)},
        {"digest": bytes(33)},
        {"digest": b""},
        {"step": -1},
        {"step": 1 << 64},
        {"dtype": "x" * 17},
        {"dtype": "é"},
        {"shape": (1,) * 9},
        {"shape": (-1,)},
        {"shape": [1, 32]},
        {"length": -1},
        {"length": MAX_RECORD_BYTES + 1},
    ],
)
def test_malformed_headers_poison(pair: Any, changes: dict[str, Any]) -> None:
    sender, receiver = pair.link()
    with pytest.raises(RecordError):
        sender.sealer.seal_into(bytes(64), bytearray(80), header(**changes))
    assert_dead(sender)
    with pytest.raises(RecordError):
        receiver.opener.open_into(bytes(80), bytearray(64), header(**changes))
    assert_dead(receiver)


@pytest.mark.parametrize("out", [bytearray(79), bytearray(81), bytes(80)])
def test_wrong_buffers_poison(pair: Any, out: Any) -> None:
    sender, receiver = pair.link()
    with pytest.raises(RecordError):
        sender.sealer.seal_into(bytes(64), out, header())
    assert_dead(sender)
    with pytest.raises(RecordError):
        receiver.opener.open_into(bytes(80), out[:-16][:63], header())
    assert_dead(receiver)


def test_a_largest_record_passes_and_larger_payloads_are_split(pair: Any) -> None:
    sender, receiver = pair.link()
    plain = bytes(MAX_RECORD_BYTES)
    assert open_(receiver, bytes(seal(sender, plain))) == plain
    more = MAX_RECORD_BYTES + 1
    out = bytearray(more + 16)
    assert refusal(sender.sealer.seal_into, bytes(more), out, header(more)) == "RECORD_TOO_LARGE"


@SHARED
@given(position=st.integers(0, 80 * 8 - 1))
def test_any_flipped_bit_poisons_and_leaves_no_plaintext(pair: Any, position: int) -> None:
    sender, receiver = pair.link()
    sealed = seal(sender, b"p" * 64)
    sealed[position // 8] ^= 1 << position % 8
    out = bytearray(64)
    assert refusal(receiver.opener.open_into, sealed, out, header()) == "RECORD_REFUSED"
    assert out == bytes(64)
    assert_dead(receiver)


def test_duplicate_gap_reorder_and_truncation(pair: Any) -> None:
    for order in ([0, 0], [1], [1, 0]):
        sender, receiver = pair.link()
        sealed = [seal(sender, bytes(64)) for _ in range(2)]
        with pytest.raises(RecordError):
            for index in order:
                open_(receiver, sealed[index])
        assert_dead(receiver)
    for cut in (*range(0, 80, 9), 79):
        sender, receiver = pair.link()
        with pytest.raises(RecordError):
            receiver.opener.open_into(seal(sender, bytes(64))[:cut], bytearray(64), header())
        assert_dead(receiver)
    sender, receiver = pair.link()
    with pytest.raises(RecordError):
        receiver.opener.open_into(seal(sender, bytes(64)) + b"\x00", bytearray(65), header())


def test_cross_direction(pair: Any) -> None:
    sender, receiver = pair.link()
    sender.opener.open_confirmation(receiver.sealer.seal_confirmation())
    assert refusal(open_, sender, bytes(seal(sender, bytes(64)))) == "RECORD_REFUSED"


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 8},
        {"ring": "ring-1"},
        {"cluster": "other"},
        {"from_rank": 1, "to_rank": 0},
        {"roster_hash": bytes(32)},
    ],
)
def test_cross_link_epoch_and_roster_with_the_same_keys(
    pair: Any, make_pair: Callable[..., Any], changes: dict[str, Any]
) -> None:
    """The associated data alone tells links apart: here even key and IV are the same."""
    first, second = pair.handshake()
    moved = make_pair(signers=pair.signers, **changes).params[1].context
    sender, receiver = Link(first), Link(with_context(second, moved))
    assert refusal(receiver.opener.open_confirmation, sender.sealer.seal_confirmation()) == "RECORD_REFUSED"


def with_context(keys: SessionKeys, context: Any) -> SessionKeys:
    send, receive = keys.take()
    return SessionKeys(keys.suite, context, keys.session_id, keys.transcript_hash, send, receive, None)


def test_cross_session_with_the_same_keys(pair: Any) -> None:
    first, second = pair.handshake()
    send, receive = second.take()
    other = SessionKeys(second.suite, second.context, bytes(32), second.transcript_hash, send, receive, None)
    confirmation = Link(first).sealer.seal_confirmation()
    assert refusal(Link(other).opener.open_confirmation, confirmation) == "RECORD_REFUSED"


def test_a_confirmation_that_opens_but_names_another_transcript(pair: Any) -> None:
    first, second = pair.handshake()
    send, receive = second.take()
    other = SessionKeys(second.suite, second.context, second.session_id, bytes(32), send, receive, None)
    link = Link(other)
    confirmation = Link(first).sealer.seal_confirmation()
    assert refusal(link.opener.open_confirmation, confirmation) == "RECORD_REFUSED"
    assert_dead(link)


def test_poison_reaches_the_other_direction(pair: Any) -> None:
    sender, receiver = pair.link()
    receiver.sealer.seal_confirmation()
    with pytest.raises(RecordError):
        open_(receiver, bytes(80))
    assert refusal(seal, receiver, b"x") == "LINK_POISONED"
    sender.poison("CARRIER_ENDED")
    sender.poison("LATER")
    assert sender.poisoned == "CARRIER_ENDED"
    assert refusal(seal, sender, b"x") == "LINK_POISONED"


def test_copying_and_pickling_raise(pair: Any) -> None:
    sender, _ = pair.link()
    for thing in (sender, sender.sealer, sender.opener, sender.sealer.session):
        for action in (copy.copy, copy.deepcopy, pickle.dumps):
            assert refusal(action, thing) == "KEY_COPIED"


def test_a_forked_child_cannot_seal(pair: Any) -> None:
    sender, receiver = pair.link()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            seal(sender, bytes(64))
            os.write(write, b"sealed")
        except RecordError as error:
            os.write(write, f"{error.reason} {sender.poisoned} {receiver.poisoned}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"LINK_POISONED FORKED FORKED"
    os.close(read)
    os.close(write)
    assert open_(receiver, bytes(seal(sender, bytes(64)))) == bytes(64)


def test_a_second_sealer_from_one_key_is_refused(pair: Any) -> None:
    first, _ = pair.handshake()
    data = first.to_carrier()
    Link(SessionKeys.from_carrier(data))
    assert refusal(Link, SessionKeys.from_carrier(data)) == "SESSION_REUSED"
    sender, _ = pair.link()
    assert refusal(sender.install, SessionKeys.from_carrier(data), 9) == "SESSION_REUSED"


def test_two_threads_in_one_direction_poison_the_link(pair: Any) -> None:
    """The second thread finds the first inside: forced here by a clock that seals from another thread."""
    first, _ = pair.handshake()
    reasons: list[str] = []

    def clock() -> float:
        if armed:
            armed.clear()
            thread = threading.Thread(
                target=lambda: reasons.append(refusal(link.sealer.seal_into, b"x", bytearray(17), header(1)))
            )
            thread.start()
            thread.join()
        return 0.0

    armed: list[bool] = []
    link = Link(first, clock=clock)
    link.sealer.seal_confirmation()
    armed.append(True)
    with pytest.raises(RecordError):
        seal(link, b"y")
    assert reasons == ["TWO_OWNERS"]
    assert link.poisoned == "TWO_OWNERS"


def test_an_interrupt_while_sealing_poisons(pair: Any) -> None:
    first, _ = pair.handshake()
    interrupt: list[BaseException] = []

    def clock() -> float:
        if interrupt:
            raise interrupt.pop()
        return 0.0

    link = Link(first, clock=clock)
    link.sealer.seal_confirmation()
    interrupt.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        seal(link, b"y")
    assert_dead(link)


def test_limits_ask_for_a_new_session_and_later_refuse(pair: Any) -> None:
    for name, soft, hard in (
        ("sequence", REKEY_RECORDS, 2 * REKEY_RECORDS),
        ("bytes", REKEY_BYTES, 2 * REKEY_BYTES - 64),
    ):
        sender, receiver = pair.link()
        for link, side in ((sender, sender.sealer), (receiver, receiver.opener)):
            assert not link.needs_rekey
            setattr(side.session, name, soft - (1 if name == "sequence" else 64))
            assert not link.needs_rekey
        open_(receiver, bytes(seal(sender, bytes(64))))
        assert sender.needs_rekey
        assert receiver.needs_rekey
        for side in (sender.sealer, receiver.opener):
            setattr(side.session, name, hard - (1 if name == "sequence" else 0))
            side.session.sequence = max(side.session.sequence, 2)
        open_(receiver, bytes(seal(sender, bytes(64))))
        assert refusal(seal, sender, bytes(64)) == "SESSION_USED_UP"
        assert refusal(receiver.opener.open_into, bytes(80), bytearray(64), header()) == "SESSION_USED_UP"
        assert_dead(sender)
        assert_dead(receiver)


def test_rekey_at_a_step_boundary_without_a_gap(pair: Any) -> None:
    sender, receiver = pair.link()
    steps = iter(range(100))

    def cross(count: int) -> None:
        for _ in range(count):
            head = header(step=next(steps))
            assert open_(receiver, bytes(seal(sender, bytes(64), head)), head) == bytes(64)

    cross(3)
    pair.clock.advance(REKEY_SECONDS)
    assert sender.needs_rekey
    first, second = pair.handshake()
    sender.install(first, at_step=6)
    receiver.install(second, at_step=6)
    assert not sender.needs_rekey
    cross(3)
    assert sender.sealer.session.sequence == 7
    cross(3)
    assert sender.sealer.session.sequence == 3
    assert sender.last_step == receiver.last_step == 8


def test_a_step_of_the_old_session_after_the_switch_poisons(pair: Any) -> None:
    sender, _ = pair.link()
    first, _ = pair.handshake()
    sender.install(first, at_step=6)
    seal(sender, bytes(64), header(step=6))
    assert refusal(seal, sender, bytes(64), header(step=5)) == "STEP_PAST"
    assert_dead(sender)


def test_ends_that_switch_at_different_steps_fail_closed(pair: Any) -> None:
    sender, receiver = pair.link()
    first, second = pair.handshake()
    sender.install(first, at_step=6)
    receiver.install(second, at_step=7)
    head = header(step=6)
    sealed = bytes(seal(sender, bytes(64), head))
    assert refusal(open_, receiver, sealed, head) == "RECORD_REFUSED"


def test_ends_that_prepared_different_sessions_for_one_step_fail_closed(pair: Any) -> None:
    """One end missed the end of a handshake and did it again: what it sends is not opened, nor retried."""
    sender, receiver = pair.link()
    first, _ = pair.handshake()
    _, second = pair.handshake()
    sender.install(first, at_step=6)
    receiver.install(second, at_step=6)
    before = header(step=5)
    assert open_(receiver, bytes(seal(sender, bytes(64), before)), before) == bytes(64)
    head = header(step=6)
    assert refusal(open_, receiver, bytes(seal(sender, bytes(64), head)), head) == "RECORD_REFUSED"
    assert_dead(receiver)


def test_install_refuses_what_does_not_fit(pair: Any, make_pair: Callable[..., Any]) -> None:
    sender, _ = pair.link()
    seal(sender, bytes(64), header(step=5))
    for step in (5, 0, -1, 1 << 64):
        assert refusal(sender.install, pair.handshake()[0], step) == "STEP_PAST"
    other = make_pair(signers=pair.signers, epoch=8)
    assert refusal(sender.install, other.handshake()[0], 9) == "OTHER_LINK"
    assert refusal(sender.install, pair.handshake()[1], 9) == "OTHER_LINK"
    older = make_pair(signers=pair.signers, roster_version=2)
    assert refusal(sender.install, older.handshake()[0], 9) == "OTHER_LINK"
    taken, _ = pair.handshake()
    taken.to_carrier()
    assert refusal(sender.install, taken, 9) == "KEYS_TAKEN"
    assert not sender.poisoned
    seal(sender, bytes(64), header(step=6))
    sender.install(pair.handshake()[0], 9)
    assert refusal(sender.install, pair.handshake()[0], 9) == "STEP_PAST"


def test_rekey_under_a_newer_roster(pair: Any, make_pair: Callable[..., Any]) -> None:
    sender, receiver = pair.link()
    newer = make_pair(signers=pair.signers, roster_version=4, roster_hash=bytes(32))
    first, second = newer.handshake()
    sender.install(first, 6)
    receiver.install(second, 6)
    head = header(step=6)
    open_(receiver, bytes(seal(sender, bytes(64), head)), head)


def test_an_unused_direction_keeps_a_bounded_number_of_prepared_sessions(pair: Any) -> None:
    sender, receiver = pair.link()
    for round_ in range(1, 8):
        first, second = pair.handshake()
        sender.install(first, 10 * round_)
        receiver.install(second, 10 * round_)
        head = header(step=10 * round_)
        open_(receiver, bytes(seal(sender, bytes(64), head)), head)
    assert len(sender.opener.pending) == 4
    assert not sender.sealer.pending


def test_poison_reaches_prepared_sessions(pair: Any) -> None:
    sender, _ = pair.link()
    sender.install(pair.handshake()[0], 6)
    sender.poison("X")
    assert refusal(seal, sender, bytes(64), header(step=7)) == "LINK_POISONED"


def test_a_nonce_of_another_length_is_refused(pair: Any) -> None:
    keys, _ = pair.handshake()
    send, receive = keys.take()
    object.__setattr__(send, "iv", bytes(8))
    bad = SessionKeys(keys.suite, keys.context, keys.session_id, bytes(32), send, receive, None)
    assert refusal(Link, bad) == "BAD_NONCE_LENGTH"


class RecordingAead:
    """An AEAD that fails the test when a nonce comes back under its key."""

    used: set[tuple[bytes, bytes]] = set()

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._aead = ChaCha20Poly1305(key)
        self.decrypt_into = self._aead.decrypt_into
        self.encrypt = self._aead.encrypt
        self.decrypt = self._aead.decrypt

    def encrypt_into(self, nonce: bytes, *arguments: Any) -> int:
        assert len(nonce) == 12
        assert (self._key, nonce) not in self.used
        self.used.add((self._key, nonce))
        return self._aead.encrypt_into(nonce, *arguments)


@SHARED
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["seal", "seal", "seal", "rekey", "fail", "reconnect"]), st.integers(0, 3)),
        min_size=10,
        max_size=60,
    )
)
def test_every_nonce_is_used_once_whatever_happens(pair: Any, actions: list[tuple[str, int]]) -> None:
    """A property over requests, lane churn, rekeys, failures and reconnects: (key, nonce) never repeats."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Suite, "aead", lambda suite, key: RecordingAead(key))
        RecordingAead.used.clear()
        links = pair.link()
        links[1].sealer.seal_confirmation()
        for action, choice in actions:
            link, side = links[choice % 2], choice % 2
            step = max(link.last_step, 0) + choice
            if action == "reconnect" or link.poisoned:
                links = pair.link()
                links[1].sealer.seal_confirmation()
            elif action == "rekey" and not link.sealer.pending:
                link.install(pair.handshake()[side], step + 1)
            elif action == "fail":
                with pytest.raises(RecordError):
                    link.sealer.seal_into(bytes(16), bytearray(3), header(16, step=step))
            else:
                seal(link, bytes(16), header(16, step=step, digest=bytes([choice]) * 32))


def test_headers_hash_to_different_associated_data() -> None:
    """Injective: no two headers share their associated data."""
    heads = [
        (Kind.TOKENS, "int32", (1,), 4),
        (Kind.TOKENS, "int32", (), 4),
        (Kind.TOKENS, "int3", (2, 1), 4),
        (Kind.TOKENS, "", (1,), 4),
        (Kind.SAMPLING, "int32", (1,), 4),
        (Kind.TOKENS, "int32", (1,), 5),
        (Kind.TOKENS, "int32", (1 << 40,), 4),
    ]
    assert len({hashlib.sha256(records.describe(*head)).digest() for head in heads}) == len(heads)


def test_a_prepared_session_does_not_get_round_the_confirmation(pair: Any) -> None:
    (first, second), (next_first, next_second) = pair.handshake(), pair.handshake()
    sender, receiver = Link(first), Link(second)
    sender.install(next_first, at_step=3)
    receiver.install(next_second, at_step=3)
    head = header(1, step=3)
    assert refusal(sender.sealer.seal_into, b"x", bytearray(17), head) == "NOT_CONFIRMED"
    assert refusal(receiver.opener.open_into, bytes(17), bytearray(1), head) == "NOT_CONFIRMED"


def test_a_peer_that_seals_more_than_it_announces_is_refused(pair: Any) -> None:
    """An insider binds one length and seals another: the receiver counts what it got."""
    sender, receiver = pair.link()
    session, head = sender.sealer.session, header(60, shape=(1, 32))
    described = records.describe(head.kind, head.dtype, head.shape, head.length)
    bound = session.prefix + records.pack_order(1, head.step) + DIGEST + described
    sealed = bytearray(80)
    session.cross((session.iv ^ 1).to_bytes(12, "big"), bytes(64), bound, sealed)
    out = bytearray(b"\xee" * 64)
    assert refusal(receiver.opener.open_into, sealed, out, head) == "BAD_LENGTH"
    assert out == bytes(64)
    assert_dead(receiver)


def test_the_largest_header_and_the_last_step_pass(pair: Any) -> None:
    sender, receiver = pair.link()
    largest = header(dtype="d" * 16, shape=(1,) * 8)
    assert open_(receiver, seal(sender, bytes(64), largest), largest) == bytes(64)
    for link, keys in zip((sender, receiver), pair.handshake(), strict=True):
        link.install(keys, MAX_U64)
    last = header(step=MAX_U64)
    assert open_(receiver, seal(sender, bytes(64), last), last) == bytes(64)


def test_several_prepared_sessions_begin_each_at_its_own_step(pair: Any) -> None:
    sender, receiver = pair.link()
    for at_step in (10, 20):
        for link, keys in zip((sender, receiver), pair.handshake(), strict=True):
            link.install(keys, at_step)
    for step, waiting in ((5, 2), (10, 1), (15, 1), (19, 1), (20, 0), (25, 0)):
        head = header(step=step)
        assert open_(receiver, bytes(seal(sender, bytes(64), head)), head) == bytes(64)
        assert (len(sender.sealer.pending), len(receiver.opener.pending)) == (waiting, waiting)


def test_the_reason_tells_an_old_session_from_a_past_step(pair: Any) -> None:
    for at_step, step, reason in ((6, 6, "SESSION_USED_UP"), (6, 5, "STEP_PAST")):
        sender, receiver = pair.link()
        for link, keys in zip((sender, receiver), pair.handshake(), strict=True):
            link.install(keys, at_step)
        open_(receiver, bytes(seal(sender, bytes(64), header(step=6))), header(step=6))
        pair.clock.advance(2 * REKEY_SECONDS)
        head = header(step=step)
        assert refusal(seal, sender, bytes(64), head) == reason
        assert refusal(receiver.opener.open_into, bytes(80), bytearray(64), head) == reason


def test_a_session_ends_at_its_very_second_on_both_ends(pair: Any) -> None:
    sender, receiver = pair.link()
    first, second = (bytes(seal(sender, bytes(64))) for _ in range(2))
    pair.clock.advance(REKEY_SECONDS - 1)
    assert not sender.needs_rekey
    pair.clock.advance(1)
    assert sender.needs_rekey
    pair.clock.advance(REKEY_SECONDS - 0.001)
    assert open_(receiver, first) == bytes(64)
    open_(sender, bytes(seal(receiver_of(pair, sender, receiver), bytes(64))))
    pair.clock.advance(0.001)
    assert refusal(receiver.opener.open_into, second, bytearray(64), header()) == "SESSION_USED_UP"
    assert refusal(seal, sender, bytes(64)) == "SESSION_USED_UP"


def receiver_of(pair: Any, sender: Link, receiver: Link) -> Link:
    """The other end, once it has confirmed its own direction."""
    sender.opener.open_confirmation(receiver.sealer.seal_confirmation())
    return receiver


def test_poison_without_a_word_is_poison(pair: Any) -> None:
    sender, _ = pair.link()
    sender.poison("")
    assert sender.poisoned == "POISONED"
    sender.poison("LATER")
    assert sender.poisoned == "POISONED", "the first cause is kept"
    assert_dead(sender)
