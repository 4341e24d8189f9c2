"""A member that has become slow is found by what its steps take against the others', whatever the load."""

import random

from hypothesis import given
from hypothesis import strategies as st

from sealring.coordinator.rings.pace import READINGS, SHUN_SECONDS, Pace, Shunned

USUAL = {"a": 900, "b": 2000, "c": 1400}


def beat(pace: Pace, times: int, *, load: float = 1.0, **slower: float) -> None:
    for _ in range(times):
        for member, took in USUAL.items():
            noise = random.uniform(0.9, 1.1)
            pace.beaten(member, int(took * load * noise * slower.get(member, 1)), len(USUAL))


def slow(pace: Pace) -> set[str]:
    return {member for member in USUAL if pace.slow(member)}


def test_who_has_become_slow_and_nobody_else() -> None:
    pace = Pace()
    beat(pace, 3 * READINGS)
    assert slow(pace) == set()
    beat(pace, READINGS, load=7)
    assert slow(pace) == set(), "it is the load"
    beat(pace, READINGS, b=1.5)
    assert slow(pace) == set()
    beat(pace, READINGS, b=3.0)
    assert slow(pace) == {"b"}
    assert 2.4 < pace.slow("b") < 3.6
    beat(pace, READINGS)
    assert slow(pace) == set()


def test_two_members_and_one() -> None:
    pace = Pace()
    for factor in (1, 1, 4):
        for number in range(READINGS + 1):
            pace.beaten("a", 1000 + number, 2)
            pace.beaten("b", 1000 * factor + number, 2)
    assert (pace.slow("a"), round(pace.slow("b"))) == (0, 4)
    alone = Pace()
    for number in range(3 * READINGS):
        alone.beaten("a", 1000 * (1 + number), 1)
    assert alone.slow("a") == 0


def test_what_is_told_twice_or_not_at_all_counts_for_nothing() -> None:
    pace = Pace()
    beat(pace, 2 * READINGS)
    for _ in range(5 * READINGS):
        pace.beaten("b", 6000, len(USUAL))
    pace.beaten("stranger", 1, 99)
    assert (pace.slow("b"), pace.slow("stranger")) == (0, 0)
    for number in range(READINGS):
        for took in (0, 6000 + number):
            pace.beaten("b", took, len(USUAL))
    assert pace.slow("b") > 2, "too few steps to tell are no steps"
    assert READINGS == 12


def test_a_measurement_takes_so_many_readings_and_much_is_twice_as_long() -> None:
    pace = Pace()
    pace.beaten("b", 1024, 2)
    found = []
    for base in (1024, 2048):
        for number in range(READINGS):
            took = 8 * base if number == 0 else base + number % 2 * base // 512
            pace.beaten("a", took, 2)
            found.append(pace.slow("a"))
    assert found == [0.0] * (2 * READINGS - 1) + [2.0]
    pace.beaten("a", 2047, 2)
    pace.beaten("a", 2046, 2)
    assert pace.slow("a") == 0


def test_nothing_is_measured_while_a_member_does_not_tell() -> None:
    pace = Pace()
    for number in range(5 * READINGS):
        pace.beaten("c", 0, 3)
        pace.beaten("b", 1000 + number, 3)
        pace.beaten("a", (1000 if number < 2 * READINGS else 9000) + number, 3)
    assert not pace._shares


def test_who_was_slow_is_shunned_for_an_hour() -> None:
    shunned = Shunned()
    shunned.note("a", 0.0)
    for now, over in ((SHUN_SECONDS - 0.1, set()), (SHUN_SECONDS, {"a", "y"})):
        shunned.note("", now)
        assert shunned.over("xy", frozenset("x"), frozenset("ay")) == over


NODES = "abcde"


@given(
    st.lists(
        st.tuples(st.sets(st.sampled_from(NODES)), st.sets(st.sampled_from(NODES)), st.integers(1, 3000)),
        max_size=40,
    )
)
def test_rings_do_not_swap_slow_members_back_and_forth(
    moments: list[tuple[set[str], set[str], int]],
) -> None:
    """Whoever is slow and whoever is there: who was slow within the hour comes into no ring."""
    ring, shunned, now = ["a", "b", "c"], Shunned(), 0.0
    was_slow: dict[str, float] = {}
    for hot, there, seconds in moments:
        now += seconds
        slow = frozenset(hot.intersection(ring))
        shunned.note(slow, now)
        was_slow.update(dict.fromkeys(slow, now))
        over = shunned.over(ring, slow, frozenset(there.union(ring)))
        come = {node for node in over if node not in ring}
        assert not come & {node for node, at in was_slow.items() if now - at < SHUN_SECONDS}
        if over:
            assert slow
            assert not slow & over
            assert over.issuperset(set(ring) - slow)
            ring = sorted(over)[:3]
            assert len(ring) == 3
        else:
            able = (there - set(ring)) - {one for one, at in was_slow.items() if now - at < SHUN_SECONDS}
            assert len(able) < len(slow) or not slow
