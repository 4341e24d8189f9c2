"""Ends of prompts and answers, at which later prompts are named."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.mesh.ring import OPENING, Ends, Names, PrefixNames, ends, split
from sealring.mesh.ring.prefix_ends import MOST, SHARED
from sealring.mesh.ring.prefix_names import MAX_ENDS, boundaries

KEY = bytes(32)


def spelt(text: str) -> bytes:
    return text.encode("utf-32-le")


def named(known: Ends, text: str, scope: bytes = b"me", key: bytes = KEY) -> tuple[PrefixNames, Names]:
    """The names of a sequence, and what a gateway makes of those that it receives."""
    names = PrefixNames(key, scope)
    regular, more = known.extend(names, spelt(text))
    return names, split(regular, len(text), ends=more)


def lengths(found: Names) -> list[int]:
    return [length for length, _ in found]


def test_a_prompt_is_named_at_its_own_ends_and_at_those_that_it_shares() -> None:
    known = Ends()
    names, first = named(known, "a" * 100)
    assert lengths(first) == [64, 100 - OPENING, 100]
    _, more = known.extend(names, spelt("b" * 50))
    assert lengths(split(b"".join(names.names[at] for at in (128,)), 150, 100, more)) == [128, 134, 150]
    _, second = named(known, "a" * 100 + "b" * 50 + "c" * 50)
    assert lengths(second) == [64, 84, 100, 128, 134, 150, 184, 192, 200]
    assert set(first) < set(second)


def test_an_end_that_is_not_shared_is_not_told() -> None:
    """Neither of another text, nor of another scope: a gateway does not learn where others' prompts end."""
    known = Ends()
    named(known, "a" * 100)
    assert lengths(named(known, "b" * 200)[1]) == [64, 128, 184, 192, 200]
    assert lengths(named(known, "a" * 200, b"you")[1]) == [64, 128, 184, 192, 200]
    assert lengths(named(known, "a" * 99 + "b" * 101)[1]) == [64, 84, 128, 184, 192, 200]
    known.clear()
    assert lengths(named(known, "a" * 150)[1]) == [64, 128, 134, 150]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.integers(1, 600))
def test_whatever_a_conversation_adds_its_last_end_is_found(turns: list[int], opening: int) -> None:
    known, text, before = Ends(), "s" * opening, 0
    for number, turn in enumerate(turns):
        text += chr(ord("a") + number) * turn
        names, told = named(known, text)
        assert not before or before in lengths(told)
        assert len(set(lengths(told)) - set(boundaries(len(text)))) <= SHARED + 2 <= MAX_ENDS
        again = names.first(len(text), bytes([1]) * 32)
        assert lengths(told)[-1:] == lengths(split(*_told(again)))[-1:]
        before = len(text) if len(text) > 64 else 0


def _told(names: PrefixNames) -> tuple[bytes, int, int, bytes]:
    regular, more = names.told()
    return regular, names.tokens, 0, more


def test_what_goes_on_in_a_later_epoch_is_found_there() -> None:
    known = Ends()
    names, _ = named(known, "a" * 1000)
    later, key = Ends(), bytes([7]) * 32
    kept = names.first(1000, key)
    later.remember(kept)
    assert {1000 - OPENING, 1000} <= set(lengths(named(later, "a" * 1500, key=key)[1]))
    assert 1000 in lengths(split(*_told(kept)))


def test_the_newest_ends_are_remembered() -> None:
    known = Ends()
    named(known, "old" * 50)
    for number in range(MOST // 2):
        named(known, chr(1000 + number) * 100)
    assert 150 not in lengths(named(known, "old" * 50 + "x" * 50)[1])


@given(st.integers(0, 40_000), st.integers(0, 40_000))
def test_ends_lie_beside_boundaries(tokens: int, after: int) -> None:
    found = ends(tokens, after)
    assert set(found) <= {tokens, tokens - OPENING}
    assert not set(found) & set(boundaries(tokens))
    assert all(length > max(64, after) for length in found)
    assert all(earlier < later for earlier, later in pairwise(found))
