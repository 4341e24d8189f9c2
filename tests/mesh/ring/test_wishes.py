"""A user's wish for a model ends no other user's."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.ring import Wishes
from sealring.mesh.ring.wishes import MOST

TIMES = st.one_of(st.none(), st.just(0.0), st.integers(1, 5000).map(float), st.just(math.inf))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1000), TIMES), min_size=1), st.just(900.0))
def test_a_model_stays_until_the_last_wish_of_anybody_is_over(
    asked: list[tuple[str, int, float | None]], deployed: float
) -> None:
    """Wishes come from several users in any order, and the newest request of each counts."""
    wishes, now, ends = Wishes[str](), 0.0, dict[str, float]()
    for user, later, seconds in asked:
        now += later
        wishes.ask(user, seconds, now)
        ends[user] = now + (deployed if seconds is None else seconds)
    newest = {user: seconds for user, _, seconds in asked}
    longest = wishes.longest(deployed)
    if all(seconds is None for seconds in newest.values()):
        assert longest is None, "as deployed"
    else:
        assert longest == max(ends.values()) - now
    wishes.keep("a")
    assert (wishes.longest(deployed) is None) == (newest.get("a") is None)


def test_there_are_so_many_wishes_at_most() -> None:
    wishes = Wishes[int]()
    for user in range(MOST + 1):
        wishes.ask(user, 60.0 if user else 5000.0, 0.0)
    assert wishes.longest(900.0) == 60.0
