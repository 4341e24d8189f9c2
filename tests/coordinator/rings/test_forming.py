"""How far a ring is: over all its members, whatever they report and in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sealring.coordinator.rings.forming import Forming
from sealring.mesh.system.pace import FETCHING, LOADING, STARTING, WARMING, Reached

WEIGHTS = {"a": 100, "b": 300}


def test_the_share_is_that_of_all_bytes_to_fetch_and_to_load() -> None:
    forming = Forming(WEIGHTS)
    forming.take("a", Reached(LOADING, 50, 100))
    assert forming.share(()) == 0, "it is not known how much b fetches"
    forming.take("b", Reached(FETCHING))
    assert forming.share(()) == 0
    forming.take("b", Reached(FETCHING, 50, 200, 10, 15))
    assert forming.share(()) == (50 + 50) / (400 + 200)
    assert forming.slowest(()) == ("b", Reached(FETCHING, 50, 200, 10, 15))
    forming.take("b", Reached(LOADING, 1, 2))
    assert forming.share(()) == (50 + 200 + 150) / 600
    assert forming.share(("a",)) == (100 + 200 + 150) / 600
    forming.take("b", Reached(WARMING))
    assert forming.slowest(("a",)) == ("b", Reached(WARMING))
    assert forming.share(("a",)) == forming.share(("a", "b")) == 1


def test_the_others_wait_for_the_member_that_is_furthest_back() -> None:
    forming = Forming(dict.fromkeys("abcd", 1))
    assert forming.slowest(()) == ("a", Reached(STARTING))
    forming.take("a", Reached(LOADING, 1, 9, 1, 8))
    forming.take("b", Reached(FETCHING, 8, 9, 1, 1))
    forming.take("c", Reached(FETCHING, 7, 9, 1, 2))
    assert forming.slowest(())[0] == "d", "which has said nothing"
    forming.take("d", Reached(WARMING))
    assert [forming.slowest(there)[0] for there in ("", "c", "cb", "cba")] == ["c", "b", "a", "d"]


BYTES = st.integers(0, 400)
REPORTS = st.one_of(
    st.builds(Reached, st.sampled_from([FETCHING, LOADING, STARTING]), BYTES, BYTES),
    st.sampled_from([Reached(WARMING), Reached("joining its group")]),
)


@given(st.lists(st.tuples(st.sampled_from("abz"), st.none() | REPORTS), max_size=40))
def test_the_share_never_falls(events: list[tuple[str, Reached | None]]) -> None:
    forming, prepared, shares = Forming(WEIGHTS), set[str](), [0.0]
    for member, reached in events:
        if reached is None:
            prepared.add(member)
        elif member in WEIGHTS:
            forming.take(member, reached)
        shares.append(forming.share(prepared))
        assert forming.slowest(prepared)[0] in WEIGHTS
    assert shares == sorted(shares)
    assert shares[-1] <= 1
