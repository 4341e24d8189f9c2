"""Which of a prefix's marks are left when there are too many."""

from __future__ import annotations

from sealring.mesh.ring import thinned
from sealring.mesh.ring.prefix_marks import MOST, NEWEST


def test_the_newest_are_left_and_of_the_others_no_gap_grows_more_than_it_must() -> None:
    assert thinned([30, 10, 20]) == [10, 20, 30]
    assert thinned([100, 110, 900, 1000], 3) == [110, 900, 1000]
    assert thinned([100, 110, 900, 1000], 1) == [1000]
    lengths: list[int] = []
    for turn in range(1, 100):
        lengths = thinned([*lengths, 100 * turn])
    assert len(lengths) == MOST
    assert lengths[-NEWEST:] == [9600, 9700, 9800, 9900]
    gaps = [right - left for left, right in zip([0, *lengths], lengths, strict=False)]
    assert max(gaps) <= 2 * 9900 / (MOST - NEWEST)
