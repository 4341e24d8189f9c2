"""Counting fields before they are decoded: what has many is refused, whatever way they are put."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.validate import MAX_MESSAGES
from sealring.mesh.rpc import check_fields
from sealring.mesh.rpc.wire import MAX_FIELDS
from sealring.v1 import inference_pb2 as inference

REQUEST = inference.GenerateRequest.DESCRIPTOR


def varint(number: int) -> bytes:
    out = b""
    while number >= 128:
        out, number = out + bytes([number % 128 + 128]), number // 128
    return out + bytes([number])


def within(prompt: bytes) -> bytes:
    """A request with this as its prompt in clear."""
    envelope = b"\x0a" + varint(len(prompt)) + prompt
    return b"\x1a" + varint(len(envelope)) + envelope


def chat(messages: bytes) -> bytes:
    return b"\x0a" + varint(len(messages)) + messages


@pytest.mark.parametrize(
    "prompt",
    [
        chat(b"\x0a\x00" * (MAX_FIELDS + 1)),
        b"\x22\x00" * (MAX_FIELDS + 1),
        chat(b"") * (MAX_FIELDS + 1),
        b"\xf8\x07\x00" * (MAX_FIELDS + 1),
        b"\xfb\x07\xfc\x07" * MAX_FIELDS,
        b"\xf9\x07" + bytes(8) + b"\xfd\x07" + bytes(4) + chat(b"\x0a\x00" * MAX_FIELDS),
    ],
    ids=["messages", "stops", "chats", "unknown", "groups", "behind fixed ones"],
)
def test_a_message_of_very_many_fields_is_refused(prompt: bytes) -> None:
    data = within(prompt)
    inference.GenerateRequest.FromString(data)  # it is one
    with refused("TOO_MANY_VALUES", InvalidInput):
        check_fields(data, REQUEST)


@pytest.mark.parametrize("end", [b"\x08", b"\x80"], ids=["value", "tag"])
def test_many_fields_are_counted_before_an_end_that_comes_too_soon(end: bytes) -> None:
    with refused("TOO_MANY_VALUES", InvalidInput):
        check_fields(within(chat(b"\x0a\x00" * (MAX_FIELDS + 1))) + end, REQUEST)


def numbered(field: int, wire_type: int, content: bytes) -> bytes:
    return varint(field << 3 | wire_type) + content


UNKNOWN = st.sampled_from([15, 127, 5000])
FIELDS = st.one_of(
    st.builds(
        lambda field, value: (numbered(field, 0, varint(value)), 1), UNKNOWN, st.integers(0, 2**64 - 1)
    ),
    st.builds(
        lambda field, value: (numbered(field, 1, value), 1), UNKNOWN, st.binary(min_size=8, max_size=8)
    ),
    st.builds(
        lambda field, value: (numbered(field, 5, value), 1), UNKNOWN, st.binary(min_size=4, max_size=4)
    ),
    st.builds(lambda field: (numbered(field, 3, b"") + numbered(field, 4, b""), 2), UNKNOWN),
    st.builds(lambda size: (numbered(4, 2, varint(size) + b"\x0a" * size), 1), st.integers(0, 300)),
    st.builds(lambda count: (chat(b"\x0a\x00" * count), 1 + count), st.integers(0, 100)),
)
"""Fields of a prompt as they stand in it, with the number of fields that each stands for."""


@given(st.lists(FIELDS, max_size=30))
def test_every_field_counts_once(fields: list[tuple[bytes, int]]) -> None:
    count = 3 + sum(number for _, number in fields)
    padding = numbered(4, 2, varint(2 * count) + bytes(2 * count))  # what is short has few fields
    data = within(padding + b"".join(encoded for encoded, _ in fields))
    inference.GenerateRequest.FromString(data)
    check_fields(data, REQUEST, count)
    with pytest.raises(InvalidInput):
        check_fields(data, REQUEST, count - 1)


def test_a_number_of_too_many_bytes_is_left_to_the_decoder() -> None:
    fields = b"\x0a\x00" * (MAX_FIELDS + 1)
    for more, counted in ((9, True), (10, False)):
        data = within(b"\x78" + b"\x80" * more + b"\x01" + chat(fields))
        if counted:
            with pytest.raises(InvalidInput):
                check_fields(data, REQUEST)
        else:
            check_fields(data, REQUEST)
            with pytest.raises(DecodeError):
                inference.GenerateRequest.FromString(data)


def test_long_texts_and_long_conversations_pass() -> None:
    message = inference.ChatMessage(role="user", content="x" * 900)
    long = inference.Prompt(chat=inference.Chat(messages=[message] * MAX_MESSAGES))
    for prompt in (long, inference.Prompt(text="a, [{" * 100_000)):
        request = inference.GenerateRequest(model="m", envelope=inference.Envelope(clear=prompt))
        check_fields(request.SerializeToString(), REQUEST)
    sealed = inference.GenerateRequest(envelope=inference.Envelope(sealed=b"\x0a\x00" * MAX_FIELDS))
    check_fields(sealed.SerializeToString(), REQUEST)


@given(data=st.binary(max_size=200), limit=st.integers(1, 20))
def test_any_bytes_are_counted_or_left_to_the_decoder(data: bytes, limit: int) -> None:
    padded = numbered(5000, 2, varint(99) + bytes(99)) + data
    with contextlib.suppress(InvalidInput):
        check_fields(padded, REQUEST, limit + 1)
        with contextlib.suppress(DecodeError):
            decoded = inference.GenerateRequest.FromString(padded)
            assert len(decoded.envelope.clear.stop) <= limit
