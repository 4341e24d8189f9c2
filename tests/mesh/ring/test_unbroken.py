"""Spans that no chunk divides."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring import MAX_UNBROKEN, around
from sealring.mesh.ring.unbroken import unbroken
from sealring.v1 import control_pb2 as control


def spans(*pairs: tuple[int, int]) -> list[control.TokenSpan]:
    return [control.TokenSpan(begin=begin, end=end) for begin, end in pairs]


@given(st.lists(st.integers(0, 40), unique=True), st.sets(st.integers(0, 20)), st.integers(0, 40))
def test_a_cut_divides_the_one_span_that_it_lies_inside(
    edges: Sequence[int], left_out: set[int], length: int
) -> None:
    rising = sorted(edges)
    pairs = [pair for at, pair in enumerate(pairwise(rising)) if at not in left_out]
    found = unbroken(spans(*pairs), 40)
    assert list(found) == pairs
    inside = [(begin, end) for begin, end in pairs if begin < length < end]
    assert around(found, length) == (inside[0] if inside else (length, length))


@pytest.mark.parametrize(
    "pairs",
    [[(5, 5)], [(7, 3)], [(3, 11)], [(0, 4), (3, 6)], [(5, 6), (1, 2)], [(1, 2)] * 2],
    ids=["empty", "backwards", "behind the prompt", "overlapping", "falling", "twice"],
)
def test_spans_that_cannot_be_are_refused(pairs: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidInput, match="do not fit its prompt"):
        unbroken(spans(*pairs), 10)


def test_the_number_of_spans_is_bounded() -> None:
    most = spans(*((at, at + 1) for at in range(MAX_UNBROKEN)))
    assert len(unbroken(most, 10_000)) == MAX_UNBROKEN
    with pytest.raises(InvalidInput):
        unbroken([*most, *spans((5000, 5001))], 10_000)
