"""Session keys: taken once, carried over a pipe, exported, and notes to the neighbour."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.crypto import FormatError, pack_fields, unpack_fields
from sealring.mesh.errors import HandshakeError, RecordError
from sealring.node.link.keys import MAX_NOTE_BYTES, MAX_U64, LinkContext, SessionKeys
from sealring.node.link.records import Link


def refusal(action: Any, *arguments: Any) -> str:
    with pytest.raises(RecordError) as error:
        action(*arguments)
    return error.value.reason


def test_record_keys_are_taken_once(pair: Any) -> None:
    first, second = pair.handshake()
    first.to_carrier()
    assert refusal(first.to_carrier) == "KEYS_TAKEN"
    assert refusal(Link, first) == "KEYS_TAKEN"
    Link(second)
    assert refusal(second.to_carrier) == "KEYS_TAKEN"


def test_the_carrier_gets_the_same_keys_without_the_exporter(pair: Any) -> None:
    first, second = pair.handshake()
    carried = SessionKeys.from_carrier(first.to_carrier())
    assert (carried.suite, carried.context, carried.session_id) == (
        first.suite,
        first.context,
        first.session_id,
    )
    assert refusal(carried.export, b"x") == "NO_EXPORTER"
    assert first.export(b"x") == second.export(b"x")
    sender, receiver = Link(carried), Link(second)
    receiver.opener.open_confirmation(sender.sealer.seal_confirmation())


def test_carrier_bytes_are_parsed_strictly(pair: Any) -> None:
    data = pair.handshake()[0].to_carrier()
    for cut in range(len(data)):
        assert refusal(SessionKeys.from_carrier, data[:cut]) == "BAD_CARRIER_KEYS"
    assert refusal(SessionKeys.from_carrier, data + b"\x00") == "BAD_CARRIER_KEYS"
    fields = unpack_fields(data, count=7, max_bytes=1024)
    for index, value in (
        (0, b"other"),
        (1, b"\x09"),
        (1, b""),
        (2, b""),
        (3, b"short"),
        (4, b"short"),
        (5, fields[5][:-1]),
        (6, fields[6] + b"\x00"),
    ):
        changed = [*fields]
        changed[index] = value
        assert refusal(SessionKeys.from_carrier, pack_fields(*changed)) == "BAD_CARRIER_KEYS"
    context = unpack_fields(fields[2], count=4, max_bytes=512)
    for index, value in ((2, b"short"), (3, b"short"), (0, b"\xff")):
        changed = [*context]
        changed[index] = value
        broken = [*fields]
        broken[2] = pack_fields(*changed)
        assert refusal(SessionKeys.from_carrier, pack_fields(*broken)) == "BAD_CARRIER_KEYS"


@given(
    st.text(min_size=1, max_size=20),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 32) - 1),
    st.binary(min_size=32, max_size=32),
)
def test_context_round_trip(name: str, epoch: int, rank: int, roster_hash: bytes) -> None:
    context = LinkContext(name, name, epoch, rank, 1, rank, epoch, roster_hash)
    assert LinkContext.decode(context.encode()) == context
    with pytest.raises(FormatError):
        LinkContext.decode(context.encode() + b"\x00")


def test_same_link_compares_everything_but_the_roster(pair: Any) -> None:
    context = pair.params[0].context
    newer = dataclasses.replace(context, roster_version=context.roster_version + 1, roster_hash=bytes(32))
    assert context.same_link(newer)
    assert context.same_link(context)
    assert not newer.same_link(context)
    for field in ("epoch", "from_rank", "to_rank", "own_rank"):
        assert not context.same_link(dataclasses.replace(context, **{field: 9}))
    for field in ("cluster", "ring"):
        assert not context.same_link(dataclasses.replace(context, **{field: "x"}))


def test_notes_cross_in_both_directions_and_after_the_keys_were_taken(pair: Any) -> None:
    first, second = pair.handshake()
    first.to_carrier()
    second.to_carrier()
    assert second.open_note(b"ring port", first.seal_note(b"ring port", b"5001")) == b"5001"
    assert first.open_note(b"ring port", second.seal_note(b"ring port", b"5002")) == b"5002"
    assert first.open_note(b"empty", second.seal_note(b"empty", b"")) == b""


def test_a_note_is_sealed_once_and_opened_once(pair: Any) -> None:
    first, second = pair.handshake()
    note = first.seal_note(b"port", b"1")
    assert refusal(first.seal_note, b"port", b"2") == "NOTE_REUSED"
    second.open_note(b"port", note)
    assert refusal(second.open_note, b"port", note) == "NOTE_REUSED"


def test_a_note_of_another_label_direction_or_session_is_refused(pair: Any) -> None:
    first, second = pair.handshake()
    other, _ = pair.handshake()
    note = first.seal_note(b"port", b"1")
    assert refusal(second.open_note, b"other", note) == "NOTE_REFUSED"
    assert refusal(first.open_note, b"port", note) == "NOTE_REFUSED"
    assert refusal(second.open_note, b"port", other.seal_note(b"port", b"1")) == "NOTE_REFUSED"
    assert refusal(second.open_note, b"port", note) == "NOTE_REUSED"


def test_notes_are_bounded(pair: Any) -> None:
    first, second = pair.handshake()
    assert refusal(first.seal_note, b"x", bytes(MAX_NOTE_BYTES + 1)) == "NOTE_TOO_LARGE"
    largest = first.seal_note(b"x", bytes(MAX_NOTE_BYTES))
    assert second.open_note(b"x", largest) == bytes(MAX_NOTE_BYTES)
    too_long = first.suite.aead(first.note_key(b"y", sending=True)[0]).encrypt(
        bytes(12), bytes(MAX_NOTE_BYTES + 1), first.note_key(b"y", sending=True)[1]
    )
    assert refusal(second.open_note, b"y", too_long) == "NOTE_REFUSED"
    assert refusal(second.open_note, b"z", b"short") == "NOTE_REFUSED"
    assert refusal(first.export, b"") == "NO_EXPORTER"
    assert refusal(first.export, bytes(65)) == "NO_EXPORTER"
    assert len(first.export(b"l" * 64)) == 32


@pytest.mark.parametrize(
    ("changes", "sound"),
    [
        ({"epoch": 0}, True),
        ({"epoch": MAX_U64}, True),
        ({"epoch": MAX_U64 + 1}, False),
        ({"epoch": -1}, False),
        ({"roster_version": 0}, False),
        ({"roster_version": 1}, True),
        ({"roster_version": MAX_U64}, True),
        ({"roster_version": MAX_U64 + 1}, False),
        ({"to_rank": (1 << 32) - 1}, True),
        ({"to_rank": 1 << 32}, False),
        ({"to_rank": -1}, False),
        ({"to_rank": 0}, False),
        ({"own_rank": 5}, False),
        ({"roster_hash": bytes(31)}, False),
        ({"suites": ()}, False),
    ],
)
def test_link_params_are_bounded(pair: Any, changes: dict[str, Any], sound: bool) -> None:
    if sound:
        dataclasses.replace(pair.params[0], **changes)
        return
    with pytest.raises(HandshakeError) as error:
        dataclasses.replace(pair.params[0], **changes)
    assert error.value.reason == "BAD_LINK"


def test_link_params_name_two_members_by_their_own_keys(pair: Any) -> None:
    first, second = pair.params
    for changes in ({"own_id": first.peer_id}, {"peer_key": second.peer_key}):
        with pytest.raises(HandshakeError):
            dataclasses.replace(first, **changes)
