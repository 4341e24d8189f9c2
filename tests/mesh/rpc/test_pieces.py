"""Long messages in pieces, with short ones between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.errors import InvalidInput
from sealring.mesh.rpc import PIECE_BYTES, Joiner, Outgoing
from sealring.v1 import control_pb2 as control


def outgoing() -> Outgoing:
    return Outgoing(lambda piece: b"piece" + piece.SerializeToString())


def received(messages: list[bytes]) -> list[bytes]:
    """The messages at the other end, by when they are whole."""
    joiner, whole = Joiner(), []
    for message in messages:
        if message.startswith(b"piece"):
            joined = joiner.add(control.Piece.FromString(message[5:]))
            whole += [joined] if joined is not None else []
        else:
            whole.append(message)
    return whole


def drained(waiting: Outgoing) -> list[bytes]:
    sent = []
    while waiting:
        message, written = waiting.take()
        sent.append(message)
        if written is not None:
            written()
    return sent


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * PIECE_BYTES)), max_size=8))
def test_every_message_arrives_and_each_kind_in_its_order(queued: list[tuple[bool, int]]) -> None:
    waiting, written = outgoing(), list[bytes]()
    messages: dict[bool, list[bytes]] = {True: [], False: []}
    for number, (long, size) in enumerate(queued):
        message = b"%d" % number + b"x" * (size if long else 9)
        messages[long].append(message)
        (waiting.put_long if long else waiting.put)(message, lambda message=message: written.append(message))
    sent = drained(waiting)
    assert max(map(len, sent), default=0) <= PIECE_BYTES + 64
    assert received(sent) == written == [*messages[False], *messages[True]]


def test_a_short_message_goes_before_the_next_piece_of_a_long_one() -> None:
    waiting = outgoing()
    waiting.put_long(b"x" * (2 * PIECE_BYTES))
    sent = [waiting.take()[0]]
    waiting.put(b"step")
    sent += drained(waiting)
    assert [message[:5] for message in sent] == [b"piece", b"step", b"piece"]


def test_what_has_not_begun_to_leave_can_be_taken_back() -> None:
    waiting = outgoing()
    for key in ("one", "two", "three"):
        waiting.put_long(key.encode() + b"x" * PIECE_BYTES, key=key)
    first, _ = waiting.take()
    assert [waiting.withdraw(key) for key in ("one", "two", "two", "four")] == [False, True, False, False]
    assert [message[:3] for message in received([first, *drained(waiting)])] == [b"one", b"thr"]


def test_at_the_end_only_short_messages_go() -> None:
    waiting = outgoing()
    waiting.put_long(b"x" * (2 * PIECE_BYTES))
    waiting.put_long(b"cancel")
    waiting.take()
    waiting.shorten()
    waiting.put(b"goodbye")
    assert drained(waiting) == [b"cancel", b"goodbye"]


def test_what_is_joined_is_bounded() -> None:
    joiner = Joiner(most=3)
    assert joiner.add(control.Piece(data=b"xy")) is None
    assert joiner.add(control.Piece(data=b"z", last=True)) == b"xyz"
    for piece in (control.Piece(last=True), control.Piece(data=b"long"), control.Piece()):
        with pytest.raises(InvalidInput) as caught:
            joiner.add(piece)
        assert caught.value.reason == "BAD_MESSAGE"
