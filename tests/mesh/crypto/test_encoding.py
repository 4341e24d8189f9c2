"""Strict codecs: round trips, and one spelling for everything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.crypto import (
    Fields,
    FormatError,
    canonical_json,
    decode_base32,
    decode_base64,
    encode_base32,
    encode_base64,
    pack_fields,
    parse_json_object,
    unpack_fields,
)
from sealring.mesh.crypto.encoding import MAX_INTEGER

values = st.recursive(
    st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=8), values, max_size=6))
def test_json_round_trip(value: dict[str, Any]) -> None:
    data = canonical_json(value)
    assert parse_json_object(data, max_bytes=1 << 20) == value
    assert canonical_json(parse_json_object(data, max_bytes=1 << 20)) == data
    assert data.isascii()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"1",
        b"null",
        b"{",
        b"{}x",
        b"{}\x00",
        b'{"a":1,"a":1}',
        b'{"a":{"b":1,"b":2}}',
        b'{"a":1.0}',
        b'{"a":1e3}',
        b'{"a":-0}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":9223372036854775808}',
        b'{"a":-9223372036854775808}',
        *(b'{"a":%s}' % (b"9" * digits) for digits in (19, 21, 4000, 5000)),
        b'{"a":01}',
        b"{'a':1}",
        b'{"a":1,}',
        b'{"a":"\xff"}',
        b'{"a":"\x01"}',
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":' + b"[" * 17 + b"]" * 17 + b"}",
        b'{"a":' * 20000,
        b"[" * 100000,
    ],
)
def test_json_that_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_json_object(data, max_bytes=1 << 20)


def test_json_bounds() -> None:
    assert parse_json_object(b'{"a":9223372036854775807}', max_bytes=25) == {"a": MAX_INTEGER}
    with pytest.raises(FormatError):
        parse_json_object(b'{"a":9223372036854775807}', max_bytes=24)


@given(st.binary(max_size=200))
def test_json_never_raises_anything_else(data: bytes) -> None:
    try:
        parse_json_object(data, max_bytes=100)
    except FormatError:
        pass


@pytest.mark.parametrize(
    "value", [1.5, {"a": [1.0]}, {"a": {"b": float("nan")}}, {1: 2}, {"a": ({"b": 0.0},)}]
)
def test_canonical_json_refuses(value: object) -> None:
    with pytest.raises(FormatError):
        canonical_json(value)


def test_fields_are_typed_and_exact() -> None:
    fields = Fields({"t": "x", "i": 5, "b": "AAAA", "l": [1], "z": ""}, ("t", "i", "b", "l", "z"))
    assert fields.text("t") == "x"
    assert fields.text("z", min_length=0) == ""
    assert fields.integer("i", low=5, high=5) == 5
    assert fields.binary("b", sizes=(3,)) == bytes(3)
    assert fields.blob("b", max_bytes=3) == bytes(3)
    assert fields.items("l", max_items=1) == [1]
    refusals: list[Any] = [
        lambda: fields.text("z"),
        lambda: fields.text("i"),
        lambda: fields.text("t", max_length=0),
        lambda: fields.integer("t"),
        lambda: fields.integer("i", low=6),
        lambda: fields.integer("i", high=4),
        lambda: fields.binary("b", sizes=(2,)),
        lambda: fields.binary("b", sizes=(4,)),
        lambda: fields.binary("i", sizes=(3,)),
        lambda: fields.blob("b", max_bytes=2),
        lambda: fields.blob("z", max_bytes=2),
        lambda: fields.blob("i", max_bytes=2),
        lambda: fields.items("l", max_items=0),
        lambda: fields.items("l", max_items=5, min_items=2),
        lambda: fields.items("t", max_items=5),
        lambda: Fields({"a": True}, ("a",)).integer("a"),
        lambda: Fields({"a": "\ud800"}, ("a",)).text("a"),
        lambda: Fields({"a": "x\n"}, ("a",)).text("a"),
        lambda: Fields({"a": 1}, ("a", "b")),
        lambda: Fields({"a": 1, "b": 1}, ("a",)),
        lambda: Fields(["a"], ("a",)),
        lambda: Fields(None, ()),
    ]
    for refusal in refusals:
        with pytest.raises(FormatError):
            refusal()


@given(st.binary(max_size=100))
def test_base64_round_trip_and_bounds(data: bytes) -> None:
    text = encode_base64(data)
    assert decode_base64(text, max_bytes=len(data)) == data
    if data:
        with pytest.raises(FormatError):
            decode_base64(text, max_bytes=len(data) - 1)


@pytest.mark.parametrize(
    "text",
    ["A", "AA", "AAA", "AA=", "AB==", "AAB=", "AA==\n", " AA==", "AA__", "é===", "====", "AAAA=", "A A="],
)
def test_base64_has_one_spelling(text: str) -> None:
    with pytest.raises(FormatError):
        decode_base64(text, max_bytes=100)


@given(st.binary(min_size=1, max_size=40))
def test_base32_round_trip(data: bytes) -> None:
    text = encode_base32(data)
    assert decode_base32(text, size=len(data)) == data
    for other in (text.upper(), text + "=", text[:-1], text + "a", text[:-1] + "1"):
        if other != text:
            with pytest.raises(FormatError):
                decode_base32(other, size=len(data))


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_packed_fields_round_trip(fields: list[bytes]) -> None:
    data = pack_fields(*fields)
    assert unpack_fields(data, count=len(fields), max_bytes=len(data)) == fields
    for bad, count in ((data + b"\x00", len(fields)), (data, len(fields) + 1)):
        with pytest.raises(FormatError):
            unpack_fields(bad, count=count, max_bytes=1000)
    if data:
        with pytest.raises(FormatError):
            unpack_fields(data, count=len(fields), max_bytes=len(data) - 1)
        with pytest.raises(FormatError):
            unpack_fields(data[:-1], count=len(fields), max_bytes=1000)


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_packing_is_injective(one: list[bytes], two: list[bytes]) -> None:
    assert (pack_fields(*one) == pack_fields(*two)) == (one == two)


def test_a_huge_length_allocates_nothing() -> None:
    with pytest.raises(FormatError):
        unpack_fields(b"\xff\xff\xff\xff", count=1, max_bytes=100)


def test_nesting_may_be_sixteen_deep() -> None:
    for depth, sound in ((15, True), (16, True), (17, False)):
        data = b'{"a":' * depth + b"0" + b"}" * depth
        if sound:
            assert parse_json_object(data, max_bytes=1000)
        else:
            with pytest.raises(FormatError):
                parse_json_object(data, max_bytes=1000)


@pytest.mark.parametrize(
    ("code", "sound"),
    [(0x1F, False), (0x20, True), (0xD7FF, True), (0xD800, False), (0xDFFF, False), (0xE000, True)],
)
def test_characters_of_texts(code: int, sound: bool) -> None:
    character = chr(code)
    fields = Fields({"a": character}, ("a",))
    if sound:
        assert fields.text("a") == character
    else:
        with pytest.raises(FormatError):
            fields.text("a")


def test_base32_with_loose_ends_is_refused() -> None:
    """32 bytes leave four bits of the last character unused: they have to be zero."""
    text = encode_base32(bytes(32))
    for last in "bcdefghijklmnop":
        with pytest.raises(FormatError):
            decode_base32(text[:-1] + last, size=32)
    for other in (text + "a", text[:-1], text.upper(), text[:-1] + "A"):
        with pytest.raises(FormatError, match="length or case"):
            decode_base32(other, size=32)


def test_the_bounds_of_fields_when_nothing_is_said() -> None:
    fields = Fields({"text": "x" * 256, "number": 0}, ("text", "number"))
    assert (len(fields.text("text")), fields.integer("number")) == (256, 0)
    with pytest.raises(FormatError):
        Fields({"text": "x" * 257}, ("text",)).text("text")
    for number in (-1, 1 << 63):
        with pytest.raises(FormatError):
            Fields({"number": number}, ("number",)).integer("number")


def test_keys_are_sorted_and_lists_may_be_empty() -> None:
    assert canonical_json({"b": 1, "a": {"d": 2, "c": 3}}) == b'{"a":{"c":3,"d":2},"b":1}'
    fields = Fields({"x": []}, ("x",))
    assert fields.items("x", max_items=3) == fields.each("x", max_items=3) == []


def test_as_many_fields_are_unpacked_as_there_are() -> None:
    assert unpack_fields(pack_fields(b"a", b""), max_bytes=100) == [b"a", b""]
