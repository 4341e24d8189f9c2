"""Orders of a ring by the links between its members."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, permutations

from hypothesis import given
from hypothesis import strategies as st

from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.links import ASSUMED, NO_WAY, WORTH, Link, Network

WIFI, CABLE = Link(2e-3, 5e6), Link(1e-4, 1e9)


def machines(names: str) -> list[Candidate]:
    return [Candidate(name, name, 0, 0) for name in names]


def network(**links: Link) -> Network:
    """Links by the two letters of their ends."""
    return Network(links={frozenset(pair): link for pair, link in links.items()})


def names(order: list[Candidate]) -> str:
    return "".join(one.id for one in order)


def test_a_ring_goes_along_its_cables_and_closes_over_the_slow_link() -> None:
    known = network(ab=WIFI, bc=CABLE, ac=CABLE)
    orders = list(map(list, permutations(machines("abc"))))
    assert names(known.fastest_first(orders)[0]) == "acb"


def test_an_order_stays_where_nothing_is_known_or_links_are_alike() -> None:
    orders = list(map(list, permutations(machines("abcd"))))
    alike = {frozenset(pair): Link(1e-4, 1e9 + n) for n, pair in enumerate(combinations("abcd", 2))}
    for known in (Network(), Network(links=alike), network(ab=ASSUMED)):
        assert known.fastest_first(orders) == orders


def test_of_many_members_each_is_followed_by_the_one_that_is_fastest_to_reach() -> None:
    known = Network(WIFI, {frozenset(pair): CABLE for pair in pairwise("agbfced")})
    assert names(known.chain(machines("abcdefg"))) == "agbfced"


def test_in_twenty_random_topologies_no_ring_uses_a_pair_without_a_way_that_it_can_avoid() -> None:
    draw = random.Random(33)
    for _ in range(20):
        links = {frozenset(pair): draw.choice([NO_WAY, WIFI, CABLE]) for pair in combinations("abcde", 2)}
        known = Network(links=links)
        orders = list(map(list, permutations(machines("abcde"))))

        def lacking(order: list[Candidate], known: Network = known) -> int:
            pairs = pairwise([*order, order[0]])
            return sum(known.between(one.id, other.id) == NO_WAY for one, other in pairs)

        assert lacking(known.fastest_first(orders)[0]) == min(map(lacking, orders))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1, 1e12)), min_size=6, max_size=6))
def test_the_first_order_is_worth_as_much_as_any(drawn: list[tuple[float, float]]) -> None:
    links = zip(combinations("abcd", 2), drawn, strict=True)
    known = Network(links={frozenset(pair): Link(*figures) for pair, figures in links})
    orders = list(map(list, permutations(machines("abcd"))))
    found = known.fastest_first(orders)
    assert sorted(map(names, found)) == sorted(map(names, orders))
    assert known.round_seconds(found[0]) <= WORTH * min(map(known.round_seconds, orders))
