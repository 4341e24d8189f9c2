"""A block opens as what it is, under its key and in its place, or not at all."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.node.stored import codec
from sealring.node.stored.codec import HEAD_BYTES, PIECE, BlockHead
from sealring.node.stored.places import Place

KEY = bytes(range(32))
PLACES = st.builds(
    lambda name, first, length: Place(name, first, first + length),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 1 << 20),
    st.integers(1, 4096),
)


def sealed(place: Place, content: bytes, key: bytes = KEY) -> bytes:
    return b"".join(codec.sealed(key, place, memoryview(content)))


def opened(place: Place, file: bytes, size: int, key: bytes = KEY) -> bytes | None:
    found = codec.opened(key, place, memoryview(file), size)
    return None if found is None else bytes(found)


@given(PLACES, st.binary(max_size=300))
def test_a_block_opens_where_it_was_sealed(place: Place, content: bytes) -> None:
    file = sealed(place, content)
    assert len(file) == codec.file_size(len(content))
    assert opened(place, file, len(content)) == content
    assert BlockHead.parse(file[:HEAD_BYTES]) == (place.first, place.end, 0)


def test_a_block_of_many_pieces() -> None:
    content = os.urandom(3 * PIECE + 5)
    place = Place(bytes(16), 0, 256)
    assert opened(place, sealed(place, content), len(content)) == content


@given(PLACES, PLACES, st.binary(min_size=1, max_size=64), st.binary(min_size=32, max_size=32))
def test_no_other_place_and_no_other_key_opens_it(
    one: Place, other: Place, content: bytes, key: bytes
) -> None:
    file = sealed(one, content)
    if other != one:
        assert opened(other, file, len(content)) is None
    if key != KEY:
        assert opened(one, file, len(content), key) is None


@settings(max_examples=400)
@given(st.data())
def test_whatever_was_done_to_a_file_it_is_the_block_or_a_miss(data: st.DataObject) -> None:
    place, content = Place(b"n" * 16, 256, 512), b"the keys and values of some tokens"
    file = bytearray(sealed(place, content))
    uses = slice(codec.USES_AT, codec.USES_AT + 4)
    how = data.draw(st.sampled_from(("flip", "cut", "more", "zeros", "join")))
    if how == "flip":
        for bit in data.draw(st.sets(st.integers(0, 8 * len(file) - 1), min_size=1, max_size=3)):
            file[bit // 8] ^= 1 << bit % 8
    elif how == "cut":
        del file[data.draw(st.integers(0, len(file) - 1)) :]
    elif how == "more":
        file += data.draw(st.binary(min_size=1, max_size=40))
    elif how == "zeros":  # as a loss of power leaves a file that was never synced
        start = data.draw(st.integers(0, len(file) - 1))
        file[start:] = bytes(len(file) - start)
    else:  # the beginning of one version and the end of another
        start = data.draw(st.integers(HEAD_BYTES, len(file) - 1))
        file[start:] = sealed(place, content)[start:]
    whole = bytearray(sealed(place, content))
    assert opened(place, bytes(file), len(content)) in (None, content)
    file[uses] = whole[uses]
    if how == "cut":
        assert opened(place, bytes(file), len(content)) is None


def test_equal_blocks_are_different_files() -> None:
    place = Place(bytes(16), 0, 256)
    one, other = sealed(place, b"same" * 64), sealed(place, b"same" * 64)
    assert one[HEAD_BYTES:] != other[HEAD_BYTES:]
    assert b"same" not in one
