"""Names of prefixes: equal for equal tokens of one scope and one key, and for nothing else."""

from __future__ import annotations

import hmac
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring import (
    KEY_BYTES,
    MAX_CHAIN_BYTES,
    NAME_BYTES,
    STORED_BLOCK,
    Chain,
    PrefixNames,
    chain_of,
    clear_scope,
    edges,
    sealed_scope,
    split,
)
from sealring.mesh.ring.prefix_names import BLOCK, MAX_SCOPE_BYTES, boundaries

KEY = bytes(KEY_BYTES)


def tokens(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def test_boundaries_are_dense_at_first_and_few_in_the_end() -> None:
    assert list(boundaries(BLOCK - 1)) == []
    assert list(boundaries(200)) == [64, 128, 192]
    assert list(boundaries(8500))[-3:] == [8192, 8320, 8448]
    assert len(list(boundaries(1 << 20))) == 128 + 7 * 64


@settings(max_examples=25)
@given(st.integers(0, 40_000), st.integers(0, 40_000))
def test_boundaries_of_a_part_are_those_of_the_whole(short: int, more: int) -> None:
    whole = list(boundaries(short + more))
    assert list(boundaries(short)) + list(boundaries(short + more, short)) == whole
    assert all(later - earlier <= max(BLOCK, later // 64) for earlier, later in itertools.pairwise(whole))


@settings(max_examples=25)
@given(st.lists(st.integers(0, 1 << 17), max_size=300), st.data())
def test_names_do_not_depend_on_where_a_sequence_was_cut(values: list[int], data: st.DataObject) -> None:
    whole, parts = PrefixNames(KEY, b"a"), PrefixNames(KEY, b"a")
    at = data.draw(st.integers(0, len(values)))
    names = whole.extend(tokens(*values))
    assert parts.extend(tokens(*values[:at])) + parts.extend(tokens(*values[at:])) == names
    assert whole.names == parts.names
    assert split(names, len(values)) == tuple(whole.names.items())
    assert split(parts.extend(b""), len(values), len(values)) == ()


@given(st.lists(st.integers(0, 1 << 17), min_size=64, max_size=130), st.integers(0, 63))
def test_any_other_token_scope_or_key_gives_other_names(values: list[int], at: int) -> None:
    name = PrefixNames(KEY, b"a").extend(tokens(*values))
    changed = [*values[:at], values[at] + 1, *values[at + 1 :]]
    others = [
        PrefixNames(KEY, b"a").extend(tokens(*changed)),
        PrefixNames(KEY, b"b").extend(tokens(*values)),
        PrefixNames(KEY, b"a" + tokens(values[0])).extend(tokens(*values[1:], 0)),
        PrefixNames(bytes([1]) + KEY[1:], b"a").extend(tokens(*values)),
    ]
    for other in others:
        ours = {name[start : start + NAME_BYTES] for start in range(0, len(name), NAME_BYTES)}
        theirs = {other[start : start + NAME_BYTES] for start in range(0, len(other), NAME_BYTES)}
        assert not ours & theirs


@pytest.mark.parametrize("count", [63, 64, 200])
@pytest.mark.parametrize("cut", [0, 1, 64, 65, 130])
def test_a_name_is_an_hmac_of_the_scope_and_the_tokens_so_far(count: int, cut: int) -> None:
    spelt = tokens(*range(1, count + 1))
    expected = {
        length: hmac.digest(KEY, b"\x00\x03abc" + spelt[: 4 * length], "sha256")[:16]
        for length in (64, 128, 192)
        if length <= count
    }
    names = PrefixNames(KEY, b"abc")
    told = names.extend(spelt[: 4 * cut]) + names.extend(spelt[4 * cut :])
    assert (told, names.names, names.tokens) == (b"".join(expected.values()), expected, count)
    assert split(told, count) == tuple(expected.items())
    assert split(told[NAME_BYTES:], count, 64) == tuple(expected.items())[1:]
    assert names.first(130).names == {length: expected[length] for length in expected if length <= 130}
    other = bytes([1]) + KEY[1:]
    again = PrefixNames(other, b"abc")
    again.extend(spelt[: 4 * 65])
    first = names.first(65, other)
    assert (first.names, first.tokens) == (again.names, min(65, count))


@pytest.mark.parametrize("names", [bytes(15), bytes(17), bytes(16), bytes(48)])
def test_names_that_do_not_fit_are_refused(names: bytes) -> None:
    with refused("BAD_PREFIXES", InvalidInput):
        split(names, 128)


@pytest.mark.parametrize(
    "ends",
    [
        bytes(19),
        (64).to_bytes(4, "big") + bytes(16),
        (128).to_bytes(4, "big") + bytes(16),
        (130).to_bytes(4, "big") + bytes(16),
        2 * ((100).to_bytes(4, "big") + bytes(16)),
        b"".join(length.to_bytes(4, "big") + bytes(16) for length in range(70, 87)),
    ],
)
def test_ends_that_cannot_be_are_refused(ends: bytes) -> None:
    assert split(bytes(32), 129, ends=(100).to_bytes(4, "big") + bytes(16))[1] == (100, bytes(16))
    with refused("BAD_PREFIXES", InvalidInput):
        split(bytes(32), 129, ends=ends)


def test_a_row_may_have_no_names() -> None:
    assert split(b"", 128) == ()


def test_a_gateway_cannot_name_the_scope_of_a_sealed_prompt() -> None:
    assert clear_scope("salt") != sealed_scope(b"salt")
    assert clear_scope("")
    assert len(sealed_scope(bytes(64))) == 65
    assert sealed_scope(b"") == b""
    assert clear_scope("c") != clear_scope("")


@pytest.mark.parametrize(
    "make", [lambda: clear_scope("x" * MAX_SCOPE_BYTES), lambda: sealed_scope(bytes(65))]
)
def test_scopes_are_bounded(make: object) -> None:
    with pytest.raises(InvalidInput):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(("key", "scope"), [(KEY, 0), (KEY, MAX_SCOPE_BYTES + 1), (KEY[1:], 1)])
def test_names_without_a_scope_or_a_key_are_not_made(key: bytes, scope: int) -> None:
    assert PrefixNames(KEY, bytes(MAX_SCOPE_BYTES)).tokens == 0
    with pytest.raises(ValueError, match="512"):
        PrefixNames(key, bytes(scope))


@settings(max_examples=50)
@given(st.integers(0, 1200), st.integers(0, 1400))
def test_a_chain_names_the_ends_of_blocks_and_can_be_cut(length: int, cut: int) -> None:
    chain = chain_of(KEY, b"ckey", bytes(4 * length))
    assert chain.edges == edges(length) == [at for at in boundaries(length) if at % STORED_BLOCK == 0]
    assert Chain.unpack(chain.packed()) == chain
    first = chain.first(cut)
    assert first.edges == [at for at in chain.edges if at <= cut]
    assert first == chain_of(KEY, b"ckey", bytes(4 * min(cut, length)))
    assert chain_of(KEY, b"cother", bytes(4 * length)).names[:1] != chain.names[:1] or not chain.names


@pytest.mark.parametrize("data", [b"x", bytes(16), bytes(40), bytes(MAX_CHAIN_BYTES + NAME_BYTES)])
def test_a_chain_that_cannot_be_is_refused(data: bytes) -> None:
    with refused("BAD_PREFIXES"):
        Chain.unpack(data)
